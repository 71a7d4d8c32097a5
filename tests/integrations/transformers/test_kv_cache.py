"""KV caches of transformers models: stock generate() over octavo's pages, plain and in FP8."""

import copy
import json
import pickle
import warnings

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import transformers
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, StaticCache

from octavo import Recipe, apply_, restore_
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration
from octavo.calibration.scale_file import ScaleSet, save_scales
from octavo.errors import CapacityError, CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.checkpoints.export import export_checkpoint
from octavo.integrations.transformers import kv_cache, text
from octavo.integrations.transformers.calibrate import observe_text
from octavo.integrations.transformers.paged_cache import PagedLayer
from octavo.integrations.transformers.paged_steps import PAGE_SIZE
from octavo.integrations.transformers.saturation import read_saturation
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.quantize import quantize
from octavo_testkit.models.image_models import make_model
from octavo_testkit.models.text_models import (
    FAMILIES,
    VOCABULARY,
    few,
    make_decoder,
    make_prompts,
)

pytestmark = pytest.mark.filterwarnings("ignore:the model brings no scales")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def forward_in_parts(model, prompts, splits=(), cache=None):
    """Logits of all columns, the prompt given in parts that end at `splits`."""
    mask, parts, start = prompts["attention_mask"], [], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for stop in (*splits, mask.shape[1]):
        result = model(
            input_ids=prompts["input_ids"][:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache, start = result.past_key_values, stop
        parts.append(result.logits)
    return torch.cat(parts, 1)


def plain(model):
    """The model over pages that hold keys and values as they are."""
    assert kv_cache.attach(model, None) == []
    return model


@pytest.mark.parametrize("family", few("llama", "gpt_oss"))
def test_logits_over_pages_are_those_of_transformers(family):
    model, prompts = make_decoder(family), make_prompts(3, 330)
    real = prompts["attention_mask"].bool()
    expected = forward_in_parts(model, prompts)[real]
    assert expected.std() > 0.3
    plain(model)
    # One part; one column at a time at last; parts that end in the middle of pages and windows.
    for splits in ((), (1,), (290, 291, 292), (5, 64, 65, 128, 200), tuple(range(320, 330))):
        found = forward_in_parts(model, prompts, splits)[real]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    kv_cache.detach(model)
    assert torch.equal(forward_in_parts(model, prompts)[real], expected)


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
    "static beams": {"cache_implementation": "static", "num_beams": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_same_tokens(family, way):
    model, prompts = make_decoder(family), make_prompts(2, 20)
    options = {"max_new_tokens": 12, "do_sample": False, **WAYS[way]}

    def generate():
        torch.manual_seed(5)
        return model.generate(**prompts, **options)

    expected = generate()
    assert len(expected[:, 20:].unique()) > 2
    plain(model)
    assert torch.equal(generate(), expected)


def test_a_wrong_page_would_be_seen():
    model, prompts = make_decoder("llama"), make_prompts(2, 70)
    expected = forward_in_parts(model, prompts, (69,))[:, -1]
    plain(model)
    cache = DynamicCache(config=model.config)
    forward_in_parts(model, {name: x[:, :69] for name, x in prompts.items()}, (), cache)
    cache.layers[2].key_pages[1] = 0  # the second page of the first sequence
    last = {"input_ids": prompts["input_ids"][:, 69:], "attention_mask": prompts["attention_mask"]}
    positions = prompts["attention_mask"].sum(1, keepdim=True) - 1
    found = model(**last, position_ids=positions, past_key_values=cache).logits[:, -1]
    assert (found[0] - expected[0]).abs().max() > 1e-3
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=2e-5)


SETTINGS = {
    "tensor": "fp8",
    "e5m2": "fp8_e5m2",
    "head": {"granularity": "head", "scaling": "unit"},
    "token": {"granularity": "token"},
}


def simulate(model, settings):
    """Give a stock model attention that rounds keys and values, and queries of a prefill.

    An independent model of what FP8 does, in plain torch, for prompts in one part.
    """
    granularity = {"head": PerHead(), "token": PerToken()}.get(settings, PerTensor())
    from octavo.numerics.formats import E4M3, E5M2

    fmt = E5M2 if settings == "e5m2" else E4M3

    def rounded(x, granularity, fmt, is_unit):
        rows = x.transpose(1, 2)  # [batch, tokens, heads, head_dim], as scales see it
        scale = None
        if is_unit:
            shape = (rows.shape[2],) if granularity == PerHead() else ()
            scale = torch.ones(shape)
        return quantize(rows, granularity, fmt, scale=scale).dequantize().transpose(1, 2)

    def attend(module, query, key, value, attention_mask, **kwargs):
        is_unit = settings != "token"
        key, value = (rounded(x, granularity, fmt, is_unit) for x in (key, value))
        if settings != "e5m2":
            query = rounded(query, PerTensor(), E4M3, False)
        eager = __import__(type(module).__module__, fromlist=["x"]).eager_attention_forward
        return eager(module, query, key, value, attention_mask, **kwargs)

    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("rounded", attend)
    AttentionMaskInterface.register("rounded", eager_mask)
    model.set_attn_implementation("rounded")
    return model


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_is_within_the_budget_of_its_rounding(family, settings):
    model, prompts = make_decoder(family), make_prompts(1, 200)
    exact = model(**prompts).logits
    model_of_it = simulate(make_decoder(family), settings)(**prompts).logits
    apply_(model, Recipe(kv_cache=SETTINGS[settings]))
    found = model(**prompts).logits
    budget = (model_of_it - exact).norm() / exact.norm()
    error = (found - exact).norm() / exact.norm()
    # P is rounded, too, in the products of a prefill: as much as values are.
    assert 0 < error <= 1.5 * budget < 0.3
    restore_(model)
    assert torch.equal(model(**prompts).logits, exact)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_fp8_generates_with_beams_padding_and_parts(family):
    model, prompts = make_decoder(family), make_prompts(3, 40)
    # Static scales of queries, too: dynamic ones are those of each part.
    scales = {name: dict.fromkeys("qkv", 0.01) for name in text.find_layers(model)}
    apply_(model, Recipe(kv_cache={"scaling": "static"}, scales=scales))
    whole = forward_in_parts(model, prompts)
    parts = forward_in_parts(model, prompts, (39,))
    # The last column is decoded, its queries and P as they are; what is stored is the same.
    real = prompts["attention_mask"][:, :39].bool()
    torch.testing.assert_close(whole[:, :39][real], parts[:, :39][real], rtol=1e-5, atol=1e-5)
    assert 0 < (whole[:, 39] - parts[:, 39]).norm() / whole[:, 39].norm() < 0.1
    dynamic = model.generate(**prompts, max_new_tokens=6, num_beams=2, do_sample=False)
    static = model.generate(
        **prompts,
        max_new_tokens=6,
        num_beams=2,
        do_sample=False,
        cache_implementation="static",
    )
    assert torch.equal(dynamic, static)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_a_static_step_compiles_in_one_graph(family):
    model, prompts = make_decoder(family), make_prompts(2, 20)
    apply_(model, Recipe(kv_cache="fp8"))

    def run(step):
        cache = StaticCache(config=model.config, max_cache_len=64)
        mask = prompts["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = [model(**prompts, position_ids=positions, past_key_values=cache).logits[:, -1:]]
        for _ in range(5):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            result = step(
                input_ids=found[-1].argmax(-1),
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
            )
            found.append(result.logits)
        return torch.cat(found, 1)

    expected, graphs = run(model), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    assert torch.equal(run(torch.compile(model, backend=backend, fullgraph=True)), expected)
    assert len(graphs) <= 2  # the second is for masks of any length


def test_the_text_of_a_vision_language_model():
    model = make_model().float()
    ids = torch.randint(2, 100, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    changes = apply_(model, Recipe(vision_attention="fp8", kv_cache="fp8"))
    assert changes.layers["kv_cache"] == ["model.language_model.layers.0.self_attn"]
    assert len(changes.layers["vision_attention"]) == 2
    model.generate(ids, max_new_tokens=6, do_sample=False)
    assert restore_(model).layers == changes.layers
    plain(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)


def test_skipped_layers_keep_their_dtype():
    model, prompts = make_decoder("gemma3_text"), make_prompts(1, 20)
    recipe = Recipe(kv_cache="fp8", skip_layers=["sliding_window"])
    assert apply_(model, recipe).layers["kv_cache"] == ["model.layers.5.self_attn"]
    cache = model(**prompts).past_key_values
    assert list(read_saturation(model)) == ["model.layers.5.self_attn"]
    dtypes = [layer.key_pages.dtype for layer in cache.layers]
    assert dtypes == [torch.float32] * 5 + [torch.float8_e4m3fn]
    restore_(model)
    names = apply_(model, Recipe(kv_cache="fp8", skip_layers=["0-1", "re:5.self"])).layers
    assert names == {"kv_cache": [f"model.layers.{i}.self_attn" for i in (2, 3, 4)]}
    restore_(model)
    with pytest.raises(ConfigError, match="leaves none of the 6 layers"):
        apply_(model, Recipe(kv_cache="fp8", skip_layers=["0-5"]))
    with pytest.raises(ConfigError, match="matches no"):
        apply_(model, Recipe(kv_cache="fp8", skip_layers=["9"]))
    with pytest.raises(ConfigError):
        restore_(model)


def test_layers_of_another_kind_are_named():
    model = make_decoder(
        "qwen3_next",
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    prompts = {"input_ids": make_prompts(1, 30)["input_ids"]}
    expected = model.generate(**prompts, max_new_tokens=6, do_sample=False)
    plain(model)
    assert torch.equal(model.generate(**prompts, max_new_tokens=6, do_sample=False), expected)
    kv_cache.detach(model)
    changes = apply_(model, Recipe(kv_cache="fp8"))
    assert changes.layers == {"kv_cache": ["model.layers.3.self_attn"]}
    assert changes.left["kv_cache"] == {
        f"model.layers.{i}.linear_attn": "Qwen3NextGatedDeltaNet" for i in range(3)
    }
    assert "linear_attn stays as it is (Qwen3NextGatedDeltaNet)" in str(changes)


def test_latent_attention_is_refused():
    sizes = dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16)
    sizes |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    model = make_decoder("deepseek_v3", **sizes, first_k_dense_replace=4)
    with pytest.raises(UnsupportedError, match="DeepseekV3Attention"):
        apply_(model, Recipe(kv_cache="fp8"))
    assert len(text.find_others(model)) == 4


def test_a_cache_grows_and_keeps_what_it_has():
    model, prompts = make_decoder("llama"), make_prompts(2, 700)
    expected = forward_in_parts(model, prompts)[:, -1]
    plain(model)
    cache = DynamicCache(config=model.config)
    found = forward_in_parts(model, prompts, tuple(range(60, 700, 40)), cache)[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    layer = cache.layers[0]
    assert layer.get_seq_length() == 700 and layer.capacity % PAGE_SIZE == 0
    assert 700 <= layer.capacity <= 700 + 256 + PAGE_SIZE
    assert layer.nbytes == 2 * 2 * layer.capacity * 2 * 16 * 4


def test_a_static_cache_that_is_full_takes_no_more():
    model, prompts = make_decoder("llama"), make_prompts(1, 30)
    apply_(model, Recipe(kv_cache="fp8"))
    cache = StaticCache(config=model.config, max_cache_len=31)
    model(**prompts, past_key_values=cache)
    token = prompts["input_ids"][:, :1]
    model(token, past_key_values=cache)
    with pytest.raises(RuntimeError, match="expected at most 31 tokens, got more"):
        model(token, past_key_values=cache)


def test_a_window_keeps_no_more_than_its_ring():
    model, prompts = make_decoder("mistral"), make_prompts(2, 900)
    plain(model)
    cache = model(**prompts).past_key_values
    assert {layer.capacity for layer in cache.layers} == {8 + 256 + 56 + PAGE_SIZE}


def test_fp8_pages_take_a_half_of_16_bits():
    model, prompts = make_decoder("llama", torch.bfloat16), make_prompts(1, 512)
    plain(model)
    full = sum(layer.nbytes for layer in model(**prompts).past_key_values.layers)
    kv_cache.detach(model)
    apply_(model, Recipe(kv_cache="fp8"))
    assert 2 * sum(layer.nbytes for layer in model(**prompts).past_key_values.layers) == full


def test_crop_and_reset():
    model, prompts = make_decoder("gemma2"), make_prompts(2, 50)
    plain(model)
    expected = forward_in_parts(model, prompts, (30,))
    cache = DynamicCache(config=model.config)
    first = {name: x[:, :45] for name, x in prompts.items()}
    forward_in_parts(model, first, (30,), cache)
    cache.crop(-15)
    assert cache.get_seq_length() == 30
    mask = prompts["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, 30:]
    rest = {"input_ids": prompts["input_ids"][:, 30:], "attention_mask": mask}
    found = model(**rest, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(found, expected[:, 30:], rtol=1e-4, atol=2e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = forward_in_parts(model, prompts, (30,), cache)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=2e-5)
    for _ in range(2):
        forward_in_parts(model, make_prompts(2, 300), (), cache)
        cache.reset()
    long = DynamicCache(config=model.config)
    forward_in_parts(model, make_prompts(2, 600), (), long)
    with pytest.raises(CapacityError, match="at most 312 tokens to remove"):
        long.layers[0].crop(-400)


def test_sequences_are_chosen_and_repeated():
    model, prompts = make_decoder("gpt_oss"), make_prompts(3, 30)
    plain(model)
    expected = forward_in_parts(model, prompts, (29,))[:, -1]
    cache = DynamicCache(config=model.config)
    forward_in_parts(model, {name: x[:, :29] for name, x in prompts.items()}, (), cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([2, 2, 0, 0])
    mask = prompts["attention_mask"][rows]
    found = model(
        input_ids=prompts["input_ids"][rows, 29:],
        attention_mask=mask,
        position_ids=mask.sum(1, keepdim=True) - 1,
        past_key_values=cache,
    ).logits[:, -1]
    torch.testing.assert_close(found, expected[rows], rtol=1e-4, atol=2e-5)


def test_without_a_cache_nothing_is_quantized():
    model, prompts = make_decoder("gemma2"), make_prompts(2, 40)
    real = prompts["attention_mask"].bool()
    expected = model(**prompts, use_cache=False).logits[real]
    apply_(model, Recipe(kv_cache="fp8"))
    found = model(**prompts, use_cache=False)
    assert found.past_key_values is None
    torch.testing.assert_close(found.logits[real], expected, rtol=1e-4, atol=2e-5)


def test_values_beyond_the_range_are_counted():
    model, prompts = make_decoder("llama"), make_prompts(2, 20)
    model.model.layers[1].self_attn.v_proj.weight.data *= 2000
    with pytest.warns(UserWarning, match="the model brings no scales"):
        apply_(model, Recipe(kv_cache="fp8"))
    model(**prompts)
    layers = [layer.self_attn.octavo_attention for layer in model.model.layers]
    assert [layer.saturated[0].item() for layer in layers] == [0, 0, 0, 0]
    assert layers[0].saturated[1] == 0 < layers[1].saturated[1]
    num_values = int(prompts["attention_mask"].sum()) * 2 * 16
    assert layers[1].saturated[1] <= num_values
    counts = read_saturation(model)
    assert list(counts) == list(text.find_layers(model))
    assert counts["model.layers.1.self_attn"] == tuple(layers[1].saturated.tolist())


def test_saturation_is_told_once_and_without_being_asked():
    model, prompts = make_decoder("llama"), make_prompts(2, 20)
    model.model.layers[1].self_attn.v_proj.weight.data *= 2000
    apply_(model, Recipe(kv_cache="fp8"))
    with pytest.warns(UserWarning, match=r"values lie beyond .*'model.layers.1.self_attn'.*wrong"):
        model.generate(**prompts, max_new_tokens=4, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**prompts, max_new_tokens=80, do_sample=False)
        copied = copy.deepcopy(model)
        restore_(model)
        settings = {"granularity": "token"}
        apply_(model, Recipe(kv_cache=settings))
        model.generate(**prompts, max_new_tokens=4, do_sample=False)
    assert read_saturation(model) == {} != read_saturation(copied)


def test_static_scales_by_both_names():
    model, prompts = make_decoder("llama"), make_prompts(1, 30)
    names = [f"model.layers.{i}.self_attn" for i in range(4)]
    tensor = {name: {"q": 0.01, "k": 0.02, "v": 0.03} for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_(model, Recipe(kv_cache={"scaling": "static"}, scales=tensor))
    layer = model.model.layers[2].self_attn.octavo_attention
    assert (layer.key_scale, layer.value_scale) == (torch.tensor(0.02), torch.tensor(0.03))
    assert layer.query_scale == torch.tensor(0.01)
    one = model(**prompts).logits
    restore_(model)
    heads = {"q_heads": [0.01] * 4, "k_heads": [0.02] * 2, "v_heads": [0.03] * 2}
    by_head = {f"{name}.attn": {**tensor[name], **heads} for name in names}
    settings = {"scaling": "static", "granularity": "head"}
    apply_(model, Recipe(kv_cache=settings, scales=by_head))
    assert torch.equal(model(**prompts).logits, one)
    restore_(model)
    apply_(model, Recipe(kv_cache={"scaling": "static"}, scales=by_head))  # the largest of heads
    assert torch.equal(model(**prompts).logits, one)
    restore_(model)
    with pytest.raises(ConfigError, match="expected scales for scaling 'static'"):
        kv_cache.attach(model, Recipe(kv_cache={"scaling": "static"}, scales=tensor).kv_cache)
    del tensor[names[3]]
    with pytest.raises(CheckpointError, match=r"expected scales for 'model\.layers\.3\.self_attn'"):
        apply_(model, Recipe(kv_cache={"scaling": "static"}, scales=tensor))


@pytest.mark.parametrize("is_per_head", [False, True])
def test_calibrated_scales_are_better_than_1(tmp_path, is_per_head):
    model, prompts = make_decoder("llama"), make_prompts(1, 200)
    for layer in model.model.layers:  # values that 1.0 would round away or cut
        layer.self_attn.v_proj.weight.data[:16] *= 1e-3
        layer.self_attn.k_proj.weight.data[16:] *= 3e3
        layer.self_attn.q_proj.weight.data[32:] /= 3e3
    exact = model(**prompts).logits
    layers = text.find_layers(model)
    calibration = Calibration(
        list(layers), CalibrationSettings(granularity="head" if is_per_head else "tensor")
    )
    with observe_text(model, calibration.see):
        model(make_prompts(1, 200, seed=7)["input_ids"], use_cache=False)
    file = tmp_path / "scales.json"
    save_scales(file, calibration.result().scales)
    errors = {}
    for scaling in ("unit", "static"):
        settings = {"granularity": "head" if is_per_head else "tensor", "scaling": scaling}
        given = {"scales": file} if scaling == "static" else {}
        apply_(model, Recipe(kv_cache=settings, **given))
        errors[scaling] = float((model(**prompts).logits - exact).norm() / exact.norm())
        restore_(model)
    assert errors["static"] < 0.1 < errors["unit"]


@pytest.mark.parametrize("is_per_head", [False, True])
def test_scales_that_come_with_the_weights(tmp_path, is_per_head):
    model, prompts = make_decoder("llama"), make_prompts(1, 30)
    model.save_pretrained(tmp_path / "model")
    names = list(text.find_layers(model))
    by_layer = {name: {"q": None, "k": 0.5 + i, "v": 0.25} for i, name in enumerate(names)}
    if is_per_head:
        heads = {"k_heads": [0.125, 0.5], "v_heads": [0.25, 0.0625]}
        by_layer = {name: {"q": None, "k": 0.5, "v": 0.25, **heads} for name in names}
    scales = ScaleSet.from_dict(by_layer)
    # Made for transformers as it is: compressed-tensors' own form wants that package to load.
    folder = tmp_path / "exported"
    if is_per_head:
        folder = tmp_path / "model"
        state = load_file(folder / "model.safetensors")
        for name in names:
            state[f"{name}.k_scale"] = torch.tensor([0.125, 0.5]).view(2, 1, 1)
            state[f"{name}.v_scale"] = torch.tensor([0.25, 0.0625]).view(2, 1, 1)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    else:
        export_checkpoint(tmp_path / "model", scales, folder, format="modelopt")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    if is_per_head:  # said only now: transformers would want compressed-tensors for it
        config = json.loads((folder / "config.json").read_text())
        scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": {**scheme, "symmetric": True},
        }
        (folder / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_(loaded, Recipe(kv_cache="fp8"))
    layer = loaded.model.layers[1].self_attn.octavo_attention
    assert not layer.counts_saturation and layer.query_scale is None
    expected = scales.layers[names[1]]
    assert layer.key_scale.tolist() == (list(expected.k) if is_per_head else expected.k)
    apply_(model, Recipe(kv_cache={"granularity": "head" if is_per_head else "tensor"}))
    for module, theirs in zip(model.model.layers, loaded.model.layers, strict=True):
        mine, theirs = module.self_attn.octavo_attention, theirs.self_attn.octavo_attention
        mine.key_scale.copy_(theirs.key_scale)
        mine.value_scale.copy_(theirs.value_scale)
    assert torch.equal(loaded(**prompts).logits, model(**prompts).logits)


def test_rounding_by_compressed_tensors_is_off_meanwhile():
    model = make_decoder("llama")
    module = model.model.layers[0].self_attn
    module.quantization_scheme = object()
    apply_(model, Recipe(kv_cache="fp8"))
    assert module.quantization_enabled is False
    assert not hasattr(model.model.layers[1].self_attn, "quantization_enabled")
    restore_(model)
    assert not hasattr(module, "quantization_enabled")  # which is on by default
    module.quantization_enabled = False
    apply_(model, Recipe(kv_cache="fp8"))
    restore_(model)
    assert module.quantization_enabled is False


def test_what_is_refused():
    model, prompts = make_decoder("llama"), make_prompts(2, 10)
    used = model(**prompts).past_key_values
    apply_(model, Recipe(kv_cache="fp8"))
    with pytest.raises(ConfigError, match="restore_ it first"):
        apply_(model, Recipe(kv_cache="fp8"))
    with pytest.raises(ConfigError, match="expected an empty cache"):
        model(**prompts, past_key_values=used)
    with pytest.raises(UnsupportedError, match=r"got one of shape \[2, 1, 10, 10\]"):
        model(prompts["input_ids"], attention_mask=torch.zeros(2, 1, 10, 10))
    with pytest.raises(UnsupportedError, match="packed sequences"):
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
        model(prompts["input_ids"][:1], position_ids=positions, use_cache=False)
    if hasattr(transformers, "QuantizedCache") and transformers.utils.is_hqq_available():
        with pytest.raises(UnsupportedError, match="expected a dynamic or static cache"):
            model(**prompts, past_key_values=transformers.QuantizedCache("hqq", model.config))
    module = model.model.layers[0].self_attn
    x = torch.zeros(1, 4, 2, 16)
    with pytest.raises(UnsupportedError, match=r"cap and window \(0.25, None, None\), got"):
        kv_cache.attend(module, x, x, x, None, scaling=0.25, sliding_window=8)
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(UnsupportedError, match="for inference, got dropout"):
        model(**prompts)


def test_copies_and_state():
    model, prompts = make_decoder("llama"), make_prompts(2, 10)
    apply_(model, Recipe(kv_cache="fp8"))
    expected = model(**prompts).logits
    assert torch.equal(copy.deepcopy(model)(**prompts).logits, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**prompts).logits, expected)
    other = make_decoder("llama")
    apply_(other, Recipe(kv_cache="fp8"))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    state["model.layers.0.self_attn.octavo_attention.key_scale"] += 1
    other.load_state_dict(state)
    assert other.model.layers[0].self_attn.octavo_attention.key_scale == 2
    model.to(torch.bfloat16)
    assert model.model.layers[0].self_attn.octavo_attention.key_scale.dtype == torch.float32


def test_stock_caches_that_users_bring():
    model, prompts = make_decoder("llama"), make_prompts(2, 10)
    real = prompts["attention_mask"].bool()
    expected = model(**prompts).logits[real]
    plain(model)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        found = model(**prompts, past_key_values=cache)
        torch.testing.assert_close(found.logits[real], expected, rtol=1e-4, atol=2e-5)
        assert all(isinstance(layer, PagedLayer) for layer in cache.layers)


def test_a_model_that_gives_its_mask_by_keyword():
    """AFMoE names the mask when it calls its attention."""
    torch.manual_seed(0)
    config = transformers.AfmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_dense_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model, prompts = transformers.AfmoeForCausalLM(config).eval(), make_prompts(2, 20)
    real = prompts["attention_mask"].bool()
    expected = forward_in_parts(model, prompts)[real]
    plain(model)
    found = forward_in_parts(model, prompts)[real]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
