"""Costs fitted to measurements by least squares: lines and curves, where they cross, how sure.

ITL is a line over the context, TTFT a polynomial of degree two over the input. All lengths count
alike: on an H200 a TTFT varies by 0.5 to 12 ms between 35 ms and 10 s, and the most at the shortest
(`results/latency_h200.jsonl`).

Intervals are Student's of 95 %; without a point more than coefficients there is none. Those of
ratios are Fieller's: they hold for few points and for denominators near zero, where the delta
method's are too narrow, and have no ends where the denominator may be zero.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError

CONFIDENCE = 0.95
_NUM_STEPS = 2**17  # places from a root to an end of what was measured: a token each

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """From low to high; an end that is infinite is none."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Regression:
    """y ≈ Σ coefficients[k] · x^k with the least squares; residuals: what is left of each y."""

    x: tuple[float, ...]
    coefficients: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def num_spare(self) -> int:
        """Points beyond the coefficients: the degrees of freedom of what is left."""
        return len(self.x) - len(self.coefficients)

    def interval(self, power: int) -> Interval | None:
        """Of the coefficient of this power of x; None where no point is to spare."""
        if self.num_spare < 1:
            return None
        reach = student_t(self.num_spare) * math.sqrt(self.covariance(self)[power, power])
        value = self.coefficients[power]
        return Interval(value - reach, value + reach)

    def covariance(self, other: "Regression") -> _Array:
        """Of these coefficients with those of another fit of the same degree, or of itself.

        Fits over the same x are pairs: what both leave unexplained has one cause, such as the
        machine, and their difference is known better for it. Over other x they are independent.
        """
        size = len(self.coefficients)
        if self.x != other.x:
            return np.zeros((size, len(other.coefficients)))
        solution = _solution(np.asarray(self.x), size - 1)
        spread = np.dot(self.residuals, other.residuals) / self.num_spare
        return np.asarray(spread * solution @ solution.T)


