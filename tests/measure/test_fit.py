"""Lines through measurements, where two of them cross, and how often intervals hold."""

import math
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.measure.fit import (
    Interval,
    Line,
    Quadratic,
    Ratio,
    break_even,
    curve_break_even,
    fit_line,
    fit_polynomial,
    fit_quadratic,
    ratio_interval,
    slope_ratio,
    square_ratio,
    student_t,
)
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.latency import fit_itl, fit_ttft


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


def test_the_lines_of_vllm_s_blog():
    """Llama-3.1-8B on an H100: 54 % of the slope, and a break-even of about 7,000 tokens."""
    bf16, fp8 = Line(6.44, 4.37e-5, 0.0), Line(6.58, 2.37e-5, 0.0)
    assert slope_ratio(fp8, bf16).value == pytest.approx(0.54, abs=0.005)
    found = break_even(fp8, bf16)
    assert found.tokens == pytest.approx(7000, rel=0.01)
    assert str(found) == "faster from 7,000 tokens on"
    assert found.interval is None and slope_ratio(fp8, bf16).interval is None


def test_measured_lines_like_the_blog_s_have_intervals_around_it():
    """Points of both lines, 10 µs off here and there: the intervals hold the blog's figures."""
    lengths = [256, 4096, 8192, 32768, 128000]
    random = np.random.default_rng(1)
    shared = random.normal(0, 0.05, 5)
    bf16, fp8 = (
        fit_line(lengths, (i + s * np.asarray(lengths) + shared + random.normal(0, 0.01, 5)))
        for i, s in ((6.44, 4.37e-5), (6.58, 2.37e-5))
    )
    found, ratio = break_even(fp8, bf16), slope_ratio(fp8, bf16)
    assert 7000 in found.interval and found.tokens in found.interval
    assert found.interval.low > 0 and found.interval.high < 14_000
    assert 0.5423 in ratio.interval and ratio.interval.high - ratio.interval.low < 0.05
    assert 4.37e-5 in bf16.interval("slope") and 6.44 in bf16.interval("intercept")


def test_two_points_have_no_interval():
    line = fit_line([1, 2], [3, 5])
    assert line.interval("slope") is None and line.interval("intercept") is None
    assert break_even(line, fit_line([1, 2], [4, 5])).interval is None
    curve = fit_quadratic([1, 2, 3], [1, 2, 4])
    assert [curve.interval(term) for term in Quadratic.TERMS] == [None] * 3
    assert curve.contradicted == ()


def test_a_break_even_that_may_be_anywhere():
    lengths = [1, 2, 3, 4]
    line, other = fit_line(lengths, [1.0, 2.1, 2.9, 4.0]), fit_line(lengths, [1.1, 1.9, 3.2, 3.9])
    assert break_even(line, other).interval == Interval(-math.inf, math.inf)


@hypothesis.given(st.tuples(st.floats(0, 100), st.floats(0, 0.1), st.floats(0, 1e-6)))
def test_exact_curves_are_recovered_exactly(planted):
    lengths = [256, 4096, 8192, 32768, 128000]
    curve = fit_quadratic(
        lengths, [planted[0] + planted[1] * x + planted[2] * x**2 for x in lengths]
    )
    size = curve.at(128000) + 1e-9
    found = (curve.constant, curve.linear * 128000, curve.square * 128000**2)
    wanted = (planted[0], planted[1] * 128000, planted[2] * 128000**2)
    assert found == pytest.approx(wanted, abs=1e-8 * size)
    assert curve.residual <= 1e-8 * size and min(found) >= 0


# Shrinking a failure would draw for minutes, and explain nothing.
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(st.floats(0, 60), st.floats(0, 0.02), st.floats(0, 5e-7), st.integers(0, 2**32))
def test_terms_are_in_their_intervals_as_often_as_they_say(constant, linear, square, seed):
    """Also with terms of zero, where half of the free fits are negative; never less often."""
    lengths = np.asarray([256.0, 4096, 8192, 32768, 128000])
    random = np.random.default_rng(seed)
    clean = constant + linear * lengths + square * lengths**2
    planted = dict(zip(Quadratic.TERMS, (constant, linear, square), strict=True))
    inside = []
    for _ in range(200):
        curve = fit_quadratic(lengths, clean + random.normal(0, 10, 5))
        assert min(curve.constant, curve.linear, curve.square) >= 0
        for term, value in planted.items():
            interval = curve.interval(term)
            inside.append(interval is not None and value in interval)
            assert interval is None or (interval.low >= 0 and getattr(curve, term) in interval)
    shares = np.reshape(inside, (200, 3)).mean(axis=0)
    assert ((shares > 0.89) & (shares < 0.99)).all()


