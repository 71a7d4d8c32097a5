"""FP8 linear layers of transformers models, alone and beside an FP8 KV cache."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from octavo import (
    CalibrationSettings,
    ConfigError,
    Recipe,
    UnsupportedError,
    apply_,
    calibrate_linear,
    quantize_,
    restore_,
)
from octavo.integrations.linear import plan_linear
from octavo.integrations.transformers import kv_cache
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.numerics.granularity import parse_granularity
from octavo.numerics.quantize import quantize
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo_testkit.models.text_models import VISION_LANGUAGE, make_decoder, make_prompts

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PER_TOKEN = {"granularity": "token"}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make(family="llama", **changes):
    return make_decoder(family, **(MOE if family == "qwen3_moe" else {}), **changes)


def run(model, ids=None):
    ids = make_prompts(1, 23)["input_ids"] if ids is None else ids
    return model(input_ids=ids, use_cache=False).logits


def fp8_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]


def imitate(model, settings, scales=None):
    """The same model in float32, rounding the operands of every product that FP8 would round."""
    model = copy.deepcopy(model)
    weight, activation = (
        None if word is None else parse_granularity(word)
        for word in (settings.weight, settings.activation)
    )

    def round_input(name):
        scale = None if scales is None else torch.tensor(scales.inputs[name])

        def hook(module, args):
            rows = args[0].reshape(-1, args[0].shape[-1])
            rounded = quantize(rows, activation, scale=scale).dequantize()
            return (rounded.reshape(args[0].shape),)

        return hook

    for name in plan_linear(model).chosen:
        module = model.get_submodule(name)
        module.weight.copy_(quantize(module.weight, weight).dequantize())
        if activation is not None:
            module.register_forward_pre_hook(round_input(name))
    return model


SETTINGS = {
    "default": {},
    "per tensor": {"weight": "tensor", "activation": "tensor"},
    "blocks": {"weight": "block 128x128"},
    "weight only": {"activation": None},
    "static": {"scaling": "static"},
}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits_lose_what_rounding_the_operands_loses(family, options):
    model, settings = make(family), LinearSettings(**options)
    truth = run(model)
    scales = None
    if settings.scaling == "static":
        batches = [{"input_ids": make_prompts(1, 23)["input_ids"], "use_cache": False}]
        scales = calibrate_linear(model, batches, CalibrationSettings(margin=1.0))
    expected = run(imitate(model, settings, scales))
    quantize_(model, settings, scales=scales)
    actual = run(model)
    assert_within_budget(actual, truth=truth, model=expected)
    assert relative_rms(actual, truth) > 0.01  # it is quantized


def test_what_is_replaced_in_llama():
    model = make()
    changes = quantize_(model)
    expected = [f"model.layers.{i}.self_attn.{name}" for i in range(4) for name in PROJECTIONS]
    expected += [f"model.layers.{i}.mlp.{name}" for i in range(4) for name in MLP]
    assert sorted(fp8_layers(model)) == sorted(changes.layers["linear"]) == sorted(expected)
    assert changes.left["linear"] == {"lm_head": "an output head"}
    assert model.dtype == torch.float32


def test_a_tied_head_stays():
    model = make(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    changes = quantize_(model)
    assert changes.left["linear"].keys() == {"lm_head"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_routers_and_experts_in_one_tensor_are_named():
    model = make("qwen3_moe")
    changes = quantize_(model)
    assert len(changes.layers["linear"]) == 4 * len(PROJECTIONS)
    left = changes.left["linear"]
    assert left["model.layers.1.mlp.experts"] == "Qwen3MoeExperts, not a plain nn.Linear"
    assert "model.layers.1.mlp.gate" in left
    text = str(changes)
    assert "linear: 4 layers stay as they are (Qwen3MoeExperts, not a plain nn.Linear)" in text


def test_layers_that_a_model_keeps_in_float32_stay():
    """T5 casts what it gives to wo to the dtype of wo's weight."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, vocab_size=64, feed_forward_proj="gated-gelu")
    model = transformers.T5EncoderModel(config).eval()
    ids = torch.arange(1, 9)[None]
    truth = model(input_ids=ids).last_hidden_state
    changes = quantize_(model)
    assert {name.rpartition(".")[2] for name in changes.layers["linear"]} == set("qkvo") | {
        "wi_0",
        "wi_1",
    }
    assert set(changes.left["linear"].values()) == {"its model keeps it in float32"}
    assert relative_rms(model(input_ids=ids).last_hidden_state, truth) < 0.1


def test_a_model_without_plain_linear_layers():
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    with pytest.raises(ConfigError, match="got none in GPT2LMHeadModel; .*Conv1D, not a plain"):
        quantize_(transformers.GPT2LMHeadModel(config))


