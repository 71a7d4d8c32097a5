"""Intervals: Student's table, and how often they hold what was planted."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.measure.regression import Interval, fit_polynomial, ratio_interval, student_t

LENGTHS = (256.0, 4096.0, 8192.0, 32768.0, 128000.0)


@pytest.mark.parametrize(
    ("num_spare", "confidence", "reach"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.30265),
        (3, 0.95, 3.18245),
        (6, 0.95, 2.44691),
        (7, 0.99, 3.49948),
        (30, 0.95, 2.04227),
        (30, 0.5, 0.682756),
        (10_000, 0.95, 1.96020),
    ],
)
def test_student_s_table(num_spare, confidence, reach):
    assert student_t(num_spare, confidence) == pytest.approx(reach, rel=1e-5)


@pytest.mark.parametrize(("num_spare", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_what_student_has_no_answer_to(num_spare, confidence):
    with pytest.raises(ConfigError, match="degrees of freedom"):
        student_t(num_spare, confidence)


@hypothesis.given(
    st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=4),
    st.lists(st.integers(0, 200_000), min_size=5, max_size=9, unique=True),
)
def test_exact_points_are_recovered_and_known_exactly(planted, lengths):
    planted = [value / 1e5**power for power, value in enumerate(planted)]
    y = [sum(c * x**power for power, c in enumerate(planted)) for x in lengths]
    fit = fit_polynomial(lengths, y, len(planted) - 1)
    at = [sum(c * x**power for power, c in enumerate(fit.coefficients)) for x in lengths]
    size = max(map(abs, y)) + 1e-300
    assert at == pytest.approx(y, rel=1e-9, abs=1e-9 * size)
    assert max(map(abs, fit.residuals)) <= 1e-9 * size


def test_an_interval_is_the_textbook_s():
    """x = 1 … 5, y = 2, 4, 5, 4, 5: slope 0.6 ± 3.182 · √0.08, intercept 2.2 ± 3.182 · √0.88."""
    fit = fit_polynomial([1, 2, 3, 4, 5], [2, 4, 5, 4, 5], 1)
    assert fit.coefficients == pytest.approx((2.2, 0.6))
    reach = 3.182446 * math.sqrt(0.08)
    slope = fit.interval(1)
    assert (slope.low, slope.high) == pytest.approx((0.6 - reach, 0.6 + reach))
    intercept = fit.interval(0)
    assert intercept.high - 2.2 == pytest.approx(3.182446 * math.sqrt(0.88))


def test_without_points_to_spare_there_is_no_interval():
    two = fit_polynomial([1, 2], [1, 3], 1)
    three = fit_polynomial([1, 2, 4], [1, 3, 4], 1)
    assert two.num_spare == 0 and two.interval(0) is None and two.interval(1) is None
    assert ratio_interval(two, three, (0, 1, 0, 0), (0, 0, 0, 1)) is None
    assert ratio_interval(three, None, (0, 1, 0, 0), (0, 0, 0, 1)) is None


def share(num_draws, is_inside):
    """Of so many draws, those that are inside."""
    return sum(map(is_inside, range(num_draws))) / num_draws


# Shrinking a failure would draw for minutes, and explain nothing.
@hypothesis.settings(max_examples=3, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    st.tuples(st.floats(1, 10), st.floats(1e-5, 1e-4), st.floats(1e-10, 1e-9)),
    st.integers(1, 2),
    st.floats(0.01, 1.0),
    st.integers(0, 2**32),
)
def test_an_interval_holds_what_was_planted_as_often_as_it_says(planted, degree, noise, seed):
    random = np.random.default_rng(seed)
    clean = sum(c * np.asarray(LENGTHS) ** k for k, c in enumerate(planted[: degree + 1]))

    def draw(_):
        y = clean + random.normal(0, noise, len(LENGTHS))
        fit = fit_polynomial(LENGTHS, y.tolist(), degree)
        return [planted[k] in fit.interval(k) for k in range(degree + 1)]

    found = np.mean([draw(number) for number in range(250)], axis=0)
    assert ((found > 0.895) & (found < 0.995)).all()  # four standard errors around 95 %


@pytest.mark.parametrize("is_paired", [True, False])
def test_a_ratio_s_interval_holds_as_often_as_it_says(is_paired):
    """Slopes of 2 and 4; as pairs, both have the same noise and a little of their own."""
    random = np.random.default_rng(0)
    x = np.arange(6.0)
    other_x = x if is_paired else x + 0.5
    narrow = []

    def is_inside(_):
        shared = random.normal(0, 1.0, 6) * is_paired
        first = fit_polynomial(x, 2 * x + shared + random.normal(0, 0.3, 6), 1)
        second = fit_polynomial(other_x, 4 * other_x + shared + random.normal(0, 0.3, 6), 1)
        found = ratio_interval(first, second, (0, 1, 0, 0), (0, 0, 0, 1))
        narrow.append(found.high - found.low)
        return 0.5 in found

    assert 0.91 < share(300, is_inside) < 0.985
    if is_paired:  # what both share is 1.0: half of it would be left if they were independent
        assert np.median(narrow) < 0.4


def test_a_denominator_that_may_be_zero_has_no_ends():
    noisy = fit_polynomial([1, 2, 3, 4], [1, 5, 0, 2], 1)
    steady = fit_polynomial([1, 2, 3, 4], [1, 2, 3, 4.1], 1)
    found = ratio_interval(steady, noisy, (0, 1, 0, 0), (0, 0, 0, 1))
    assert found == Interval(-math.inf, math.inf)


@pytest.mark.parametrize(
    ("x", "y", "degree"),
    [
        ([1.0, 2.0], [1.0, 2.0], 2),
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], 1),
        ([1.0, 2.0], [1.0], 1),
        ([1.0, 2.0], [1.0, math.inf], 1),
    ],
)
def test_what_has_no_fit(x, y, degree):
    with pytest.raises(ConfigError, match="expected"):
        fit_polynomial(x, y, degree)