def fit_polynomial(x: Sequence[float], y: Sequence[float], degree: int) -> Regression:
    """The polynomial of this degree with the least squares; at least degree + 1 different x."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    is_finite = np.isfinite(xs).all() and np.isfinite(ys).all()
    if xs.shape != ys.shape or len(set(xs.tolist())) <= degree or not is_finite:
        raise ConfigError(
            f"expected {degree + 1} or more different x, each with a y, all of them finite; got "
            f"{list(x)} and {list(y)}"
        )
    solution = _solution(xs, degree)
    coefficients = solution @ ys
    # Once more through what is left: it takes away most of what rounding did.
    powers = np.vander(xs, degree + 1, increasing=True)
    coefficients += solution @ (ys - powers @ coefficients)
    left = ys - powers @ coefficients
    return Regression(tuple(xs.tolist()), tuple(coefficients.tolist()), tuple(left.tolist()))


def _solution(x: _Array, degree: int) -> _Array:
    """The matrix that takes y to the coefficients: [degree + 1, points]."""
    # Around their mean and in units of their reach: x such as 128000 and 128001 would lose the
    # slope in squares of x.
    center = float(x.mean())
    unit = float(np.abs(x - center).max()) or 1.0
    columns = np.vander((x - center) / unit, degree + 1, increasing=True)
    centered = np.linalg.pinv(columns) / unit ** np.arange(degree + 1)[:, None]
    # (x - center)^k back into powers of x.
    powers = range(degree + 1)
    back = [[math.comb(k, p) * (-center) ** max(k - p, 0) for k in powers] for p in powers]
    return np.asarray(np.asarray(back) @ centered)


def ratio_interval(
    first: Regression | None,
    second: Regression | None,
    numerator: Sequence[float],
    denominator: Sequence[float],
) -> Interval | None:
    """Fieller's interval of a ratio between sums of the coefficients of two fits.

    numerator, denominator: the weights of the coefficients of the first, then of the second. None
    where a fit is none, or has no point to spare.
    """
    covariance = _joint_covariance(first, second)
    if first is None or second is None or covariance is None:
        return None
    values = np.asarray([*first.coefficients, *second.coefficients])
    above, below = np.asarray(numerator), np.asarray(denominator)
    top, bottom = float(above @ values), float(below @ values)
    if bottom == 0:
        return Interval(-math.inf, math.inf)
    square = _square(first, second, covariance, above - top / bottom * below)
    # All ratios r with (top - r · bottom)² ≤ square · the variance of top - r · bottom.
    a = bottom**2 - square * float(below @ covariance @ below)
    b = top * bottom - square * float(above @ covariance @ below)
    c = top**2 - square * float(above @ covariance @ above)
    if a <= 0:
        return Interval(-math.inf, math.inf)
    reach = math.sqrt(max(0.0, b * b - a * c))
    return Interval((b - reach) / a, (b + reach) / a)


def root_interval(
    first: Regression | None,
    second: Regression | None,
    root: float,
    within: tuple[float, float],
) -> Interval | None:
    """The x around `root`, where two fits of one degree are equal, at which they may be equal.

    All x next to the root with difference(x)² ≤ t² · the variance of difference(x), up to the ends
    of `within`. None where a fit is none, or has no point to spare.
    """
    covariance = _joint_covariance(first, second)
    if first is None or second is None or covariance is None:
        return None
    size = len(first.coefficients)
    gaps = np.subtract(first.coefficients, second.coefficients)
    both = np.hstack([np.eye(size), -np.eye(size)])
    spread = both @ covariance @ both.T
    # Fits over other x: with the fewer degrees of freedom, rather an interval that is too wide.
    square = student_t(min(first.num_spare, second.num_spare)) ** 2

    def reach(end: float) -> float:
        # Roots of the polynomial behind it would be lost to rounding where two of them are near.
        steps = np.linspace(root, end, _NUM_STEPS + 1)
        powers = np.vander(steps[1:], size, increasing=True)
        variance = np.einsum("ni,ij,nj->n", powers, spread, powers)
        beyond = np.flatnonzero((powers @ gaps) ** 2 > square * variance)
        return float(steps[beyond[0]]) if len(beyond) else end

    return Interval(reach(within[0]), reach(within[1]))


def _joint_covariance(first: Regression | None, second: Regression | None) -> _Array | None:
    """Of the coefficients of both fits, one after the other; None where nothing is known of it."""
    if first is None or second is None or min(first.num_spare, second.num_spare) < 1:
        return None
    return np.block([[a.covariance(b) for b in (first, second)] for a in (first, second)])


def _square(first: Regression, second: Regression, covariance: _Array, weights: _Array) -> float:
    """Student's t squared of a weighted sum over both fits.

    Degrees of freedom are those of the pairs, or Welch's, rounded down: rather an interval that is
    a little too wide.
    """
    if first.x == second.x:
        return student_t(first.num_spare) ** 2
    cut = len(first.coefficients)
    own, others = (
        float(weights[part] @ covariance[part, part] @ weights[part])
        for part in (slice(cut), slice(cut, None))
    )
    shares = own**2 / first.num_spare + others**2 / second.num_spare
    welch = (own + others) ** 2 / shares if shares > 0 else first.num_spare
    return student_t(max(1, int(welch))) ** 2


@functools.cache
def student_t(num_spare: int, confidence: float = CONFIDENCE) -> float:
    """How many standard errors an interval reaches to each side: 12.7 with 1 to spare, 3.18 with 3.

    With t = √num_spare · tan(angle), the density over the angle is a power of its cosine.
    """
    if num_spare < 1 or not 0 < confidence < 1:
        raise ConfigError(
            f"expected 1 or more degrees of freedom and a confidence between 0 and 1, got "
            f"{num_spare} and {confidence}"
        )
    # Beyond 40 standard errors of the normal distribution nothing is left.
    angles = np.linspace(0, min(math.pi / 2, 40 / math.sqrt(num_spare)), 2**17)
    density = np.cos(angles) ** (num_spare - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp(confidence, share / share[-1], angles)
    return math.sqrt(num_spare) * math.tan(angle)


class _Fitted:
    """What lines and curves share: terms, in the order of the powers of x, and their fit."""

    TERMS: ClassVar[tuple[str, ...]]
    held: tuple[str, ...] = ()
    fit: Regression | None

    @property
    def terms(self) -> tuple[float, ...]:
        """The coefficients of the powers of x."""
        return tuple(getattr(self, term) for term in self.TERMS)

    def at(self, x: float) -> float:
        """The value at x."""
        return float(np.polyval(self.terms[::-1], x))

    def interval(self, term: str) -> Interval | None:
        """95 % of a term; None where no point is to spare, which would say how far off it is."""
        return None if self.fit is None else self.fit.interval(self.TERMS.index(term))


@dataclass(frozen=True)
class Line(_Fitted):
    """y ≈ intercept + slope · x; residual: the root mean square of what is left, in y's unit.

    fit: what it was fitted to, which intervals come from; None if it was given.
    """

    TERMS = ("intercept", "slope")

    intercept: float
    slope: float
    residual: float
    fit: Regression | None = field(default=None, repr=False)


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The straight line with the least squares through two or more points."""
    fit = fit_polynomial(x, y, 1)
    intercept, slope = fit.coefficients
    return Line(intercept, slope, _rms(fit.residuals), fit)


