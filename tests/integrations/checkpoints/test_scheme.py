"""What JSON files of other projects say about FP8 linear layers, and what is refused."""

import copy

import pytest

from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.scheme import read_linear_scheme
from octavo.recipe import LinearSettings

E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
WEIGHTS = {**E4M3, "strategy": "channel", "dynamic": False, "observer": "minmax"}
BLOCKS = {**WEIGHTS, "strategy": "block", "block_structure": [128, 128]}
INPUTS = {**E4M3, "strategy": "token", "dynamic": True}
STATIC = {**E4M3, "strategy": "tensor", "dynamic": False}
GROUPED = {**E4M3, "strategy": "group", "dynamic": True, "group_size": 128}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def compressed(weights=WEIGHTS, inputs=INPUTS, **changes):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
        **changes,
    }


def groups(*schemes):
    made = [{"targets": ["re:.*"], "weights": w, "input_activations": i} for w, i in schemes]
    return {"config_groups": {f"group_{n}": group for n, group in enumerate(made)}}


def read(quantization_config, hf_quant_config=None):
    config = {} if quantization_config is None else {"quantization_config": quantization_config}
    return read_linear_scheme(config, hf_quant_config)


UNDERSTOOD = {
    "channel, token": (compressed(), {}),
    "naive": (compressed(format="naive-quantized"), {}),
    "other spelling": (compressed(quant_method="compressed_tensors"), {}),
    "static": (compressed(inputs=STATIC), {"scaling": "static"}),
    "weights alone": (compressed(inputs=None), {"activation": None}),
    "blocks": (compressed(BLOCKS, GROUPED), {"weight": "block 128x128"}),
    "blocks as text": (
        compressed({**BLOCKS, "block_structure": "128x128"}, GROUPED),
        {"weight": "block 128x128"},
    ),
    "tensor, dynamic": (
        compressed({**WEIGHTS, "strategy": "tensor"}, {**STATIC, "dynamic": True}),
        {"weight": "tensor", "activation": "tensor"},
    ),
    "two groups alike": (compressed(**groups((WEIGHTS, INPUTS), (WEIGHTS, INPUTS))), {}),
    "a group of attention": (compressed(**groups((WEIGHTS, INPUTS), (None, STATIC))), {}),
    "dense beside": (compressed(sparsity_config={"format": "dense"}, transform_config={}), {}),
    "deepseek": ({**FP8, "weight_block_size": [128, 128]}, {"weight": "block 128x128"}),
    "static blocks": (
        {**FP8, "activation_scheme": "static", "weight_block_size": [128, 128]},
        {"weight": "block 128x128", "scaling": "static"},
    ),
    "ue8m0": (
        {**FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        {"weight": "block 128x128"},
    ),
    "autofp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        {"weight": "tensor", "scaling": "static"},
    ),
    "fp8 dynamic": (FP8, {"weight": "tensor"}),
    "modelopt": (MODELOPT, {"weight": "tensor", "scaling": "static"}),
    "modelopt nested": (
        {"quantization": {"quant_algo": "FP8"}},
        {"weight": "tensor", "scaling": "static"},
    ),
    "modelopt per channel": (
        {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        {"weight": "channel"},
    ),
}


@pytest.mark.parametrize(("said", "meant"), UNDERSTOOD.values(), ids=UNDERSTOOD.keys())
def test_understood(said, meant):
    before = copy.deepcopy(said)
    assert read(said) == LinearSettings(**meant)
    assert said == before
    assert read_linear_scheme({"text_config": {"quantization_config": said}}) == read(said)


def test_modelopts_own_file():
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    meant = LinearSettings(weight="tensor", scaling="static")
    assert read(None, file) == read(MODELOPT, file) == meant
    with pytest.raises(CheckpointError, match="expected one scheme"):
        read(compressed(), file)


def without(scheme, key):
    return {name: value for name, value in scheme.items() if name != key}


REFUSED = {
    "nothing": (None, "without quantization_config"),
    "no method": ({}, "expected a quant_method"),
    "no object": (7, "to be an object"),
    "another method": ({"quant_method": "gptq"}, "got 'gptq'"),
    "int8": (compressed({**WEIGHTS, "type": "int"}), "expected type 'float', got 'int'"),
    "4 bits": (compressed({**WEIGHTS, "num_bits": 4}), "expected num_bits 8, got 4"),
    "True bits": (compressed({**WEIGHTS, "num_bits": True}), "expected num_bits 8, got True"),
    "no bits": (compressed(without(WEIGHTS, "num_bits")), "expected num_bits 8, got None"),
    "no strategy": (compressed(without(WEIGHTS, "strategy")), "expected strategy"),
    "groups of weights": (compressed({**WEIGHTS, "strategy": "group"}), "got 'group'"),
    "asymmetric": (compressed({**WEIGHTS, "symmetric": False}), "expected symmetric True"),
    "small blocks": (compressed({**BLOCKS, "block_structure": [64, 64]}, GROUPED), r"\[64, 64\]"),
    "blocks without size": (compressed(without(BLOCKS, "block_structure"), GROUPED), "got None"),
    "a size without blocks": (compressed({**WEIGHTS, "block_structure": [128, 128]}), "channel"),
    "unknown setting": (compressed({**WEIGHTS, "rotation": 1}), "do not know: 'rotation'"),
    "static tokens": (compressed(inputs={**INPUTS, "dynamic": False}), "needs activation"),
    "local": (compressed(inputs={**INPUTS, "dynamic": "local"}), "got 'local'"),
    "group of 32": (compressed(inputs={**GROUPED, "group_size": 32}), "got 32"),
    "group without size": (compressed(inputs=without(GROUPED, "group_size")), "got None"),
    "inputs in int8": (compressed(inputs={**INPUTS, "type": "int"}), "got 'int'"),
    "outputs": (
        compressed(config_groups={"g": {"weights": WEIGHTS, "output_activations": STATIC}}),
        "output_activations",
    ),
    "mixed": (compressed(**groups((WEIGHTS, INPUTS), (BLOCKS, GROUPED))), "expected one scheme"),
    "packed": (compressed(format="pack-quantized"), "got 'pack-quantized'"),
    "packed group": (
        compressed(config_groups={"g": {"weights": WEIGHTS, "format": "pack-quantized"}}),
        "pack-quantized",
    ),
    "no groups": (compressed(config_groups={}), "0 groups"),
    "groups are a list": (compressed(config_groups=[]), "expected config_groups"),
    "a group is text": (compressed(config_groups={"g": "fp8"}), "0 groups"),
    "sparse": (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "rotated": (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "expected fmt"),
    "another block": ({**FP8, "weight_block_size": [1, 128]}, r"got \[1, 128\]"),
    "another scheme": ({**FP8, "activation_scheme": "none"}, "activation_scheme"),
    "nvfp4": ({**MODELOPT, "quant_algo": "NVFP4"}, "got 'NVFP4'"),
    "mixed precision": ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
    "no algorithm": ({"quant_method": "modelopt"}, "got None"),
    "quantization is text": ({"quantization": "FP8x"}, "got 'FP8x'"),
}


@pytest.mark.parametrize(("said", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(said, message):
    with pytest.raises(CheckpointError, match=message):
        read(said)
