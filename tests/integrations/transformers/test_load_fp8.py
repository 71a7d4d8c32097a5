"""FP8 checkpoints of other projects: their weights and scales as they are, running in FP8."""

import json
import re

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from octavo import CheckpointError, ConfigError, Recipe, apply_, load_fp8
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo_testkit.models import fp8_folders as folders
from octavo_testkit.models.fp8_folders import (
    BLOCK_FP8,
    HF_QUANT_CONFIG,
    MODELOPT,
    TENSOR_FP8,
    compressed_tensors,
    dequantized,
    fp8_tensors,
    make_plain,
    write,
)
from octavo_testkit.models.text_models import make_decoder, make_prompts

UP = "model.layers.0.mlp.up_proj"
# What is written -> (its quantization_config, hf_quant_config.json), how the tensors are made.
FORMATS = {
    "ct channel token": ((compressed_tensors(), None), {"weight": "channel"}),
    "ct tensor dynamic": (
        (compressed_tensors("tensor", "tensor"), None),
        {"weight": "tensor", "one_shape": (1,)},
    ),
    "ct tensor static": (
        (compressed_tensors("tensor", "tensor", dynamic=False), None),
        {"weight": "tensor", "one_shape": (1,), "is_static": True},
    ),
    "ct channel static": (
        (compressed_tensors("channel", "tensor", dynamic=False), None),
        {"weight": "channel", "is_static": True},
    ),
    "ct block": ((compressed_tensors("block", "group"), None), {"weight": "block 128x128"}),
    "ct weights alone": ((compressed_tensors("channel", None), None), {"weight": "channel"}),
    "deepseek": (
        (BLOCK_FP8, None),
        {"weight": "block 128x128", "scale_name": "weight_scale_inv"},
    ),
    "static blocks": (
        ({**BLOCK_FP8, "activation_scheme": "static"}, None),
        {
            "weight": "block 128x128",
            "is_static": True,
            "scale_name": "weight_scale_inv",
            "input_name": "activation_scale",
        },
    ),
    "fp8 static": ((TENSOR_FP8, None), {"weight": "tensor", "is_static": True}),
    "fp8 dynamic": (
        ({**TENSOR_FP8, "activation_scheme": "dynamic"}, None),
        {"weight": "tensor"},
    ),
    "modelopt file": ((None, HF_QUANT_CONFIG), {"weight": "tensor", "is_static": True}),
    "modelopt config": (
        ({"quant_method": "modelopt", **MODELOPT}, None),
        {"weight": "tensor", "is_static": True},
    ),
    "modelopt both": (
        ({"quant_method": "modelopt", **MODELOPT}, HF_QUANT_CONFIG),
        {"weight": "tensor", "is_static": True},
    ),
}
STATIC = FORMATS["fp8 static"]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def run(model):
    return model(input_ids=make_prompts(1, 23)["input_ids"], use_cache=False).logits


def save(folder, form=STATIC, changes=lambda tensors: None, plain=None):
    """A folder in a format; changes: what a test does to the tensors."""
    (config, hf_quant_config), how = form
    plain = make_plain() if plain is None else plain
    tensors = fp8_tensors(plain, **how)
    changes(tensors)
    return write(folder / "model", plain, tensors, config, hf_quant_config), plain, tensors


def refusal(folder, *args, **kwargs):
    with pytest.raises(CheckpointError) as info:
        load_fp8(AutoModelForCausalLM, save(folder, *args, **kwargs)[0])
    assert str(folder) in str(info.value)
    return str(info.value)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_weights_and_scales_are_taken_and_run_in_fp8(tmp_path, form):
    folder, plain, tensors = save(tmp_path, form)
    model, info = load_fp8(AutoModelForCausalLM, folder, dtype="float32", output_loading_info=True)
    assert info["missing_keys"] == info["unexpected_keys"] == set()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert set(layers) == {
        name.removesuffix(".weight")
        for name, x in tensors.items()
        if x.dtype == torch.float8_e4m3fn
    }
    assert len(layers) == 14
    stored = model.state_dict()
    for name, layer in layers.items():
        assert_same_bits(stored[f"{name}.weight"], tensors[f"{name}.weight"])
        scale = tensors.get(f"{name}.weight_scale", tensors.get(f"{name}.weight_scale_inv"))
        assert_same_bits(stored[f"{name}.weight_scale"].flatten(), scale.flatten())
        if form[1].get("is_static"):
            assert layer.input_scale == torch.tensor(folders.INPUT_SCALE)
        else:
            assert layer.input_scale is None
    settings = layers[UP].settings
    truth = run(dequantized(plain, tensors, settings, rounds_inputs=False))
    actual = run(model)
    if settings.activation is None:
        assert relative_rms(actual, truth) < 1e-5
        return
    expected = run(dequantized(plain, tensors, settings, rounds_inputs=True))
    assert_within_budget(actual, truth=truth, model=expected)
    assert relative_rms(actual, truth) > 0.01  # the products are in FP8


