"""Projections that `apply_` joins: which they are, and that a model lives on as without."""

import copy
import io

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from octavo import Recipe, apply_, calibrate_linear, quantize_
from octavo.integrations.linear import read_saturation
from octavo.integrations.transformers import joint_projections
from octavo.layers.joint_linear import JointLinear, JointPart
from octavo.layers.linear import Fp8Linear
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.text_models import VISION_LANGUAGE, make_decoder, make_prompts

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DENSE = ("llama", "qwen3", "smollm3", "mistral", "gemma2", "gemma3_text")
AUDIO = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
FFN = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make(family="llama", **changes):
    # With biases: they are parameters, which are copied and moved in another way than weights.
    options = (
        MOE if family == "qwen3_moe" else {"attention_bias": True} if family == "llama" else {}
    )
    return make_decoder(family, **options, **changes)


def run(model):
    return model(input_ids=make_prompts(1, 23)["input_ids"], use_cache=False).logits


def joints(model):
    return list({id(p.joint): p.joint for p in model.modules() if type(p) is JointPart}.values())


def split_(model):
    for joint in joints(model):
        joint.split_()
    return model


def quantized(**options):
    quantize_(model := make(), **options)
    return model, run(split_(copy.deepcopy(model)))


def children(groups):
    """What groups of full names are called in their modules."""
    return [tuple(name.rpartition(".")[2] for name in group) for group in groups]


@pytest.mark.parametrize("family", [*DENSE, "qwen3_moe", "gpt_oss", VISION_LANGUAGE])
def test_a_decoder_layer_has_four_products(family, monkeypatch):
    model = make(family)
    changes = quantize_(model)
    groups = changes.joint["linear"]
    kinds = (ATTENTION, MLP) if family in (*DENSE, VISION_LANGUAGE) else (ATTENTION,)
    num_layers = model.config.get_text_config().num_hidden_layers
    assert sorted(children(groups)) == sorted(kinds * num_layers)
    told = f", {sum(map(len, groups))} of them joined into {len(groups)} products"
    assert f"linear: {len(changes.layers['linear'])} layers{told}\n" in f"{changes}\n"
    expected = run(split_(copy.deepcopy(model)))
    alone, take = [], JointLinear.take

    def noted(joint, index, input):
        part = take(joint, index, input)
        alone.extend([joint.layers[index].name] if part is None else [])
        return part

    monkeypatch.setattr(JointLinear, "take", noted)
    assert_same_bits(run(model), expected)
    # All parts were of the first one's input, and all were taken.
    assert not alone and all(joint._open is None for joint in joints(model))


@pytest.mark.parametrize(
    "config",
    [
        transformers.WhisperConfig(**AUDIO, **HEADS, **FFN, **TOKENS),
        transformers.BartConfig(**AUDIO, **HEADS, **FFN, **TOKENS),
        transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_that_may_be_of_two_inputs_is_left(config):
    model = transformers.AutoModel.from_config(config).eval()
    changes = quantize_(model)
    assert any(name.endswith("k_proj") for name in changes.layers["linear"])
    assert changes.joint == {"linear": []} and "joined" not in str(changes)


def test_the_attention_of_a_decoder_to_itself_is_joined_beside_cross_attention():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, **TOKENS}
    layers = {f"{kind}_num_hidden_layers": 1 for kind in ("encoder", "decoder")}
    heads = {f"{kind}_num_attention_heads": 2 for kind in ("encoder", "decoder")}
    config = transformers.MoonshineConfig(**sizes, **layers, **heads)
    changes = quantize_(transformers.MoonshineModel(config).eval())
    names = [f"decoder.layers.0.self_attn.{name}" for name in ATTENTION]
    assert changes.joint["linear"] == [tuple(names)]


def test_layers_with_the_keys_of_others_and_modules_of_others_are_left():
    model = make()
    model.model.layers[0].self_attn.is_kv_shared_layer = True
    groups = quantize_(model).joint["linear"]
    assert children(groups) == [MLP] + 3 * [ATTENTION, MLP]

    class Gated(torch.nn.Module):  # whatever its forward does
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    assert quantize_(Gated()).joint == {"linear": []}


def test_a_part_of_a_model_is_joined():
    assert len(quantize_(make().model.layers[1]).joint["linear"]) == 2
    assert len(quantize_(torch.nn.ModuleList([make().model.layers[1].mlp])).joint["linear"]) == 1


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"ignored_layers": ["q_proj"]}, [MLP]),
        ({"weight_only_layers": ["up_proj"]}, [ATTENTION]),
        ({"weight_only_layers": ["mlp"]}, [ATTENTION, MLP]),
        ({"config": {"activation": None}}, [ATTENTION, MLP]),
        ({"config": {"weight": "tensor"}}, []),
        ({"config": {"weight": "block 128x128"}}, [MLP]),  # 64 and 32 outputs are no whole blocks
    ],
    ids=str,
)
def test_what_breaks_a_group(options, kinds):
    model = make()
    groups = quantize_(model, **options).joint["linear"]
    assert set(children(groups)) == set(kinds)
    assert_same_bits(run(model), run(split_(copy.deepcopy(model))))