@dataclass(frozen=True)
class Quadratic(_Fitted):
    """y ≈ constant + linear · x + square · x², no term below zero.

    residual: the root mean square of what is left. held: the terms that are zero because the
    least squares without bounds would have them, or their neighbours, negative. fit: those least
    squares, which intervals come from; None if the terms were given.
    """

    TERMS = ("constant", "linear", "square")

    constant: float
    linear: float
    square: float
    residual: float
    held: tuple[str, ...] = ()
    fit: Regression | None = field(default=None, repr=False)

    def interval(self, term: str) -> Interval | None:
        """95 % of a term; None with three points, or where all of it would be below zero.

        Student's interval of the fit without bounds, cut off at zero (no cost is negative) and
        widened to the term itself. If nothing of it is left, the points are on no such curve.
        """
        free = super().interval(term)
        if free is None or free.high < 0:
            return None
        value = float(getattr(self, term))
        return Interval(min(max(free.low, 0.0), value), max(free.high, value))

    @property
    def contradicted(self) -> tuple[str, ...]:
        """Terms that the points want below zero, by more than their interval."""
        found = ((term, super(Quadratic, self).interval(term)) for term in self.TERMS)
        return tuple(term for term, interval in found if interval and interval.high < 0)


def fit_quadratic(x: Sequence[float], y: Sequence[float]) -> Quadratic:
    """The least squares through three or more points among curves that have no negative term.

    A cost is never negative: terms that would be are zero, and the others are fitted without them.
    Of the few ways to leave terms out the best that is allowed is found by trying.
    """
    free = fit_polynomial(x, y, 2)
    if min(free.coefficients) >= 0:
        constant, linear, square = free.coefficients
        return Quadratic(constant, linear, square, _rms(free.residuals), fit=free)
    ys = np.asarray(y, dtype=np.float64)
    unit = max(map(abs, free.x))
    powers = np.vander(np.asarray(free.x) / unit, 3, increasing=True)
    best, least = np.zeros(3), _rms(ys)
    for kept in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
        found = np.zeros(3)
        found[kept] = np.linalg.lstsq(powers[:, kept], ys, rcond=None)[0]
        left = _rms(ys - powers @ found)
        if found.min() >= 0 and left < least:
            best, least = found, left
    held = tuple(term for term, value in zip(Quadratic.TERMS, best, strict=True) if value == 0)
    constant, linear, square = (best / unit ** np.arange(3)).tolist()
    return Quadratic(constant, linear, square, least, held, free)


def _rms(residuals: npt.ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(residuals))))


@dataclass(frozen=True)
class BreakEven:
    """From which x on a line or a curve costs less than another.

    tokens: where they cross; negative if it is cheaper at every x, inf if the other one is cheaper
    at the end. up_to: the last x of those at which it is cheaper and the other one then is not;
    below `tokens` it is cheaper again from there on. None unless there is such an x. interval: 95 %
    of where they cross, without ends where lines may be parallel; None where nothing is known.
    """

    tokens: float
    up_to: float | None = None
    interval: Interval | None = None

    @property
    def crossing(self) -> float | None:
        """Where they cross: that from which on it is cheaper, if there is one; None if nowhere."""
        if math.isfinite(self.tokens) and self.tokens >= 0:
            return self.tokens
        return self.up_to

    def __str__(self) -> str:
        start, end = f"{self.tokens:,.0f}", f"{self.up_to or 0:,.0f}"
        if self.tokens == math.inf:
            return "never faster" if self.up_to is None else f"faster up to {end} tokens"
        if self.up_to is None:
            return "always faster" if self.tokens < 0 else f"faster from {start} tokens on"
        if self.up_to < self.tokens:
            return f"faster up to {end} tokens and from {start} on"
        return f"faster from {start} to {end} tokens"