@pytest.mark.parametrize("form", ["ct channel token", "deepseek", "fp8 static"])
def test_what_was_loaded_is_saved_and_loaded_as_octavos_own(tmp_path, form):
    folder, _, _ = save(tmp_path, FORMATS[form])
    first = load_fp8(LlamaForCausalLM, folder)
    first.save_pretrained(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "octavo"
    for second in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "own"),
        load_fp8(AutoModelForCausalLM, tmp_path / "own"),
    ):
        names = [name for name, _ in second.state_dict().items()]
        assert names == list(first.state_dict())
        for x, y in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
            assert_same_bits(x, y)
        assert_same_bits(run(first), run(second))


def test_scales_in_16_bits_are_widened(tmp_path):
    def round_scales(tensors):
        for name in [n for n in tensors if n.endswith("_scale")]:
            tensors[name] = tensors[name].to(torch.bfloat16)

    folder, _, tensors = save(tmp_path, STATIC, round_scales)
    layer = load_fp8(AutoModelForCausalLM, folder).get_submodule(UP)
    assert layer.weight_scale.dtype == layer.input_scale.dtype == torch.float32
    assert layer.weight_scale == tensors[f"{UP}.weight_scale"].float()


def test_scales_of_the_kv_cache_wait_for_apply(tmp_path):
    def add(tensors):
        for layer in range(2):
            for part, value in (("k", 0.5), ("v", 0.25)):
                name = f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"
                tensors[name] = torch.tensor(value)

    quantization = {**HF_QUANT_CONFIG["quantization"], "kv_cache_quant_algo": "FP8"}
    form = (None, {**HF_QUANT_CONFIG, "quantization": quantization}), STATIC[1]
    folder, _, _ = save(tmp_path, form, add)
    model, info = load_fp8(AutoModelForCausalLM, folder, output_loading_info=True)
    assert info["unexpected_keys"] == set()
    apply_(model, Recipe(kv_cache="fp8"))
    attention = model.model.layers[1].self_attn.octavo_attention
    assert attention.key_scale == 0.5 and attention.value_scale == 0.25


def test_a_fused_projection_has_a_scale_for_each_part(tmp_path):
    plain = make_decoder("phi3", hidden_size=160, intermediate_size=280, num_hidden_layers=1)
    name, sizes = "model.layers.0.self_attn.qkv_proj", (64, 32, 32)
    scales = torch.tensor([0.5, 0.25, 0.125])

    def cut(tensors):
        weight = plain.get_submodule(name).weight.split(sizes)
        parts = [(w / s).to(torch.float8_e4m3fn) for w, s in zip(weight, scales, strict=True)]
        tensors[f"{name}.weight"] = torch.cat([part.view(torch.uint8) for part in parts]).view(
            torch.float8_e4m3fn
        )
        tensors[f"{name}.weight_scale"] = scales
        tensors[f"{name}.input_scale"] = torch.tensor([0.01, 0.03, 0.02])

    folder, _, tensors = save(tmp_path, STATIC, cut, plain)
    layer = load_fp8(AutoModelForCausalLM, folder).get_submodule(name)
    assert layer.shards == sizes
    assert layer.input_scale == torch.tensor(0.03)
    wide = scales.repeat_interleave(torch.tensor(sizes))[:, None]
    assert_same_bits(layer.dequantize(), tensors[f"{name}.weight"].float() * wide)
    load_fp8(AutoModelForCausalLM, folder).save_pretrained(tmp_path / "own")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "own").get_submodule(name)
    assert again.shards == sizes
    assert_same_bits(again.dequantize(), layer.dequantize())