def test_a_negative_term_is_held_at_zero():
    """Points of x² - 4: no constant, and the best of what is allowed."""
    lengths = [1.0, 2.0, 3.0, 4.0, 5.0]
    curve = fit_quadratic(lengths, [x**2 - 4 for x in lengths])
    assert curve.held == ("constant", "linear") and curve.contradicted == ("constant",)
    assert (curve.constant, curve.linear) == (0, 0) and curve.interval("constant") is None
    assert curve.square == pytest.approx(sum(x**2 * (x**2 - 4) for x in lengths) / 979)
    free = fit_quadratic(lengths, [x**2 + x + 4 for x in lengths])
    assert free.held == () and square_ratio(curve, free).interval is None
    assert square_ratio(curve, free).value == pytest.approx(curve.square)


def test_the_best_of_what_is_allowed():
    """No curve of a grid of allowed ones leaves less."""
    lengths, y = np.asarray([1.0, 2.0, 3.0, 4.0]), np.asarray([5.0, 3.0, 2.5, 2.0])
    curve = fit_quadratic(lengths, y)
    steps = np.linspace(0, 5, 16)
    grid = [c + a * lengths + b * lengths**2 for c in steps for a in steps / 5 for b in steps / 25]
    assert curve.residual <= min(np.sqrt(np.mean((y - one) ** 2)) for one in grid) + 1e-12
    assert curve.held == ("linear", "square")


def test_square_ratio():
    first, other = Quadratic(1, 1, 0.5, 0), Quadratic(1, 1, 2.0, 0)
    assert square_ratio(first, other) == Ratio(0.25)
    assert math.isnan(square_ratio(first, Quadratic(1, 1, 0, 0)).value)
    assert math.isnan(slope_ratio(Line(1, 1, 0), Line(1, 0, 0)).value)


@pytest.mark.parametrize(
    ("gaps", "tokens", "up_to", "text"),
    [
        ((-1, 0, 0), -math.inf, None, "always faster"),
        ((0, 0, 0), math.inf, None, "never faster"),
        ((1, 0, 0), math.inf, None, "never faster"),
        ((5, -1, 0), 5, None, "faster from 5 tokens on"),
        ((25, 0, -1), 5, None, "faster from 5 tokens on"),
        ((-25, 0, 1), math.inf, 5, "faster up to 5 tokens"),
        ((3.2, -1.2, 0.1), 4, 8, "faster from 4 to 8 tokens"),
        ((-3.2, 1.2, -0.1), 8, 4, "faster up to 4 tokens and from 8 on"),
        # They touch at 6, and do not cross.
        ((36, -12, 1), math.inf, None, "never faster"),
        ((-36, 12, -1), -math.inf, None, "always faster"),
        # What is below 2 or beyond 10 is not told.
        ((144, 0, -1), math.inf, None, "never faster"),
        ((24, -3.2, 0.1), math.inf, None, "never faster"),
        ((1, 0, -1), -math.inf, None, "always faster"),
    ],
)
def test_where_curves_cross(gaps, tokens, up_to, text):
    first = (64.0, 16.0, 2.0)
    own = Quadratic(*(a + b for a, b in zip(first, gaps, strict=True)), 0)
    found = curve_break_even(own, Quadratic(*first, 0), (2, 10))
    assert found.tokens == pytest.approx(tokens) and str(found) == text
    assert found.up_to == (None if up_to is None else pytest.approx(up_to))
    assert found.interval is None
    at = tokens if 2 <= tokens <= 10 else up_to
    assert found.crossing == (None if at is None else pytest.approx(at))


LENGTHS = np.asarray([256.0, 4096, 8192, 32768, 128000])
TERM = st.tuples(st.floats(0, 100), st.floats(0, 0.1), st.floats(0, 1e-6))


