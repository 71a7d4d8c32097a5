"""The error measures against values worked out by hand."""

import math

import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics.error import cosine, max_error, relative_rms, sqnr_db
from octavo.testing.inputs import Draw

MEASURES = (relative_rms, sqnr_db, cosine, max_error)
each_measure = pytest.mark.parametrize("measure", MEASURES, ids=lambda m: m.__name__)

# actual, truth, relative RMS, SQNR in dB, cosine, largest error
BY_HAND = [
    ([3.0, 4.0], [3.0, 4.0], 0.0, math.inf, 1.0, 0.0),
    ([3.3, 4.4], [3.0, 4.0], 0.1, 20.0, 1.0, 0.4),
    ([3.0, 3.0], [3.0, 4.0], 0.2, 20 * math.log10(5), 21 / (5 * math.sqrt(18)), 1.0),
    ([4.0, -3.0], [3.0, 4.0], math.sqrt(2), -10 * math.log10(2), 0.0, 7.0),
    ([-3.0, -4.0], [3.0, 4.0], 2.0, -20 * math.log10(2), -1.0, 8.0),
    ([0.0, 0.0], [3.0, 4.0], 1.0, 0.0, 0.0, 4.0),
    ([3.0, 4.0], [0.0, 0.0], math.inf, -math.inf, 0.0, 4.0),
    ([0.0, 0.0], [0.0, 0.0], 0.0, math.inf, 1.0, 0.0),
    ([], [], 0.0, math.inf, 1.0, 0.0),
    ([0.0], [-0.0], 0.0, math.inf, 1.0, 0.0),
]


@pytest.mark.parametrize(("actual", "truth", "rms", "sqnr", "angle", "largest"), BY_HAND)
def test_by_hand(actual, truth, rms, sqnr, angle, largest):
    pair = torch.tensor(actual, dtype=torch.float64), torch.tensor(truth, dtype=torch.float64)
    assert relative_rms(*pair) == pytest.approx(rms, rel=1e-12)
    assert sqnr_db(*pair) == pytest.approx(sqnr, rel=1e-12, abs=1e-12)
    assert cosine(*pair) == pytest.approx(angle, rel=1e-12, abs=1e-12)
    assert max_error(*pair) == pytest.approx(largest, rel=1e-12)


@each_measure
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["actual", "truth", "both"])
def test_a_broken_result_never_looks_good(measure, bad, side):
    actual, truth = torch.ones(2, 3), torch.ones(2, 3)
    if side != "truth":
        actual[1, 2] = bad
    if side != "actual":
        truth[1, 2] = bad
    assert math.isnan(measure(actual, truth))


@each_measure
def test_shapes_must_agree(measure):
    with pytest.raises(ConfigError, match=r"one shape, got \[2, 3\] and \[3\]"):
        measure(torch.ones(2, 3), torch.ones(3))


@each_measure
def test_a_float_comes_back_whatever_the_dtype(measure):
    x = Draw(0).normal(4, 5)
    values = {
        dtype: measure(x.to(dtype), x)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    }
    assert all(type(value) is float for value in values.values())
    assert values[torch.float64] == values[torch.float32]
    assert values[torch.bfloat16] != values[torch.float32]


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e-45, 1e170, 1e300])
def test_magnitude_does_not_matter(size):
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
    actual = torch.tensor([3.0, 3.0], dtype=torch.float64) * size
    assert relative_rms(actual, truth) == pytest.approx(0.2)
    assert sqnr_db(actual, truth) == pytest.approx(20 * math.log10(5))
    assert cosine(actual, truth) == pytest.approx(21 / (5 * math.sqrt(18)))


@pytest.mark.parametrize("size", [1, 3, 1000, 10_000])
def test_an_exact_result_has_cosine_one(size):
    x = Draw(size).normal(size)
    assert cosine(x, x) == 1.0
    assert cosine(x, -x) == pytest.approx(-1.0, rel=1e-12)
    assert cosine(2 * x, x) == pytest.approx(1.0, rel=1e-15)


def test_a_graph_does_not_matter():
    x = torch.ones(3, requires_grad=True)
    assert relative_rms(x * 2, x) == 1.0
