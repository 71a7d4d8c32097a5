"""The saturating cast, exhaustively against ml_dtypes; quantize and dequantize by their error."""

import math

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.numerics.formats import E4M3, E5M2, FORMATS
from octavo.numerics.granularity import PerBlock, PerChannel, PerHead, PerTensor, PerToken
from octavo.numerics.quantize import Quantized, dequantize, quantize, saturating_cast
from octavo.numerics.scales import MIN_SCALE
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

THEIRS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
NUMPY = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)


def check_cast(x: torch.Tensor, fmt) -> None:
    """Every value of x: rounded as ml_dtypes does within the range, ±max beyond, NaN kept."""
    wide = x.to(torch.float32).numpy()
    ours = saturating_cast(x, fmt)
    assert ours.dtype == fmt.dtype
    codes = ours.view(torch.uint8).numpy()
    clipped = np.clip(wide, -fmt.max, fmt.max)  # NaN stays
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = clipped.astype(THEIRS[fmt.name]).view(np.uint8)
    numbers = ~np.isnan(wide)
    wrong = (codes != expected) & numbers
    assert not wrong.any(), (wide[wrong][:5], codes[wrong][:5], expected[wrong][:5])
    assert ours.float().isnan()[torch.from_numpy(~numbers)].all()


def turning_points(fmt) -> np.ndarray:
    """Every code of the format, every midpoint of neighbours, and the floats around both."""
    codes = np.arange(256, dtype=np.uint8).view(THEIRS[fmt.name]).astype(np.float64)
    codes = np.unique(codes[np.isfinite(codes)])
    midpoints = (codes[1:] + codes[:-1]) / 2
    exact = np.concatenate([codes, midpoints]).astype(np.float32)
    assert np.array_equal(exact.astype(np.float64), np.concatenate([codes, midpoints]))
    return np.concatenate(
        [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
    )


@each_format
def test_float32_is_rounded_to_nearest_even_at_every_turning_point(fmt):
    check_cast(torch.from_numpy(turning_points(fmt)), fmt)


@each_format
def test_a_compiled_cast_gives_the_same_bits(fmt):
    """Compilers are given another form of it."""
    x = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).float()
    beyond = torch.tensor([math.inf, -math.inf, fmt.max * 1.001, -fmt.max * 1.001, 3e38, -0.0])
    x = torch.cat([x, beyond, torch.from_numpy(turning_points(fmt))])
    run = torch.compile(lambda x: saturating_cast(x, fmt), fullgraph=True, backend="aot_eager")
    assert_same_bits(run(x), saturating_cast(x, fmt))


@each_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value(dtype, fmt):
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    check_cast(codes.view(dtype), fmt)


@hypothesis.given(
    x=st.lists(st.floats(width=32), min_size=1, max_size=64), fmt=st.sampled_from([E4M3, E5M2])
)
def test_any_float32(x, fmt):
    check_cast(torch.tensor(x, dtype=torch.float32), fmt)


@each_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_beyond_the_range_is_the_largest_value(dtype, fmt):
    x = torch.tensor([fmt.max, fmt.max * 1.01, fmt.max * 4, math.inf, 1e38], dtype=dtype)
    assert saturating_cast(x, fmt).float().tolist() == [fmt.max] * 5
    assert saturating_cast(-x, fmt).float().tolist() == [-fmt.max] * 5


@each_format
def test_zero_keeps_its_sign_and_nan_stays(fmt):
    cast = saturating_cast(torch.tensor([0.0, -0.0, math.nan]), fmt)
    assert cast.view(torch.uint8).tolist()[:2] == [0x00, 0x80]
    assert cast.float().isnan().tolist() == [False, False, True]


@each_format
def test_half_of_the_smallest_subnormal_is_where_zero_begins(fmt):
    tiny = fmt.smallest_subnormal
    x = torch.tensor([tiny, 0.51 * tiny, 0.5 * tiny, 0.49 * tiny, 1.5 * tiny, -0.5 * tiny])
    assert saturating_cast(x, fmt).float().tolist() == [tiny, tiny, 0, 0, 2 * tiny, -0.0]


@each_format
def test_float64_goes_through_float32(fmt):
    """A float64 next to a midpoint is the midpoint itself in float32, and then goes to even."""
    points = torch.from_numpy(turning_points(fmt)).double()
    for x in (points, points * (1 + 1e-12), points * (1 - 1e-12)):
        assert_same_bits(saturating_cast(x, fmt), saturating_cast(x.float(), fmt))


GRANULARITIES = [
    PerTensor(),
    PerHead(),
    PerToken(),
    PerChannel(),
    PerBlock(1, 128),
    PerBlock(16, 16),
    PerBlock(64, 1),
    PerBlock(128, 128),
]
SIZES = st.sampled_from([0, 1, 2, 7, 16, 17, 63, 65])