@hypothesis.given(TERM, TERM)
def test_a_planted_curve_is_faster_where_it_says(planted, others):
    """Fitted from exact points: at every length the cheaper one is the one that is said to be."""
    own, other = (
        fit_quadratic(LENGTHS, c + b * LENGTHS + a * LENGTHS**2) for c, b, a in (planted, others)
    )
    found = curve_break_even(own, other)
    up_to = -math.inf if found.up_to is None else found.up_to
    for x in np.geomspace(256, 128000, 97).tolist():
        is_said = x >= found.tokens if up_to <= found.tokens else found.tokens <= x <= up_to
        is_said |= x <= up_to and (up_to <= found.tokens or math.isinf(found.tokens))
        gap = sum((p - q) * x**k for k, (p, q) in enumerate(zip(planted, others, strict=True)))
        if abs(gap) > 1e-6 * (own.at(128000) + other.at(128000)) + 1e-9:
            assert is_said == (gap < 0), (x, found)


# Shrinking a failure would draw for minutes, and explain nothing.
@pytest.mark.slow
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(st.floats(5000, 40000), st.integers(0, 2**32))
def test_a_planted_crossing_is_in_its_interval_as_often_as_it_says(crossing, seed):
    random = np.random.default_rng(seed)
    first = 100 + 0.02 * LENGTHS + 4e-7 * LENGTHS**2
    own = first + 2e-7 * crossing**2 - 2e-7 * LENGTHS**2
    inside = []
    for _ in range(150):
        shared = random.normal(0, 20, 5)  # what both rows have is no difference between them
        noisy = [y + shared + random.normal(0, 5, 5) for y in (own, first)]
        curve, other = (fit_quadratic(LENGTHS, y) for y in noisy)
        if curve.held or other.held:
            continue
        found = curve_break_even(curve, other)
        if found.interval is not None:
            assert 256 <= found.interval.low <= found.crossing <= found.interval.high <= 128000
            inside.append(crossing in found.interval)
    assert len(inside) > 100 and 0.86 < np.mean(inside) <= 0.995


def test_exact_curves_cross_where_they_do():
    """Nothing is left unexplained: the interval is the crossing, and not the whole range."""
    own, first = (
        fit_quadratic(LENGTHS, c + 0.02 * LENGTHS + a * LENGTHS**2)
        for c, a in ((75.0, 1e-6), (50.0, 2e-6))
    )
    found = curve_break_even(own, first)
    assert found.tokens == pytest.approx(5000)
    assert (found.interval.low, found.interval.high) == pytest.approx((5000, 5000), rel=1e-4)


def test_curves_that_say_nothing_of_where_they_cross():
    lengths = [1.0, 2.0, 3.0, 4.0]
    curve = fit_quadratic(lengths, [5.0, 6.0, 9.0, 12.0])
    with pytest.raises(ConfigError, match="expected curves that were fitted, or the lengths"):
        curve_break_even(curve, Quadratic(1, 1, 1, 0))
    far = fit_quadratic([5, 6, 7, 8], [1, 2, 4, 7])
    with pytest.raises(ConfigError, match="expected curves over lengths that both have"):
        curve_break_even(curve, far)
    # Three points leave nothing to judge by; a term that is held is not the one that was fitted.
    three = fit_quadratic(lengths[:3], [4.0, 6.5, 9.5])
    assert curve_break_even(curve, three).crossing is not None
    assert curve_break_even(curve, three).interval is None
    held = fit_quadratic(lengths, [0.0, 4.0, 9.5, 16.0])
    assert held.held and curve_break_even(held, curve).interval is None


def test_fits_of_records():
    """Half of the answer is context, on average; TTFT has none of it."""
    records = [
        Measurement(
            op="latency",
            impl="octavo",
            case={"input_len": length, "output_len": 128},
            values={
                "median_itl_ms": 5 + 1e-4 * (length + 64),
                "median_ttft_ms": 20 + 0.01 * length + 1e-6 * length**2,
            },
            machine=Machine.current(),
            command="x",
        )
        for length in (256, 4096, 32768)
    ]
    assert fit_itl(records).intercept == pytest.approx(5)
    curve = fit_ttft(records)
    assert curve.at(10_000) == pytest.approx(220) and curve.interval("square") is None
    lost = [replace(record, case={"output_len": 128}) for record in records]
    with pytest.raises(ConfigError, match="a number input_len"):
        fit_ttft(lost)


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
