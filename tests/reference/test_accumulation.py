"""What two-level accumulation repairs: a needle in a long context, and errors that grow with it.

The model of the accumulator (numerics/accumulator.py) is Hopper's, bit for bit.
"""

import math

import pytest
import torch

from octavo import ops
from octavo.numerics.accumulator import HOPPER_FP8
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import relative_rms
from octavo.numerics.formats import E4M3
from octavo.numerics.qkv import QkvScales
from octavo.reference.attention import attention
from octavo.reference.softmax import EXACT, Rounding, kernel_rounding
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

FP8 = E4M3.dtype
NEEDLE_CHANNEL = 5
LONG, SHORT = 131072, 1024


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of tiny steps: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def haystack(num_keys: int) -> dict:
    """One query over keys whose values cancel, except for one needle in the middle.

    The hay has logit 0 and values +s in the first half, −s in the second, with a random sign s in
    each channel. The needle has logit ln 4 and the value 448 in one channel, whose sign is −1: a
    sum that stands still after the first half shows another channel as the largest.
    """
    sign = torch.where(Draw(1).coin(64), 1.0, -1.0)
    sign[NEEDLE_CHANNEL] = -1.0
    v = sign.repeat(num_keys, 1)
    middle = num_keys // 2
    v[middle:] = -sign
    v[middle] = 0.0
    v[middle, NEEDLE_CHANNEL] = 448.0
    q, k = torch.zeros(1, 64), torch.zeros(num_keys, 64)
    q[0, 0] = k[middle, 0] = 1.0
    return {name: x[None, :, None, :] for name, x in (("q", q), ("k", k), ("v", v))}


def is_found(num_keys: int, promote_every: int | None, *, how: str) -> bool:
    """Whether the needle's channel is the largest of the result."""
    spec = AttentionSpec(softmax_scale=math.log(4), promote_every=promote_every)
    plain = haystack(num_keys)
    fp8 = {name: x.to(FP8) for name, x in plain.items()}
    match how:
        case "unquantized":
            out, _ = attention(**plain, spec=spec)
        case "reference":
            out, _ = attention(**fp8, spec=spec, rounding=kernel_rounding(FP8, spec))
        case "ops":
            out = ops.attention(**fp8, spec=spec, scales=QkvScales.ones(), impl="reference")
    return int(out.flatten().argmax()) == NEEDLE_CHANNEL


@pytest.mark.parametrize("how", ["unquantized", "reference", "ops"])
def test_two_levels_find_a_needle_in_131072_keys(how):
    assert is_found(LONG, 1, how=how)


@pytest.mark.parametrize("how", ["reference", "ops"])
def test_one_level_finds_it_in_1024_keys(how):
    assert is_found(SHORT, None, how=how)


@pytest.mark.parametrize("how", [pytest.param("reference", marks=pytest.mark.slow), "ops"])
def test_one_level_loses_it_in_131072_keys(how):
    """Hopper's adder stands still after 16384 equal steps; the first half has 65536."""
    assert not is_found(LONG, None, how=how)


@pytest.mark.slow
@pytest.mark.parametrize("promote_every", [4, 64])
@pytest.mark.parametrize("how", ["reference", "ops"])
def test_promoting_every_few_tiles_finds_it_in_131072_keys(how, promote_every):
    """64 tiles are 8192 keys: half of what the adder can hold."""
    assert is_found(LONG, promote_every, how=how)


def errors(num_keys: int) -> tuple[float, float]:
    """Relative errors with one and two levels, for values of mean 1, both as the hardware adds."""
    draw = Draw(num_keys)
    q = (2 * draw.normal(1, 4, 1, 64)).to(FP8)
    k = draw.normal(1, num_keys, 1, 64).to(FP8)
    v = (1 + draw.normal(1, num_keys, 1, 64) / 4).to(FP8)
    truth, _ = attention(q, k, v, rounding=EXACT, compute=torch.float64)
    rounding = Rounding(FP8, HOPPER_FP8)
    one_level, _ = attention(q, k, v, AttentionSpec(promote_every=None), rounding=rounding)
    two_level, _ = attention(q, k, v, AttentionSpec(promote_every=1), rounding=rounding)
    return relative_rms(one_level, truth), relative_rms(two_level, truth)


def test_one_level_is_about_as_good_for_512_keys():
    one_level, two_level = errors(512)
    assert one_level < 3 * two_level
    assert one_level < 0.01


def test_the_error_of_one_level_grows_with_length():
    one_level, two_level = errors(4096)
    assert one_level > 10 * two_level
    assert two_level < 0.005


@pytest.mark.slow
def test_one_level_is_useless_at_131072_keys():
    one_level, two_level = errors(LONG)
    assert one_level > 100 * two_level
    assert one_level > 0.3
    assert two_level < 0.005


def test_promotion_counts_tiles():
    """1024 keys are 8 tiles: promoting after 8 or more is one level, after fewer it is not."""
    draw = Draw(0)
    q, k = draw.normal(1, 4, 1, 64).to(FP8), draw.normal(1, SHORT, 1, 64).to(FP8)
    v = (1 + draw.normal(1, SHORT, 1, 64) / 4).to(FP8)
    rounding = Rounding(FP8, HOPPER_FP8)
    results = {
        promote_every: attention(
            q, k, v, AttentionSpec(promote_every=promote_every), rounding=rounding
        )[0]
        for promote_every in (None, 1, 2, 4, 8, 9)
    }
    assert_same_bits(results[8], results[None])
    assert_same_bits(results[9], results[None])
    truth, _ = attention(q, k, v, compute=torch.float64)
    errors = [relative_rms(results[promote_every], truth) for promote_every in (1, 2, 4, 8)]
    assert errors == sorted(errors)
    assert len(set(errors)) == 4