def break_even(line: Line, other: Line) -> BreakEven:
    """From which x on `line` costs less than `other`; the interval is Fieller's."""
    gap, gain = line.intercept - other.intercept, other.slope - line.slope
    interval = ratio_interval(line.fit, other.fit, (1, 0, -1, 0), (0, -1, 0, 1))
    if gain > 0:
        return BreakEven(gap / gain, interval=interval)
    if gain == 0:
        return BreakEven(-math.inf if gap < 0 else math.inf, interval=interval)
    return BreakEven(math.inf, gap / gain if gap < 0 else None, interval)


def curve_break_even(
    curve: Quadratic, other: Quadratic, within: tuple[float, float] | None = None
) -> BreakEven:
    """Where `curve` costs less than `other` between two x; they may cross twice.

    within: the first and the last x; None is all that both were fitted to. What is said is of
    these x alone: beyond them nobody measured. tokens is negative if it is cheaper at all of them.
    interval: 95 % of `crossing`, cut off at the ends of `within`; None where a term was held at
    zero, which an interval would not know of.
    """
    low, high = within or _fitted_range(curve, other)
    gaps = (own - others for own, others in zip(curve.terms, other.terms, strict=True))
    inside = sorted({x for x in _roots(*gaps) if low < x < high})
    spans = itertools.pairwise([low, *inside, high])
    tokens, up_to = math.inf, None

    def is_ahead(span: tuple[float, float]) -> bool:
        return curve.at(sum(span) / 2) < other.at(sum(span) / 2)

    for is_cheaper, found in itertools.groupby(spans, is_ahead):  # some touch, and do not cross
        (start, end), *more = found
        end = more[-1][1] if more else end
        if is_cheaper and end == high:
            tokens = -math.inf if start == low else start
        elif is_cheaper:
            tokens, up_to = (math.inf if start == low else start), end
    even = BreakEven(tokens, up_to)
    if even.crossing is None or curve.held or other.held:
        return even
    return replace(even, interval=root_interval(curve.fit, other.fit, even.crossing, (low, high)))


def _fitted_range(curve: Quadratic, other: Quadratic) -> tuple[float, float]:
    """The x that both curves were fitted to."""
    if curve.fit is None or other.fit is None:
        raise ConfigError("expected curves that were fitted, or the lengths between which to look")
    low, high = (max(min(curve.fit.x), min(other.fit.x)), min(max(curve.fit.x), max(other.fit.x)))
    if low > high:
        raise ConfigError("expected curves over lengths that both have, got none")
    return low, high


def _roots(constant: float, linear: float, square: float) -> list[float]:
    """The real x with constant + linear · x + square · x² = 0; none if that is so at every x."""
    under = linear**2 - 4 * square * constant
    if under < 0:
        return []
    # Without a difference of near numbers, which would lose the smaller root.
    half = -(linear + math.copysign(math.sqrt(under), linear)) / 2
    pairs = ((half, square), (constant, half))
    return [above / below for above, below in pairs if below]


@dataclass(frozen=True)
class Ratio:
    """How many times as much a term of a fit is (NaN if the other's is zero), and its interval."""

    value: float
    interval: Interval | None = None


def last_term_ratio(own: _Fitted, other: _Fitted) -> Ratio:
    """The slope of a line, or the square term of a curve, over that of another.

    Of ITL that is what is left of the cost of context, of TTFT of the cost of attention. No
    interval where a term was held at zero: the last terms are then not those of the fits.
    """
    *rest, (top, bottom) = zip(own.terms, other.terms, strict=True)
    value = top / bottom if bottom else math.nan
    if own.held or other.held:
        return Ratio(value)
    zeros = [0.0] * len(rest)
    above, below = [*zeros, 1.0, *zeros, 0.0], [*zeros, 0.0, *zeros, 1.0]
    return Ratio(value, ratio_interval(own.fit, other.fit, above, below))


# By the names of the last terms.
slope_ratio = square_ratio = last_term_ratio
