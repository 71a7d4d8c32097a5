"""Cost models fitted to measurements, with what they leave unexplained and how well they are known.

A token after a longer context costs a straight line (ITL), a prompt a polynomial of degree two
(TTFT): what is there without tokens, what each token costs, and what each pair of them does. All
lengths count alike: what a time varies by does not grow with it. On an H200 it is 0.5 to 12 ms for
TTFTs between 35 ms and 10 s, and the most at the shortest (`results/latency_h200.jsonl`).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.measure.records import Measurement
from octavo.measure.regression import (
    Interval,
    Regression,
    fit_polynomial,
    ratio_interval,
    root_interval,
)


@dataclass(frozen=True)
class Line:
    """y ≈ intercept + slope · x; residual: the root mean square of what is left, in y's unit.

    fit: what it was fitted to, which intervals come from; None if it was given.
    """

    intercept: float
    slope: float
    residual: float
    fit: Regression | None = field(default=None, repr=False)

    def at(self, x: float) -> float:
        """The line's value at x."""
        return self.intercept + self.slope * x

    @property
    def intercept_interval(self) -> Interval | None:
        """95 %, Student's; None with two points, which leave nothing to judge by."""
        return None if self.fit is None else self.fit.interval(0)

    @property
    def slope_interval(self) -> Interval | None:
        """95 %, Student's; None with two points, which leave nothing to judge by."""
        return None if self.fit is None else self.fit.interval(1)


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The straight line with the least squares through two or more points."""
    fit = fit_polynomial(x, y, 1)
    return Line(fit.coefficients[0], fit.coefficients[1], _rms(fit.residuals), fit)


# Of a Quadratic, in the order of the powers of x.
TERMS = ("constant", "linear", "square")


@dataclass(frozen=True)
class Quadratic:
    """y ≈ constant + linear · x + square · x², no term below zero.

    residual: the root mean square of what is left. held: the terms that are zero because the
    least squares without bounds would have them, or their neighbours, negative. fit: those least
    squares, which intervals come from; None if the terms were given.
    """

    constant: float
    linear: float
    square: float
    residual: float
    held: tuple[str, ...] = ()
    fit: Regression | None = field(default=None, repr=False)

    def at(self, x: float) -> float:
        """The value at x."""
        return self.constant + (self.linear + self.square * x) * x

    def interval(self, term: str) -> Interval | None:
        """95 % of a term; None with three points, or where all of it would be below zero.

        Student's interval of the fit without bounds, which holds in 95 % of cases, without what is
        below zero, where no cost is; wide enough to have the term in it. If nothing of it is left,
        the points are not on such a curve.
        """
        free = None if self.fit is None else self.fit.interval(TERMS.index(term))
        if free is None or free.high < 0:
            return None
        value = float(getattr(self, term))
        return Interval(min(max(free.low, 0.0), value), max(free.high, value))

    @property
    def contradicted(self) -> tuple[str, ...]:
        """Terms that the points want below zero, by more than their interval."""
        if self.fit is None:
            return ()
        found = ((term, self.fit.interval(power)) for power, term in enumerate(TERMS))
        return tuple(term for term, interval in found if interval and interval.high < 0)


def fit_quadratic(x: Sequence[float], y: Sequence[float]) -> Quadratic:
    """The least squares through three or more points among curves that have no negative term.

    A negative cost means nothing, and what it is taken from is then too large: the terms that
    would be negative are zero, and the others are fitted without them. There are only eight ways
    to leave terms out: the best that is allowed is found by trying.
    """
    free = fit_polynomial(x, y, 2)
    if min(free.coefficients) >= 0:
        constant, linear, square = free.coefficients
        return Quadratic(constant, linear, square, _rms(free.residuals), fit=free)
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    unit = float(np.abs(xs).max())
    powers = np.vander(xs / unit, 3, increasing=True)
    best, least = np.zeros(3), _rms(ys)
    for size in (1, 2):
        for kept in itertools.combinations(range(3), size):
            found = np.zeros(3)
            found[list(kept)] = np.linalg.lstsq(powers[:, kept], ys, rcond=None)[0]
            left = _rms(ys - powers @ found)
            if found.min() >= 0 and left < least:
                best, least = found, left
    held = tuple(term for term, value in zip(TERMS, best, strict=True) if value == 0)
    constant, linear, square = (best / unit ** np.arange(3)).tolist()
    return Quadratic(constant, linear, square, least, held, free)


def _rms(residuals: npt.ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(residuals))))


def fit_itl(records: Sequence[Measurement]) -> Line:
    """The line of ITL in ms over the context, of a row's records of two or more lengths."""
    # The context grows while the tokens come: on average by half of them.
    contexts = [_number(r, "input_len") + _number(r, "output_len") / 2 for r in records]
    return fit_line(contexts, [r.values["median_itl_ms"] for r in records])


