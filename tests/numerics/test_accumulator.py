"""The model of Hopper's adder against an H200's own results, and what follows from it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics.accumulator import HOPPER_FP8, Accumulator
from octavo.numerics.formats import E4M3, E5M2
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

RECORDED = np.load(Path(__file__).with_name("data") / "accumulator_h200.npz")
RECORDED_CASES = sorted(name.removesuffix("_out") for name in RECORDED if name.endswith("_out"))

FP8 = E4M3.dtype


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double().transpose(-1, -2)


def test_the_recording_is_complete():
    assert len(RECORDED_CASES) == 14
    assert {int(name.split("_")[1]) for name in RECORDED_CASES} == {32, 64, 256, 4096}


@pytest.mark.parametrize("case", RECORDED_CASES)
def test_bit_for_bit_as_an_h200(case):
    a, b = (torch.from_numpy(RECORDED[f"{case}_{side}"]).view(FP8) for side in "ab")
    assert_same_bits(HOPPER_FP8.matmul(a, b), torch.from_numpy(RECORDED[f"{case}_out"]))


@pytest.mark.parametrize("case", ["norm_4096", "unif_4096", "wide_4096"])
def test_the_recording_is_no_float32_sum(case):
    """Otherwise agreement would show nothing."""
    a, b = (torch.from_numpy(RECORDED[f"{case}_{side}"]).view(FP8) for side in "ab")
    recorded = torch.from_numpy(RECORDED[f"{case}_out"])
    assert ((exact(a, b) - recorded.double()).abs() > 1e-4 * exact(a, b).abs()).any()


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 64, 1000])
def test_sums_of_one_sign_are_never_too_large(depth):
    draw = Draw(depth)
    a, b = draw.normal(5, depth).abs().to(FP8), draw.normal(7, depth).abs().to(FP8)
    result = HOPPER_FP8.matmul(a, b).double()
    assert (result >= 0).all()
    assert (result <= exact(a, b)).all()
    negative = (-a.float()).to(FP8)
    assert torch.equal(HOPPER_FP8.matmul(negative, b), -result.float())


@pytest.mark.parametrize("depth", [0, 1, 2, 32, 33, 100])
def test_short_sums_of_integers_are_exact(depth):
    """Sums below 2^13 need no more than the bits that are kept."""
    generator = torch.Generator().manual_seed(depth)
    a = torch.randint(-8, 9, (5, depth), generator=generator).float().to(FP8)
    b = torch.randint(-8, 9, (7, depth), generator=generator).float().to(FP8)
    assert torch.equal(HOPPER_FP8.matmul(a, b), exact(a, b).float())


@pytest.mark.parametrize("step", [1.0, 0.25])
def test_a_long_sum_stands_still_at_16384_steps(step):
    ones = torch.ones(1, 32 * 1024).to(FP8)
    steps = torch.full((1, 32 * 1024), step).to(FP8)
    assert float(HOPPER_FP8.matmul(ones[:, :8192], steps[:, :8192])) == 8192 * step
    assert float(HOPPER_FP8.matmul(ones, steps)) == 16384 * step


def test_two_levels_go_on():
    tiles = torch.ones(1024, 1, 128).to(FP8)
    assert float(HOPPER_FP8.matmul(tiles, tiles).sum()) == 131072


def test_the_sum_is_carried_on():
    draw = Draw(0)
    a, b = draw.normal(3, 256).to(FP8), draw.normal(4, 256).to(FP8)
    whole = HOPPER_FP8.matmul(a, b)
    first = HOPPER_FP8.matmul(a[:, :96], b[:, :96])
    assert_same_bits(HOPPER_FP8.matmul(a[:, 96:], b[:, 96:], first), whole)


def test_a_total_is_not_changed():
    total = torch.ones(1, 1)
    HOPPER_FP8.matmul(torch.ones(1, 4).to(FP8), torch.ones(1, 4).to(FP8), total)
    assert total == 1


def test_a_large_total_hides_small_products():
    one = torch.ones(1, 1).to(FP8)
    assert HOPPER_FP8.matmul(one, one, torch.tensor([[2.0**13]])) == 2**13 + 1
    assert HOPPER_FP8.matmul(one, one, torch.tensor([[2.0**14]])) == 2**14
    assert HOPPER_FP8.matmul(one, (-one.float()).to(FP8), torch.tensor([[2.0**14]])) == 2**14


def test_the_order_inside_a_group_does_not_matter():
    draw = Draw(0)
    a, b = draw.wide(3, 64).clamp(-448, 448), draw.wide(4, 64).clamp(-448, 448)
    order = torch.cat([draw.permutation(32), 32 + draw.permutation(32)])
    assert_same_bits(
        HOPPER_FP8.matmul(a[:, order].to(FP8), b[:, order].to(FP8)),
        HOPPER_FP8.matmul(a.to(FP8), b.to(FP8)),
    )


def test_nan_reaches_its_row_and_column_only():
    a, b = torch.ones(3, 40), torch.ones(4, 40)
    a[1, 35] = math.nan
    b[2, 3] = math.nan
    result = HOPPER_FP8.matmul(a.to(FP8), b.to(FP8))
    expected = torch.full((3, 4), 40.0)
    expected[1, :] = expected[:, 2] = math.nan
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0)


def test_infinity_of_e5m2():
    a = torch.tensor([[1.0, math.inf, 1.0], [0.0, 1.0, 1.0]]).to(E5M2.dtype)
    b = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 1.0], [1.0, 0.0, 1.0]]).to(FP8)
    result = HOPPER_FP8.matmul(a, b)
    assert result[0, 0] == math.inf
    assert result[0, 1] == -math.inf
    assert result[0, 2].isnan()
    assert result[1].tolist() == [2.0, 0.0, 1.0]


def test_zeros_and_subnormals():
    zeros = torch.zeros(2, 64).to(FP8)
    assert (HOPPER_FP8.matmul(zeros, zeros) == 0).all()
    tiny = torch.full((1, 32), E4M3.smallest_subnormal).to(FP8)
    assert float(HOPPER_FP8.matmul(tiny, tiny)) == 32 * 2.0**-18


def test_a_subnormal_operand_has_the_exponent_of_a_normal_one():
    """2^-9 · 256 is aligned as 2^-6 · 256 would be: 13 bits below 2^2, where 2^-12 is lost."""
    a = torch.tensor([[2.0**-9, 2.0**-6], [2.0**-6, 2.0**-6]]).to(FP8)
    b = torch.tensor([[256.0, 2.0**-6], [256.0, 2.0**-5]]).to(FP8)
    result = HOPPER_FP8.matmul(a, b)
    assert result.tolist() == [[0.5, 0.5 + 2.0**-11], [4.0, 4.0 + 2.0**-11]]


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((2, 3, 64), (2, 4, 64)), ((64, 64), (5, 2, 4, 64)), ((2, 1, 3, 64), (5, 4, 64))],
    ids=str,
)
def test_batches_broadcast(a_shape, b_shape):
    draw = Draw(0)
    a, b = draw.normal(*a_shape).to(FP8), draw.normal(*b_shape).to(FP8)
    batch = torch.broadcast_shapes(a_shape[:-2], b_shape[:-2])
    result = HOPPER_FP8.matmul(a, b)
    assert result.shape == (*batch, a_shape[-2], b_shape[-2])
    wide_a = a.view(torch.uint8).expand(*batch, *a_shape[-2:]).reshape(-1, *a_shape[-2:])
    wide_b = b.view(torch.uint8).expand(*batch, *b_shape[-2:]).reshape(-1, *b_shape[-2:])
    one_by_one = [
        HOPPER_FP8.matmul(x.view(FP8), y.view(FP8)) for x, y in zip(wide_a, wide_b, strict=True)
    ]
    assert_same_bits(result, torch.stack(one_by_one).reshape(result.shape))


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_add(rows, columns):
    a, b = torch.zeros(rows, 64).to(FP8), torch.zeros(columns, 64).to(FP8)
    assert HOPPER_FP8.matmul(a, b).shape == (rows, columns)


def test_more_bits_are_more_exact():
    draw = Draw(0)
    a, b = draw.normal(8, 2048).to(FP8), draw.normal(8, 2048).to(FP8)
    errors = [
        float((Accumulator(group=32, fraction_bits=bits).matmul(a, b) - exact(a, b)).abs().mean())
        for bits in (10, 13, 16, 23)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * errors[1]


def test_depths_must_agree():
    with pytest.raises(ConfigError, match="one K, got 3 and 4"):
        HOPPER_FP8.matmul(torch.zeros(1, 3).to(FP8), torch.zeros(1, 4).to(FP8))


def test_only_fp8_has_an_adder():
    with pytest.raises(ConfigError, match="expected an FP8 dtype"):
        HOPPER_FP8.matmul(torch.zeros(1, 3), torch.zeros(1, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "wide", "positive", "subnormal"])
@pytest.mark.parametrize(
    ("a_format", "b_format"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str
)
def test_bit_for_bit_as_this_gpu(a_format, b_format, kind):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the model is of Hopper's adder (sm_90)")
    draw = Draw(17)
    for depth in (32, 96, 128, 512, 2048):
        if kind == "wide":
            a, b = draw.wide(64, depth), draw.wide(64, depth)
        else:
            a, b = draw.normal(64, depth), draw.normal(64, depth)
        if kind == "positive":
            a, b = a.abs(), b.abs()
        if kind == "subnormal":
            a, b = a * 4 * a_format.smallest_subnormal, b * 4 * b_format.smallest_subnormal
        a = a.clamp(-448, 448).to(a_format.dtype)
        b = b.clamp(-448, 448).to(b_format.dtype)
        one = torch.ones((), device="cuda")
        on_gpu = torch._scaled_mm(
            a.cuda(), b.cuda().t(), one, one, out_dtype=torch.float32, use_fast_accum=True
        )
        assert_same_bits(on_gpu, HOPPER_FP8.matmul(a, b))