def test_the_tower_of_a_vision_language_model_can_be_left():
    model = make(VISION_LANGUAGE)
    changes = quantize_(model, ignored_layers=["visual"])
    assert not any("visual" in name for name in changes.layers["linear"])
    assert any("visual" in name for name in changes.left["linear"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_generation_in_16_bits(dtype):
    model = make(dtype=dtype)
    quantize_(model)
    prompts = make_prompts(2, 9)
    tokens = model.generate(**prompts, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, 13)
    assert run(model).dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_it_compiles_to_one_graph(family):
    model = make(family)
    quantize_(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = make_prompts(1, 23)["input_ids"]
    assert relative_rms(run(compiled, ids), run(model, ids)) < 1e-5


def test_a_kv_cache_and_linear_layers_together():
    model, other = make(), make()
    recipe = Recipe(kv_cache=PER_TOKEN, linear="fp8", ignored_layers=["mlp"], skip_layers=["0"])
    changes = apply_(model, recipe)
    assert changes.layers.keys() == {"kv_cache", "linear"}
    assert len(changes.layers["linear"]) == 16 and len(changes.layers["kv_cache"]) == 3
    apply_(other, Recipe(kv_cache=PER_TOKEN, skip_layers=["0"]))
    quantize_(other, ignored_layers=["mlp"])
    prompts = make_prompts(2, 9)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert_same_bits(model.generate(**prompts, **options), other.generate(**prompts, **options))


def test_restore_raises_before_anything_changes():
    model = make()
    apply_(model, Recipe(kv_cache=PER_TOKEN, linear="fp8"))
    before = run(model)
    with pytest.raises(UnsupportedError, match="28 that are FP8 now"):
        restore_(model)
    assert_same_bits(run(model), before)
    assert kv_cache.detach(model)  # it was still there
    other = make()
    apply_(other, Recipe(kv_cache=PER_TOKEN))
    restore_(other)


def test_what_fails_leaves_all_of_it_as_it_was():
    model = make()
    before = run(model)
    for fields, said in [
        ({"ignored_layers": ["img_mlp"]}, "matches none of"),
        ({"linear": {"scaling": "static"}, "scales": {"a": {"input": 1.0}}}, "got none; the 1 la"),
    ]:
        with pytest.raises(Exception, match=said):
            apply_(model, Recipe(**{"kv_cache": PER_TOKEN, "linear": "fp8"} | fields))
        assert not fp8_layers(model) and not kv_cache.detach(model)
    with pytest.raises(UnsupportedError):
        apply_(model, Recipe(vision_attention="fp8", linear="fp8"))
    assert not fp8_layers(model)
    assert_same_bits(run(model), before)


def test_static_linear_layers_beside_a_static_cache():
    """One file has the scales of both."""
    model = make()
    ids = make_prompts(1, 23)["input_ids"]
    batches = [{"input_ids": ids, "use_cache": False}]
    inputs = calibrate_linear(model, batches).to_dict()["layers"]
    attention = {f"model.layers.{i}.self_attn": {"q": 0.1, "k": 0.1, "v": 0.1} for i in range(4)}
    recipe = Recipe(
        kv_cache={"scaling": "static"}, linear={"scaling": "static"}, scales=attention | inputs
    )
    assert Recipe.from_json(recipe.to_json()) == recipe
    changes = apply_(model, recipe)
    assert len(changes.layers["linear"]) == 28 and len(changes.layers["kv_cache"]) == 4
    # Dynamic parts do not look into scales that are another's.
    other = make()
    apply_(other, recipe.replace(kv_cache=PER_TOKEN, scales=inputs))


def test_a_peft_adapter_on_top():
    peft = pytest.importorskip("peft")
    model = make(dtype=torch.bfloat16)
    quantize_(model)
    before = run(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    layer = adapted.base_model.model.model.layers[1].self_attn.q_proj
    assert isinstance(layer.base_layer, Fp8Linear)
    x = torch.randn(3, 64).bfloat16()
    low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    added = (x.to(low.dtype) @ low.t() @ high.t()) * layer.scaling["default"]
    assert relative_rms(layer(x), layer.base_layer(x) + added) < 0.01
    after = run(adapted)
    assert relative_rms(after, before) > 0.01
    with adapted.disable_adapter():
        assert_same_bits(run(adapted), before)
    with pytest.raises((RuntimeError, NotImplementedError), match="Float8"):
        adapted.merge_adapter()
    assert_same_bits(run(adapted), after)


def test_an_adapter_from_a_file_has_its_own_numbers(tmp_path):
    """peft makes adapters in the dtype of the weight below, here FP8, before it loads them."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    trained = peft.get_peft_model(make(dtype=torch.bfloat16), config)
    trained.save_pretrained(tmp_path)
    model = make(dtype=torch.bfloat16)
    quantize_(model)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    expected = {name: x for name, x in trained.named_parameters() if "lora_" in name}
    found = {name: x for name, x in adapted.named_parameters() if "lora_" in name}
    assert found.keys() == expected.keys() and found
    for name, x in found.items():
        assert torch.equal(x.float(), expected[name].float())


@pytest.mark.parametrize("is_static", [False, True])
def test_a_vision_tower_with_both(is_static):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes)).eval()
    pixels = {"pixel_values": torch.randn(1, 3, 32, 32)}
    truth = model(**pixels).last_hidden_state
    recipe = Recipe(vision_attention="fp8", linear="fp8")
    if is_static:  # dynamic attention does not look into the scales of linear layers
        scales = calibrate_linear(model, [pixels]).to_dict()
        recipe = recipe.replace(linear={"scaling": "static"}, scales=scales)
    changes = apply_(model, recipe)
    assert {field: len(names) for field, names in changes.layers.items()} == {
        "vision_attention": 2,
        "linear": 12,
    }
    assert 0 < relative_rms(model(**pixels).last_hidden_state, truth) < 0.1
