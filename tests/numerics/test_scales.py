"""From amax to scale: zero, tiny and huge values, margins and powers of two."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.scales import (
    MAX_SCALE,
    MIN_SCALE,
    amax_to_scale,
    check_margin,
    count_nonfinite,
    finite_amax,
)

FLOAT32_MAX = torch.finfo(torch.float32).max
AMAXES = st.floats(0, FLOAT32_MAX, width=32)
MARGINS = st.floats(0.01, 100)


@pytest.mark.parametrize(("fmt", "largest"), [(E4M3, 448), (E5M2, 57344)], ids=str)
def test_a_scale_takes_amax_to_the_end_of_the_range(fmt, largest):
    scale = amax_to_scale(torch.tensor([largest, 1.0, 2 * largest]), fmt)
    torch.testing.assert_close(scale, torch.tensor([1.0, 1 / largest, 2.0]), rtol=1e-6, atol=0)
    assert scale.dtype == torch.float32


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0.5, 1.0, 1.5])
def test_zeros_have_the_neutral_scale(margin, power_of_two):
    scale = amax_to_scale(torch.tensor([0.0, -0.0]), margin=margin, power_of_two=power_of_two)
    assert scale.tolist() == [1.0, 1.0]


@hypothesis.given(AMAXES, MARGINS, st.sampled_from([E4M3, E5M2]), st.booleans())
def test_a_scale_is_positive_finite_and_has_a_finite_reciprocal(amax, margin, fmt, power_of_two):
    scale = amax_to_scale(torch.tensor(amax), fmt, margin=margin, power_of_two=power_of_two)
    assert MIN_SCALE <= float(scale) <= MAX_SCALE
    assert MIN_SCALE <= float(torch.ones(()) / scale) <= MAX_SCALE


@hypothesis.given(AMAXES, MARGINS, st.sampled_from([E4M3, E5M2]))
def test_a_power_of_two_is_rounded_up_and_by_less_than_two(amax, margin, fmt):
    plain = float(amax_to_scale(torch.tensor(amax), fmt, margin=margin))
    rounded = float(amax_to_scale(torch.tensor(amax), fmt, margin=margin, power_of_two=True))
    assert math.frexp(rounded)[0] == 0.5
    assert plain <= rounded < 2 * plain


@pytest.mark.parametrize("exponent", [-126, -125, -1, 0, 1, 100])
def test_an_exact_power_of_two_stays(exponent):
    scale = amax_to_scale(torch.tensor(448.0 * 2.0**exponent), power_of_two=True)
    assert float(scale) == 2.0**exponent


@pytest.mark.parametrize("margin", [0.25, 1.0, 1.5, 8.0])
def test_margin_is_headroom(margin):
    scale = amax_to_scale(torch.tensor(448.0), margin=margin)
    assert float(scale) == margin


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [1.0, 1.5, 448.0, 1e6, 1e300])
def test_the_largest_amax_has_a_finite_scale(margin, power_of_two):
    scale = amax_to_scale(torch.tensor(FLOAT32_MAX), margin=margin, power_of_two=power_of_two)
    assert 1 <= float(scale) <= MAX_SCALE


@pytest.mark.parametrize("amax", [1e-45, 1e-40, float(MIN_SCALE), 447 * MIN_SCALE])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_tiny_values_have_the_smallest_scale(amax, power_of_two):
    assert float(amax_to_scale(torch.tensor(amax), power_of_two=power_of_two)) == MIN_SCALE


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_margin_is_a_positive_finite_number(margin):
    for call in (check_margin, lambda m: amax_to_scale(torch.ones(()), margin=m)):
        with pytest.raises(
            ConfigError, match=f"margin must be a positive finite number, got {margin}"
        ):
            call(margin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_amax_leaves_out_what_is_not_finite(dtype):
    x = torch.tensor([[1.0, -3.0], [math.nan, 2.0], [math.inf, -math.inf], [-math.inf, 0.5]])
    x = x.to(dtype)
    assert finite_amax(x, PerTensor()) == 3.0
    assert finite_amax(x, PerToken()).tolist() == [3.0, 2.0, 0.0, 0.5]
    assert finite_amax(x, PerTensor()).dtype == torch.float32
    assert count_nonfinite(x) == 4


def test_amax_of_nothing_is_zero():
    assert finite_amax(torch.empty(0), PerTensor()) == 0
    assert finite_amax(torch.full((3,), math.nan), PerTensor()) == 0
    assert finite_amax(torch.empty(0, 2, 4), PerHead()).tolist() == [0.0, 0.0]
    assert count_nonfinite(torch.empty(0)) == 0


def test_amax_is_cut_off_from_the_graph():
    x = torch.tensor([2.0], requires_grad=True)
    assert not finite_amax(x, PerTensor()).requires_grad


def test_count_is_an_integer_on_the_device():
    count = count_nonfinite(torch.full((2, 3), math.inf))
    assert (count.dtype, count.dim(), int(count)) == (torch.int64, 0, 6)
