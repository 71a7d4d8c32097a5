"""The asserts fail when they should, and say where."""

import math

import pytest
import torch

from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.inputs import Draw

Failed = pytest.fail.Exception


def noisy(truth: torch.Tensor, size: float, seed: int = 1) -> torch.Tensor:
    return truth + size * Draw(seed).normal(*truth.shape).double()


TRUTH = Draw(0).normal(64, 32).double()
MODEL = noisy(TRUTH, 0.01)


@pytest.mark.parametrize("size", [0.0, 0.01, 0.015])
def test_an_error_like_the_models_is_fine(size):
    assert_within_budget(noisy(TRUTH, size, seed=2).float(), truth=TRUTH, model=MODEL.float())


@pytest.mark.parametrize("size", [0.03, 1.0])
def test_a_larger_error_is_not(size):
    with pytest.raises(Failed, match=r"RMS error .* is over the budget .*worst at \[\d+, \d+\]"):
        assert_within_budget(noisy(TRUTH, size, seed=2).float(), truth=TRUTH, model=MODEL)


def test_one_wrong_element_is_found():
    actual = MODEL.clone()
    actual[17, 5] += 0.2
    with pytest.raises(Failed, match=r"largest error .* over the budget .*worst at \[17, 5\]"):
        assert_within_budget(actual.float(), truth=TRUTH, model=MODEL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_the_result_is_allowed_for(dtype):
    assert_within_budget(TRUTH.to(dtype), truth=TRUTH, model=TRUTH)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)],
    ids=str,
)
def test_but_no_more(dtype, size):
    with pytest.raises(Failed, match="over the budget"):
        assert_within_budget(noisy(TRUTH, size).to(dtype), truth=TRUTH, model=TRUTH)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_must_be_so_in_the_truth(bad):
    actual, truth = MODEL.clone(), TRUTH.clone()
    actual[3, 4] = bad
    message = r"1 of 2048 elements .* first at \[3, 4\]: expected .*, got "
    with pytest.raises(Failed, match=message):
        assert_within_budget(actual, truth=truth, model=MODEL)
    truth[3, 4] = bad
    assert_within_budget(actual, truth=truth, model=MODEL)
    with pytest.raises(Failed, match=message):
        assert_within_budget(MODEL, truth=truth, model=MODEL)
    truth[3, 4] = 0.0 if math.isnan(bad) else -bad
    with pytest.raises(Failed, match=message):
        assert_within_budget(actual, truth=truth, model=MODEL)


def test_a_broken_model_gives_no_budget():
    model = MODEL.clone()
    model[0, 0] = math.nan
    with pytest.raises(Failed, match="over the budget"):
        assert_within_budget(TRUTH.float(), truth=TRUTH, model=model)


def test_nothing_and_all_infinite():
    empty = torch.zeros(0, 3)
    assert_within_budget(empty, truth=empty.double(), model=empty)
    lse = torch.full((4,), -math.inf)
    assert_within_budget(lse, truth=lse.double(), model=lse)


def test_shapes_must_agree():
    with pytest.raises(Failed, match=r"one shape, got \[3\], truth \[1, 3\] and model \[3\]"):
        assert_within_budget(torch.ones(3), truth=torch.ones(1, 3), model=torch.ones(3))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool, torch.float64],
    ids=str,
)
def test_same_bits(dtype):
    x = Draw(0).coin(5, 3).to(dtype)
    assert_same_bits(x, x.clone())
    assert_same_bits(x.t(), x.t().contiguous())
    assert_same_bits(x[:0], x[:0])
    other = x.clone()
    other[3, 2] = 1 - x[3, 2].float()
    with pytest.raises(Failed, match=r"1 of 15 elements differ, first at \[3, 2\]: expected"):
        assert_same_bits(x, other)


def test_bits_of_zero_and_nan():
    assert_same_bits(torch.tensor(math.nan), torch.tensor(math.nan))
    with pytest.raises(Failed, match=r"first at \[\]: expected 0.0 \(0x00000000\), got -0.0"):
        assert_same_bits(torch.tensor(-0.0), torch.tensor(0.0))
    with pytest.raises(Failed, match=r"2 of 3 .* first at \[1\]: expected 2.0 \(0x4000\), got 3.0"):
        assert_same_bits(
            torch.tensor([1.0, 3.0, 5.0], dtype=torch.bfloat16),
            torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16),
        )


def test_dtype_and_shape_are_part_of_it():
    with pytest.raises(Failed, match=r"expected torch.float16 \[2\], got torch.float32 \[2\]"):
        assert_same_bits(torch.ones(2), torch.ones(2, dtype=torch.float16))
    with pytest.raises(Failed, match=r"expected torch.float32 \[1, 2\], got torch.float32 \[2\]"):
        assert_same_bits(torch.ones(2), torch.ones(1, 2))
