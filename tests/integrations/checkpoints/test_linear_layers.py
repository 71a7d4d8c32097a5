"""FP8 linear layers among the tensors of a checkpoint: their names, scales and fused parts."""

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.linear_layers import find_linear, kv_scale_names, read_linear
from octavo.integrations.checkpoints.tensor_files import read_header
from octavo.recipe import LinearSettings

TENSOR = LinearSettings(weight="tensor")
STATIC = LinearSettings(weight="tensor", scaling="static")
CHANNEL = LinearSettings()
BLOCK = LinearSettings(weight="block 128x128")
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


def fp8(*shape):
    return torch.ones(shape).to(torch.float8_e4m3fn)


def entries(folder, **tensors):
    """Headers of a file with these tensors; __ in a name stands for a dot."""
    named = {name.replace("__", "."): x for name, x in tensors.items()}
    save_file(named, folder / "x.safetensors")
    return {entry.name: entry for entry in read_header(folder / "x.safetensors")}


def test_only_weights_in_fp8_are_found(tmp_path):
    tensors = entries(
        tmp_path,
        a__weight=fp8(4, 4),
        a__weight_scale=torch.ones(()),
        a__bias=torch.ones(4),
        norm__weight=torch.ones(4).bfloat16(),
        layer_scale=torch.ones(4),
        ids=torch.ones(4, dtype=torch.int64),
        x__self_attn__k_scale=torch.ones(()),
        x__self_attn__k_proj__k_scale=torch.ones(()),
    )
    assert list(find_linear(tensors)) == ["a"]
    assert sorted(kv_scale_names(tensors)) == ["x.self_attn.k_proj.k_scale", "x.self_attn.k_scale"]


@pytest.mark.parametrize(
    "tensors",
    [
        {"b__weight": torch.ones(4, 4, dtype=torch.int8)},
        {"b__weight": torch.ones(4, 4).to(torch.float8_e5m2)},
        {"b__qweight": torch.ones(4, dtype=torch.int32)},
        {"b__weight_scale": torch.ones(())},
        {"b__input_amax": torch.ones(())},
        {"a__weight_scale_2": torch.ones(())},
        {"a__pre_quant_scale": torch.ones(4)},
        {"experts__gate_up_proj": fp8(2, 4, 4)},
    ],
    ids=lambda tensors: next(iter(tensors)),
)
def test_what_is_quantized_in_another_way_raises(tmp_path, tensors):
    name = next(iter(tensors)).replace("__", ".")
    with pytest.raises(CheckpointError, match=name):
        find_linear(entries(tmp_path, a__weight=fp8(4, 4), **tensors))


def test_no_fp8_raises(tmp_path):
    with pytest.raises(CheckpointError, match="got F32"):
        find_linear(entries(tmp_path, a__weight=torch.ones(4, 4)))
    with pytest.raises(CheckpointError, match="no weights"):
        find_linear({})


@pytest.mark.parametrize(
    ("settings", "stored", "expected"),
    [
        (TENSOR, (), ()),
        (TENSOR, (1,), ()),
        (CHANNEL, (300, 1), (300,)),
        (CHANNEL, (300,), (300,)),
        (BLOCK, (3, 2), (3, 2)),
    ],
)
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_every_shape(tmp_path, settings, stored, expected, name, dtype):
    scale = torch.rand(stored).to(dtype) + 0.5
    tensors = entries(tmp_path, a__weight=fp8(300, 200), **{f"a__{name}": scale})
    found = read_linear(tensors, "a", settings, {})
    assert found.weight_scale.dtype == torch.float32
    assert torch.equal(found.weight_scale, scale.float().reshape(expected))
    assert found.input_scale is None and found.shards is None


@pytest.mark.parametrize(
    ("settings", "stored"),
    [(TENSOR, (1, 1)), (TENSOR, (3,)), (CHANNEL, ()), (CHANNEL, (1, 300)), (BLOCK, (2, 3))],
)
def test_other_shapes_raise(tmp_path, settings, stored):
    tensors = entries(tmp_path, a__weight=fp8(300, 200), a__weight_scale=torch.ones(stored))
    with pytest.raises(CheckpointError, match="expected shape"):
        read_linear(tensors, "a", settings, {})


@pytest.mark.parametrize("shape", [(4,), (2, 4, 4), (0, 4)])
def test_weights_that_are_no_matrices_raise(tmp_path, shape):
    tensors = entries(tmp_path, a__weight=fp8(*shape), a__weight_scale=torch.ones(()))
    with pytest.raises(CheckpointError, match=r"expected a weight \[out, in\]"):
        read_linear(tensors, "a", TENSOR, {})


@pytest.mark.parametrize(
    ("name", "out", "parts", "config"),
    [
        ("qkv_proj", 128, (64, 32, 32), CONFIG),
        ("qkv_proj", 96, (32, 32, 32), {"num_attention_heads": 4}),
        ("gate_up_proj", 6, (3, 3), {}),
    ],
)
def test_fused_projections(tmp_path, name, out, parts, config):
    scales = torch.arange(1.0, 1 + len(parts))
    tensors = entries(
        tmp_path,
        **{f"{name}__weight": fp8(out, 4), f"{name}__weight_scale": scales},
        **{f"{name}__input_scale": scales.clone()},
    )
    found = read_linear(tensors, name, STATIC, config)
    assert found.shards == parts
    assert torch.equal(found.weight_scale, scales)
    assert found.input_scale == scales[-1]


@pytest.mark.parametrize(
    ("name", "config"), [("qkv_proj", {}), ("up_proj", CONFIG), ("qkv_proj", {"num_heads": 4})]
)
def test_several_scales_of_what_is_not_fused_raise(tmp_path, name, config):
    tensors = entries(
        tmp_path, **{f"{name}__weight": fp8(128, 4), f"{name}__weight_scale": torch.ones(3)}
    )
    with pytest.raises(CheckpointError, match="expected shape"):
        read_linear(tensors, name, TENSOR, config)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_scales_that_are_no_scales_raise(tmp_path, value):
    tensors = entries(
        tmp_path,
        a__weight=fp8(4, 4),
        a__weight_scale=torch.tensor([[1.0], [value], [1.0], [1.0]]),
    )
    with pytest.raises(CheckpointError, match="'a.weight_scale': expected positive finite"):
        read_linear(tensors, "a", CHANNEL, {})


def test_scales_in_integers_raise(tmp_path):
    tensors = entries(
        tmp_path, a__weight=fp8(4, 4), a__weight_scale=torch.ones((), dtype=torch.uint8)
    )
    with pytest.raises(CheckpointError, match="got U8"):
        read_linear(tensors, "a", TENSOR, {})