def test_static_layers_count_together(monkeypatch):
    model = make()
    scales = calibrate_linear(model, [make_prompts(1, 23)])
    changes = quantize_(model, {"scaling": "static"}, scales=scales)
    assert set(children(changes.joint["linear"])) == {ATTENTION, MLP}
    expected = run(split_(copy.deepcopy(model)))
    assert_same_bits(run(model), expected)
    found = read_saturation(model)
    attention = [found[f"model.layers.0.self_attn.{name}"] for name in ATTENTION]
    assert len(found) == 28 and len(set(attention)) == 1
    assert attention[0].num_values == 23 * 64  # not once for each of the three


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_model_that_is_moved_stays_joined(dtype):
    model, _ = quantized()
    alone = split_(copy.deepcopy(model)).to(dtype)
    model.to(dtype)
    assert len(joints(model)) == 8
    assert_same_bits(run(model), run(alone))


def test_copies_and_saved_modules_stay_joined():
    model, expected = quantized()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        found = joints(other)
        assert len(found) == 8 and not set(map(id, found)) & set(map(id, joints(model)))
        assert_same_bits(run(other), expected)


def test_state_dicts_are_those_of_separate_layers():
    model, expected = quantized()
    alone = split_(copy.deepcopy(model)).state_dict()
    state = model.state_dict()
    assert state.keys() == alone.keys()
    for name, x in state.items():
        assert_same_bits(x, alone[name])
    for source, target in ((state, split_(quantized()[0])), (alone, quantized()[0])):
        for x in target.state_dict().values():
            x.zero_()
        target.load_state_dict(source)
        assert_same_bits(run(target), expected)


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
def test_what_is_saved_is_loaded(tmp_path, shard_size):
    model, expected = quantized()
    folders = [tmp_path / name for name in ("joint", "alone")]
    for one, folder in zip((model, split_(copy.deepcopy(model))), folders, strict=True):
        one.save_pretrained(folder, max_shard_size=shard_size)
    sizes = [sum(f.stat().st_size for f in folder.iterdir()) for folder in folders]
    assert abs(sizes[0] - sizes[1]) < 2000  # nothing is there twice
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folders[0], attn_implementation="eager"
    )
    assert_same_bits(run(loaded), expected)


@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj", "up_proj"], [*ATTENTION, *MLP]])
def test_adapters_stand_on_parts_of_a_product(targets):
    peft = pytest.importorskip("peft")
    model, before = quantized()
    other = split_(copy.deepcopy(model))
    outcomes = []
    for one in (model, other):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        adapted = peft.get_peft_model(one, config).eval()
        outcomes.append(run(adapted))
        with adapted.disable_adapter():
            assert_same_bits(run(adapted), before)
    assert len(joints(model)) == 8 and not joints(other)
    assert_same_bits(*outcomes)
    assert not torch.equal(outcomes[0], before)


@pytest.mark.parametrize("with_buffers", [False, True])
def test_a_model_that_is_offloaded(with_buffers):
    accelerate = pytest.importorskip("accelerate")
    model, expected = quantized()
    device = torch.device("cpu")
    accelerate.cpu_offload(model, execution_device=device, offload_buffers=with_buffers)
    for _ in range(2):
        assert_same_bits(run(model), expected)
    # A product of weights that are put aside would keep them all.
    assert len(joints(model)) == (0 if with_buffers else 8)


def test_hooks_that_keep_the_forward():
    hooks = pytest.importorskip("accelerate.hooks")
    model, expected = quantized()
    for part in model.modules():
        if isinstance(part, Fp8Linear):
            hooks.add_hook_to_module(part, hooks.AlignDevicesHook(torch.device("cpu")))
    assert_same_bits(run(model), expected)
    split_(model)
    assert_same_bits(run(model), expected)
    hooks.remove_hook_from_module(model, recurse=True)
    assert_same_bits(run(model), expected)


def test_a_cache_in_fp8_beside_joint_layers(monkeypatch):
    recipe = Recipe(kv_cache={"granularity": "token"}, linear="fp8")
    prompts, options = make_prompts(2, 9), {"max_new_tokens": 4, "do_sample": False}
    answers = []
    for join in (joint_projections.join_projections_, lambda model: []):
        monkeypatch.setattr(joint_projections, "join_projections_", join)
        apply_(model := make(), recipe)
        answers.append(model.generate(**prompts, **options))
    assert_same_bits(*answers)


def test_it_compiles_to_one_graph():
    model, expected = quantized()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(compiled), expected, rtol=1e-4, atol=1e-4)