def test_a_layer_in_16_bits_stays_plain_and_a_head_may_be_fp8(tmp_path):
    def change(tensors):
        tensors[f"{UP}.weight"] = torch.randn(280, 160).to(torch.bfloat16)
        del tensors[f"{UP}.weight_scale"], tensors[f"{UP}.input_scale"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = tensors["lm_head.input_scale"] = torch.tensor(1.0)
        tensors["lm_head.input_scale"] = torch.tensor(0.5)

    model = load_fp8(AutoModelForCausalLM, save(tmp_path, STATIC, change)[0])
    assert type(model.get_submodule(UP)) is torch.nn.Linear
    assert isinstance(model.lm_head, Fp8Linear)
    assert run(model).isfinite().all()


def remove(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


BROKEN = {
    "no weight_scale": (remove(f"{UP}.weight_scale"), "expected weight_scale"),
    "no input_scale": (remove(f"{UP}.input_scale"), "expected an input_scale"),
    "zero": (put(f"{UP}.weight_scale", torch.tensor(0.0)), "positive finite scales"),
    "NaN": (put(f"{UP}.weight_scale", torch.tensor(torch.nan)), "positive finite scales.*nan"),
    "negative input": (put(f"{UP}.input_scale", torch.tensor(-1.0)), "positive finite scales"),
    "infinite": (put(f"{UP}.weight_scale", torch.tensor(torch.inf)), "positive finite scales"),
    "shape": (put(f"{UP}.weight_scale", torch.ones(280)), r"expected shape \[\] or \[1\]"),
    "empty": (put(f"{UP}.weight_scale", torch.ones(0)), r"got \[0\]"),
    "empty input": (put(f"{UP}.input_scale", torch.ones(0)), r"got shape \[0\]"),
    "input shape": (put(f"{UP}.input_scale", torch.ones(2)), "expected one scale"),
    "both names": (put(f"{UP}.weight_scale_inv", torch.tensor(1.0)), "got both"),
    "plain with scale": (
        put(f"{UP}.weight", torch.zeros(280, 160, dtype=torch.bfloat16)),
        "up_proj.weight_scale",
    ),
    "weight shape": (
        put(f"{UP}.weight", torch.zeros(281, 160).to(torch.float8_e4m3fn)),
        r"expected a weight \[280, 160\]",
    ),
    "int8": (put(f"{UP}.weight", torch.zeros(280, 160, dtype=torch.int8)), "I8"),
    "e5m2": (put(f"{UP}.weight", torch.zeros(280, 160).to(torch.float8_e5m2)), "F8_E5M2"),
    "packed": (put(f"{UP}.weight_packed", torch.zeros(4, dtype=torch.int32)), "weight_packed"),
    "nvfp4": (put(f"{UP}.weight_scale_2", torch.tensor(1.0)), "weight_scale_2"),
    "zero point": (put(f"{UP}.weight_zero_point", torch.tensor(1.0)), "expected zeros"),
    "embedding": (
        lambda t: t.update(
            {
                "model.embed_tokens.weight": t["model.embed_tokens.weight"].to(torch.float8_e4m3fn),
                "model.embed_tokens.weight_scale": torch.tensor(1.0),
                "model.embed_tokens.input_scale": torch.tensor(1.0),
            }
        ),
        "got one of Embedding",
    ),
    "NaN in a weight": (
        lambda t: t[f"{UP}.weight"].view(torch.uint8)[3].fill_(0xFF),
        "up_proj: expected a finite weight",
    ),
    "missing weight": (remove("model.norm.weight"), "got none for 'model.norm.weight'"),
    "no FP8 at all": (
        lambda t: [
            t.pop(n) if n.endswith("_scale") else t.update({n: t[n].to(torch.bfloat16)})
            for n in list(t)
        ],
        "expected weights in F8_E4M3, got BF16",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_checkpoints_raise(tmp_path, change, message):
    assert re.search(message, refusal(tmp_path, STATIC, change))


def test_zero_points_of_zero_are_fine(tmp_path):
    zero = put(f"{UP}.weight_zero_point", torch.zeros(1, dtype=torch.int8))
    _, info = load_fp8(
        AutoModelForCausalLM, save(tmp_path, STATIC, zero)[0], output_loading_info=True
    )
    assert info["unexpected_keys"] == set()


def test_an_input_scale_of_dynamic_activations_raises(tmp_path):
    form = ({**TENSOR_FP8, "activation_scheme": "dynamic"}, None), STATIC[1]
    assert "expected no input_scale" in refusal(tmp_path, form)


def test_fp8_weights_of_a_tied_head_raise(tmp_path):
    plain = make_plain(tie_word_embeddings=True)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = torch.tensor(1.0)
        tensors["lm_head.input_scale"] = torch.tensor(1.0)

    assert "tied to another" in refusal(tmp_path, STATIC, add, plain)


def test_a_tied_head_follows_the_embedding(tmp_path):
    plain = make_plain(tie_word_embeddings=True)
    folder, _, _ = save(tmp_path, STATIC, remove("lm_head.weight"), plain)
    model = load_fp8(AutoModelForCausalLM, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_experts_in_one_tensor_raise(tmp_path):
    plain = make_decoder("qwen3_moe", num_experts=2, moe_intermediate_size=32, num_hidden_layers=1)
    prefix = "model.layers.0.mlp.experts"

    def split(tensors):
        tensors.pop(f"{prefix}.gate_up_proj"), tensors.pop(f"{prefix}.down_proj")
        for expert in range(2):
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"{prefix}.{expert}.{part}"
                tensors[f"{name}.weight"] = torch.zeros(32, 64).to(torch.float8_e4m3fn)
                tensors[f"{name}.weight_scale"] = torch.tensor(1.0)
                tensors[f"{name}.input_scale"] = torch.tensor(1.0)

    assert "that transformers makes" in refusal(tmp_path, STATIC, split, plain)


def test_a_plain_checkpoint_and_a_config_beside_raise(tmp_path):
    make_plain().save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="without quantization_config"):
        load_fp8(AutoModelForCausalLM, tmp_path / "plain")
    with pytest.raises(ConfigError, match="got a config beside"):
        load_fp8(AutoModelForCausalLM, tmp_path / "plain", quantization_config={})
    with pytest.raises(CheckpointError, match="config.json"):
        load_fp8(AutoModelForCausalLM, str(tmp_path / "nothing" / "here" / "at all"))


def test_a_subfolder(tmp_path):
    save(tmp_path, FORMATS["modelopt file"])
    model = load_fp8(AutoModelForCausalLM, tmp_path, subfolder="model")
    assert isinstance(model.get_submodule(UP), Fp8Linear)


def test_sharded_files(tmp_path):
    folder, _, tensors = save(tmp_path, STATIC)
    expected = run(load_fp8(AutoModelForCausalLM, folder))
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)  # scales and their weights end up in different files
    parts = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    assert_same_bits(run(load_fp8(AutoModelForCausalLM, folder)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["ct channel token", "deepseek", "fp8 static"])
def test_on_a_gpu(tmp_path, form):
    folder, plain, tensors = save(tmp_path, FORMATS[form])
    model = load_fp8(AutoModelForCausalLM, folder, device_map="cuda")
    layer = model.get_submodule(UP)
    assert layer.weight.is_cuda and layer.weight_scale.is_cuda
    ids = make_prompts(1, 23)["input_ids"]
    actual = model(input_ids=ids.cuda(), use_cache=False).logits.float().cpu()
    truth = run(dequantized(plain, tensors, layer.settings, rounds_inputs=False))
    assert relative_rms(actual, truth) < 0.2


def test_the_body_of_a_model_loads_from_the_whole(tmp_path):
    folder, _, _ = save(tmp_path, FORMATS["deepseek"])
    body = load_fp8(transformers.AutoModel, folder)
    assert isinstance(body.layers[0].mlp.up_proj, Fp8Linear)