@hypothesis.given(
    shape=st.lists(SIZES, min_size=2, max_size=3).filter(lambda s: math.prod(s) < 30_000),
    granularity=st.sampled_from(GRANULARITIES),
    fmt=st.sampled_from([E4M3, E5M2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    margin=st.sampled_from([1.0, 1.5]),
    power_of_two=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_error_is_half_a_step_of_the_format(
    shape, granularity, fmt, dtype, margin, power_of_two, seed
):
    x = Draw(seed).wide(*shape, dtype=dtype)
    quantized = quantize(x, granularity, fmt, margin=margin, power_of_two=power_of_two)
    assert quantized.data.shape == x.shape
    assert tuple(quantized.scale.shape) == granularity.scale_shape(x.shape)
    assert quantized.scale.dtype == torch.float32
    assert quantized.format is fmt

    exact = x.double()
    restored = quantized.dequantize(torch.float64)
    # Half a unit in the last place for normal values, half of the smallest step below them.
    relative = exact.abs() * 2.0 ** -(fmt.mantissa_bits + 1)
    absolute = granularity.expand(quantized.scale.double(), x.shape) * fmt.smallest_subnormal / 2
    slack = exact.abs() * 2.0**-22  # x / scale is rounded to float32 before it is rounded to FP8
    assert ((restored - exact).abs() <= torch.maximum(relative, absolute) + slack).all()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_one_value_per_group_reaches_the_end_of_the_range(granularity):
    x = Draw(0).normal(65, 130)
    data = quantize(x, granularity).data.float().abs()
    assert (granularity.reduce_max(data) == E4M3.max).all()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_values_that_fit_come_back_exactly(granularity):
    """Codes times a power of two: with power_of_two the division is exact."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype).float().nan_to_num(0.0)
    x = torch.cat([codes, torch.full((4,), 448.0)]).repeat(70, 1) * 2.0**-20
    x[:, ::2] = 448 * 2.0**-20  # every block has its largest value
    quantized = quantize(x, granularity, power_of_two=True)
    assert_same_bits(quantized.dequantize(), x)


@pytest.mark.parametrize("scale", [3.0, 5.0, 7.0, 49.0])
def test_values_are_divided_by_the_scale(scale):
    """Multiplying by the rounded reciprocal would take ties to the wrong side."""
    points = torch.from_numpy(turning_points(E4M3))
    points = points[: len(points) // 3]  # codes and midpoints, without the floats around them
    data = quantize(points * scale, scale=torch.tensor(scale)).data
    assert_same_bits(data, saturating_cast(points))


def test_a_static_scale_is_used_as_it_is():
    x = torch.tensor([1.0, 100.0, -1e6, math.nan, -math.inf])
    quantized = quantize(x, scale=torch.tensor(0.5))
    assert quantized.data.float().tolist()[:3] == [2.0, 200.0 - 8, -448.0]
    assert quantized.data.float()[3].isnan()
    assert quantized.data.float()[4] == -448
    assert quantized.scale == 0.5


def test_a_bad_value_does_not_choose_the_scale():
    x = Draw(0).normal(4, 64)
    bad = x.clone()
    bad[1, 3], bad[2, 5] = math.nan, math.inf
    clean, poisoned = quantize(x.masked_fill(~bad.isfinite(), 0.0)), quantize(bad)
    assert_same_bits(poisoned.scale, clean.scale)
    assert poisoned.data.float()[1, 3].isnan()
    assert poisoned.data.float()[2, 5] == 448
    rest = bad.isfinite()
    assert_same_bits(poisoned.data.view(torch.uint8)[rest], clean.data.view(torch.uint8)[rest])


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1e-38, 1e-37, 3e-36])
def test_tiny_tensors_stay_finite(amax):
    x = torch.tensor([amax, -amax / 2, 0.0])
    quantized = quantize(x)
    assert quantized.scale >= MIN_SCALE
    restored = quantized.dequantize(torch.float64)
    assert ((restored - x.double()).abs() <= x.double().abs() / 16 + MIN_SCALE * 2**-10).all()


def test_the_largest_float32_survives():
    x = torch.tensor([torch.finfo(torch.float32).max, -1.0])
    quantized = quantize(x)
    assert quantized.data.float().tolist() == [448.0, -0.0]
    assert quantized.dequantize(torch.float64)[0] == pytest.approx(float(x[0]), rel=1e-6)


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerHead(), PerToken(), PerBlock(4, 4)], ids=str
)
def test_an_input_is_neither_changed_nor_kept(granularity):
    x = Draw(0).normal(3, 5, 8, dtype=torch.bfloat16).requires_grad_()
    before = x.detach().clone()
    quantized = quantize(x, granularity)
    assert_same_bits(x.detach(), before)
    assert not quantized.scale.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dequantize_rounds_once(dtype):
    quantized = quantize(Draw(0).normal(63, 65), PerToken())
    exact = quantized.data.double() * quantized.scale.double().unsqueeze(-1)
    once = exact if dtype == torch.float64 else exact.float().to(dtype)
    assert_same_bits(quantized.dequantize(dtype), once)
    assert_same_bits(
        dequantize(quantized.data, quantized.scale, quantized.granularity, dtype), once
    )


@pytest.mark.parametrize(
    ("granularity", "shape", "scale_shape"),
    [
        (PerTensor(), (3, 4), (1,)),
        (PerHead(), (2, 3, 4), (4,)),
        (PerToken(), (2, 3, 4), (2, 3, 1)),
        (PerChannel(), (3, 4), ()),
        (PerBlock(2, 2), (3, 4), (1, 2)),
    ],
    ids=str,
)
def test_a_scale_of_the_wrong_shape(granularity, shape, scale_shape):
    expected = list(granularity.scale_shape(shape))
    with pytest.raises(ConfigError) as error:
        quantize(torch.ones(shape), granularity, scale=torch.ones(scale_shape))
    assert f"needs a scale of shape {expected}, got {list(scale_shape)}" in str(error.value)


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [(PerHead(), (4,)), (PerToken(), ()), (PerChannel(), ()), (PerBlock(2, 2), (4,))],
    ids=str,
)
def test_a_tensor_that_cannot_have_the_granularity(granularity, shape):
    with pytest.raises(ConfigError, match=f"granularity {granularity} needs a tensor of"):
        quantize(torch.ones(shape), granularity)


def test_quantized_says_its_format():
    for fmt in (E4M3, E5M2):
        assert Quantized(torch.zeros(2).to(fmt.dtype), torch.ones(()), PerTensor()).format is fmt
