"""Lines through measurements, and where two of them cross."""

import math

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.measure.fit import Line, break_even, fit_line


def test_points_on_a_line_leave_nothing():
    line = fit_line([256, 4096, 131072], [3.0 + 2e-5 * x for x in (256, 4096, 131072)])
    assert line.intercept == pytest.approx(3.0)
    assert line.slope == pytest.approx(2e-5)
    assert line.residual < 1e-12
    assert line.at(1e5) == pytest.approx(5.0)


def test_noise_is_the_residual():
    x = np.arange(10_000.0)
    noise = np.random.default_rng(0).normal(0, 0.1, len(x))
    line = fit_line(x.tolist(), (1 + 0.01 * x + noise).tolist())
    assert line.residual == pytest.approx(0.1, rel=0.05)
    assert line.slope == pytest.approx(0.01, rel=1e-3)


def test_a_slope_far_from_zero_is_not_lost():
    line = fit_line([1e12, 1e12 + 1], [1.0, 2.0])
    assert line.slope == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("x", "y"),
    [([], []), ([1.0], [2.0]), ([1.0, 1.0], [2.0, 3.0]), ([1, 2], [1]), ([1, 2], [1, math.nan])],
)
def test_what_is_no_line(x, y):
    with pytest.raises(ConfigError, match="expected"):
        fit_line(x, y)


@pytest.mark.parametrize(
    ("own", "tokens", "text"),
    [
        ((6.0, 0.5), 2.0, "faster from 2 tokens on"),
        ((4.0, 0.5), -2.0, "always faster"),
        ((4.0, 1.0), -math.inf, "always faster"),
        ((5.0, 1.0), math.inf, "never faster"),
        ((6.0, 1.0), math.inf, "never faster"),
        ((6.0, 2.0), math.inf, "never faster"),
        ((4.0, 2.0), math.inf, "faster up to 1 tokens"),
    ],
)
def test_break_even(own, tokens, text):
    found = break_even(Line(*own, 0.0), Line(5.0, 1.0, 0.0))
    assert found.tokens == tokens
    assert str(found) == text


def test_equal_intercepts_break_even_at_nothing():
    found = break_even(Line(5.0, 0.5, 0.0), Line(5.0, 1.0, 0.0))
    assert found.tokens == 0 and str(found) == "faster from 0 tokens on"
