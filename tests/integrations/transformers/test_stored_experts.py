"""Checkpoints whose experts are in FP8, each a layer of its own, as other projects write them."""

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from octavo import CheckpointError, load_fp8
from octavo.integrations.transformers.experts import weights_of
from octavo.layers.experts import Fp8ExpertLinear
from octavo.numerics.error import relative_rms
from octavo.numerics.granularity import PerChannel, parse_granularity
from octavo.numerics.quantize import quantize
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.experts_models import (
    NUM_EXPERTS,
    make_mixture,
    mixture_inputs,
    mixtures,
    run_model,
)
from octavo_testkit.models.fp8_folders import BLOCK_FP8, MODELOPT, compressed_tensors, write

NAME = "model.layers.1.mlp.experts"
# Granularity of weights, name of scales, static inputs, quantization_config, hf_quant_config.
FORMATS = {
    "DeepSeek, Qwen": ("block 128x128", "weight_scale_inv", False, BLOCK_FP8, None),
    "compressed-tensors": ("channel", "weight_scale", False, compressed_tensors(), None),
    "ModelOpt": (
        *("tensor", "weight_scale", True, None),
        {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": MODELOPT},
    ),
}


def save(folder, kind, change=lambda tensors: None, family="qwen3_moe"):
    """Write a mixture in a format; returns its folder, its plain model and its tensors."""
    weight, scale_name, is_static, *configs = FORMATS[kind]
    model = make_mixture(family, inner=256)
    model.save_pretrained(folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    granularity = parse_granularity(weight)
    for name, x in list(tensors.items()):
        layer, _, leaf = name.rpartition(".")
        is_plain = layer.endswith(("gate", "gate.weight", "lm_head", "norm", "embed_tokens"))
        if leaf != "weight" or x.dim() != 2 or is_plain:
            continue
        quantized = quantize(x.float(), granularity)
        scale = quantized.scale
        scale = scale[:, None] if isinstance(granularity, PerChannel) else scale
        tensors[name] = quantized.data
        tensors[f"{layer}.{scale_name}"] = scale.contiguous()
        if is_static:
            number = 1 + len(layer) % 7  # another one for each expert and part
            tensors[f"{layer}.input_scale"] = torch.tensor(0.01 * number)
    change(tensors)
    return write(folder / "fp8", model, tensors, *configs), model, tensors


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind, tmp_path):
    """The weights are those of the files to the bit, and so are they when saved and loaded."""
    folder, plain, tensors = save(tmp_path, kind)
    model = load_fp8(AutoModelForCausalLM, folder)
    module = mixtures(model)[NAME]
    assert isinstance(module.fp8_gate_up_proj, Fp8ExpertLinear) and not list(weights_of(module))
    granularity, scale_name, is_static, *_ = FORMATS[kind]
    for expert in range(NUM_EXPERTS):
        stored = {
            part: tensors[f"{NAME}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
        }
        both = torch.cat([stored["gate"].view(torch.uint8), stored["up"].view(torch.uint8)])
        assert_same_bits(module.fp8_gate_up_proj.weight[expert], both.view(torch.float8_e4m3fn))
        assert_same_bits(module.fp8_down_proj.weight[expert], stored["down"])
        scale = tensors[f"{NAME}.{expert}.down_proj.{scale_name}"].flatten()
        own = module.fp8_down_proj.weight_scale[expert].flatten()
        assert torch.equal(own, scale.expand_as(own) if len(scale) == 1 else scale)
        up = tensors[f"{NAME}.{expert}.up_proj.{scale_name}"].flatten()
        half = module.fp8_gate_up_proj.weight_scale[expert].flatten().chunk(2)[1]
        assert torch.equal(half, up.expand_as(half) if len(up) == 1 else up)
    if is_static:
        names = [
            f"{NAME}.{e}.{p}_proj.input_scale" for e in range(NUM_EXPERTS) for p in ("gate", "up")
        ]
        largest = max(tensors[name] for name in names)
        assert torch.equal(module.fp8_gate_up_proj.input_scale, largest)
    assert module.fp8_down_proj.settings.weight == granularity
    inputs = mixture_inputs(17)
    with torch.no_grad():
        out, expected = module(*inputs), mixtures(plain)[NAME](*inputs)
    assert relative_rms(out, expected) < 1.5 * 6**0.5 * 0.027
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    for name, x in model.state_dict().items():
        assert_same_bits(again.state_dict()[name], x)
    assert_same_bits(run_model(again), run_model(model))


def test_mixtral_and_its_names(tmp_path):
    """w1, w3 and w2 in a block_sparse_moe: transformers knows what they are in the model."""
    folder, plain, tensors = save(tmp_path, "compressed-tensors", family="mixtral")
    assert any(name.endswith("experts.0.w1.weight") for name in tensors)
    model = load_fp8(AutoModelForCausalLM, folder)
    for name, module in mixtures(plain).items():
        new = model.get_submodule(name)
        assert relative_rms(new.fp8_gate_up_proj.dequantize(), module.gate_up_proj) < 0.03
        assert relative_rms(new.fp8_down_proj.dequantize(), module.down_proj) < 0.03


def remove(*parts):
    def change(tensors):
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


def poison(tensors):
    weight = tensors[f"{NAME}.3.up_proj.weight"].view(torch.uint8)
    weight[0, 0] = 0x7F


def make_plain(tensors):
    for name in [name for name in tensors if "layers.1.mlp.experts" in name and ".down_" in name]:
        x = tensors.pop(name)
        if name.endswith(".weight"):
            tensors[name] = x.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("layers.1.mlp.experts.2.gate_proj"), "expected 6 experts in FP8, got 5, 6"),
        (remove("experts.2.gate_proj.weight_scale"), "expected weight_scale for its FP8 weight"),
        (make_plain, "expected down_proj in FP8 as well, got it plain"),
        (poison, "expected a finite weight, got NaN"),
    ],
)
def test_what_is_missing_or_wrong_is_told(change, message, tmp_path):
    folder, _, _ = save(tmp_path, "compressed-tensors", change)
    with pytest.raises(CheckpointError, match=message):
        load_fp8(AutoModelForCausalLM, folder)
