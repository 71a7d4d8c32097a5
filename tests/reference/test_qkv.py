"""What it means to quantize queries, keys and values."""

import math

import pytest
import torch

from octavo.numerics.amax import AmaxHistory
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import quantize
from octavo.reference.qkv import quantize_qkv
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw


def draw_qkv(seed: int = 0, size: float = 1.0):
    draw = Draw(seed)
    shapes = (2, 9, 6, 40), (2, 9, 3, 40), (2, 9, 3, 40)
    return [draw.normal(*shape, dtype=torch.bfloat16) * size for shape in shapes]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
def test_dynamic_scales_are_those_of_each_tensor(granularity, fmt):
    tensors = draw_qkv()
    result = quantize_qkv(*tensors, fmt, granularity=granularity)
    for name, x in zip("qkv", tensors, strict=True):
        expected = quantize(x, granularity, fmt)
        assert_same_bits(getattr(result, name), expected.data)
        assert_same_bits(getattr(result.scales, name), expected.scale)


@pytest.mark.parametrize("shapes", [((), (), ()), ((6,), (3,), (3,)), ((6,), (), (3,))], ids=str)
def test_static_scales_are_used_as_they_are(shapes):
    tensors = draw_qkv()
    scales = QkvScales(*(Draw(1).normal(*shape).abs() / 100 for shape in shapes))
    result = quantize_qkv(*tensors, E4M3, scales=scales)
    assert result.scales is scales
    for name, x in zip("qkv", tensors, strict=True):
        scale = getattr(scales, name)
        granularity = PerHead() if scale.dim() else PerTensor()
        assert_same_bits(getattr(result, name), quantize(x, granularity, scale=scale).data)


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
def test_a_history_remembers_larger_calls(granularity):
    histories = [AmaxHistory(granularity.scale_shape(x.shape)) for x in draw_qkv()]
    rings = tuple(history.ring for history in histories)
    large = quantize_qkv(*draw_qkv(size=8.0), E4M3, rings=rings, granularity=granularity)
    small = quantize_qkv(*draw_qkv(seed=1), E4M3, rings=rings, granularity=granularity)
    for name, history in zip("qkv", histories, strict=True):
        assert_same_bits(getattr(small.scales, name), getattr(large.scales, name))
        assert int(history.num_passes) == 2
    for _ in range(15):
        small = quantize_qkv(*draw_qkv(seed=1), E4M3, rings=rings, granularity=granularity)
    alone = quantize_qkv(*draw_qkv(seed=1), E4M3, granularity=granularity)
    for name in "qkv":
        assert_same_bits(getattr(small, name), getattr(alone, name))
        assert_same_bits(getattr(small.scales, name), getattr(alone.scales, name))


def test_a_bad_value_is_counted_for_its_own_tensor():
    tensors = draw_qkv()
    tensors[1][0, 0, 0, :2] = math.nan
    histories = [AmaxHistory() for _ in "qkv"]
    result = quantize_qkv(*tensors, E4M3, rings=tuple(history.ring for history in histories))
    assert [int(history.num_nonfinite) for history in histories] == [0, 2, 0]
    assert result.k.float().isnan().sum() == 2
    assert result.scales.k.isfinite()