def fit_ttft(records: Sequence[Measurement]) -> Quadratic:
    """The curve of TTFT in ms over the input, of a row's records of three or more lengths."""
    lengths = [_number(r, "input_len") for r in records]
    return fit_quadratic(lengths, [r.values["median_ttft_ms"] for r in records])


def _number(record: Measurement, name: str) -> float:
    value = record.case.get(name)
    if not isinstance(value, int | float):
        raise ConfigError(f"expected records with a number {name}, got {value!r}")
    return float(value)


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
        is_never_again = math.isinf(self.tokens) and self.tokens > 0
        if self.up_to is None:
            if is_never_again:
                return "never faster"
            return (
                "always faster" if self.tokens < 0 else f"faster from {self.tokens:,.0f} tokens on"
            )
        if is_never_again:
            return f"faster up to {self.up_to:,.0f} tokens"
        if self.up_to < self.tokens:
            return f"faster up to {self.up_to:,.0f} tokens and from {self.tokens:,.0f} on"
        return f"faster from {self.tokens:,.0f} to {self.up_to:,.0f} tokens"


def break_even(line: Line, other: Line) -> BreakEven:
    """From which x on `line` costs less than `other`; the interval is Fieller's.

    Lines over the same x are taken as pairs: what both leave unexplained at an x is no difference
    between them.
    """
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
    gaps = [getattr(curve, term) - getattr(other, term) for term in TERMS]
    inside = sorted({x for x in _roots(*gaps) if low < x < high})
    edges = [low, *inside, high]
    spans: list[tuple[float, float]] = []
    for start, end in itertools.pairwise(edges):
        middle = (start + end) / 2
        if curve.at(middle) >= other.at(middle):
            continue
        if spans and spans[-1][1] == start:  # the curves touch there, and do not cross
            start = spans.pop()[0]
        spans.append((start, end))
    tokens, up_to = math.inf, None
    for start, end in spans:
        if end == high:
            tokens = -math.inf if start == low else start
        else:
            tokens, up_to = (math.inf if start == low else start), end
    found = BreakEven(tokens, up_to)
    if found.crossing is None or curve.held or other.held:
        return found
    return replace(found, interval=root_interval(curve.fit, other.fit, found.crossing, (low, high)))


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
    if square == 0:
        return [] if linear == 0 else [-constant / linear]
    under = linear**2 - 4 * square * constant
    if under < 0:
        return []
    # Without a difference of near numbers, which would lose the smaller root.
    sum_of_same_sign = -(linear + math.copysign(math.sqrt(under), linear)) / 2
    if sum_of_same_sign == 0:
        return [0.0]
    return [sum_of_same_sign / square, constant / sum_of_same_sign]


@dataclass(frozen=True)
class Ratio:
    """How many times as much a term of one fit is; NaN if the other's is zero.

    interval: 95 %, Fieller's, without ends where the other's may be zero; None where nothing is
    known of it.
    """

    value: float
    interval: Interval | None = None


def slope_ratio(line: Line, other: Line) -> Ratio:
    """The slope of `line` in those of `other`: what is left of the cost of context."""
    value = line.slope / other.slope if other.slope else math.nan
    return Ratio(value, ratio_interval(line.fit, other.fit, (0, 1, 0, 0), (0, 0, 0, 1)))


def square_ratio(curve: Quadratic, other: Quadratic) -> Ratio:
    """The square term of `curve` in those of `other`: what is left of the cost of attention.

    No interval where a term was held at zero: the square terms are then not those it is of.
    """
    value = curve.square / other.square if other.square else math.nan
    if curve.held or other.held:
        return Ratio(value)
    above, below = (0, 0, 1, 0, 0, 0), (0, 0, 0, 0, 0, 1)
    return Ratio(value, ratio_interval(curve.fit, other.fit, above, below))
