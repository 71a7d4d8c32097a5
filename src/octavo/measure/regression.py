"""Least squares with confidence intervals: of coefficients, and of ratios between two fits.

Intervals are of 95 %, by Student's distribution with as many degrees of freedom as there are points
beyond the coefficients. Without such points nothing says how far off a coefficient is, and there
is no interval. Those of ratios are Fieller's: they hold for few points and denominators near zero,
where the delta method's are too narrow, and have no ends where the denominator may be zero.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError

CONFIDENCE = 0.95
_NUM_STEPS = 1024  # places from a root to an end of what was measured that are looked at

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
        covariance = self.covariance(self)
        if covariance is None:
            return None
        reach = student_t(self.num_spare) * math.sqrt(covariance[power, power])
        value = self.coefficients[power]
        return Interval(value - reach, value + reach)

    def covariance(self, other: "Regression") -> _Array | None:
        """Of these coefficients with those of another fit of the same degree, or of itself.

        What both leave unexplained at the same x goes together, where one machine or one shape of
        the curve is the cause of it; the differences between them are known better for it. Fits
        over other x are taken as independent: zeros. None where no point is to spare.
        """
        if self.num_spare < 1 or other.num_spare < 1:
            return None
        size = len(self.coefficients)
        if self.x != other.x:
            return np.zeros((size, len(other.coefficients)))
        solution = _solution(np.asarray(self.x), size - 1)
        spread = np.dot(self.residuals, other.residuals) / self.num_spare
        return np.asarray(spread * solution @ solution.T)


def fit_polynomial(x: Sequence[float], y: Sequence[float], degree: int) -> Regression:
    """The polynomial of this degree with the least squares; at least degree + 1 different x."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if xs.ndim != 1 or xs.shape != ys.shape or len(set(xs.tolist())) <= degree:
        raise ConfigError(
            f"expected {degree + 1} or more different x, each with a y, got {list(x)} and {list(y)}"
        )
    if not (np.isfinite(xs).all() and np.isfinite(ys).all()):
        raise ConfigError(f"expected finite points, got {list(x)} and {list(y)}")
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
    back = np.zeros((degree + 1, degree + 1))
    for k in range(degree + 1):
        for power in range(k + 1):
            back[power, k] = math.comb(k, power) * (-center) ** (k - power)
    return np.asarray(back @ centered)


def ratio_interval(
    first: Regression | None,
    second: Regression | None,
    numerator: Sequence[float],
    denominator: Sequence[float],
) -> Interval | None:
    """Fieller's interval of a ratio between sums of the coefficients of two fits.

    numerator, denominator: the weights of the coefficients of the first, then of the second. The
    ends are infinite where the denominator may be zero. None where a fit is none, or has no point
    to spare.
    """
    covariance = _joint_covariance(first, second)
    if first is None or second is None or covariance is None:
        return None
    values = np.asarray([*first.coefficients, *second.coefficients])
    above, below = np.asarray(numerator), np.asarray(denominator)
    top, bottom = float(above @ values), float(below @ values)
    if bottom == 0:
        return Interval(-math.inf, math.inf)
    num_spare = _num_spare(first, second, covariance, above - top / bottom * below)
    square = student_t(num_spare) ** 2
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

    All x with difference(x)² ≤ t² · the variance of difference(x), as far as they hang together
    with the root; an end of `within` is one where nothing ends them before. None where a fit is
    none, or has no point to spare.
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

    def is_beyond(x: _Array) -> npt.NDArray[np.bool_]:
        powers = np.vander(x, size, increasing=True)
        variance = np.einsum("ni,ij,nj->n", powers, spread, powers)
        return np.asarray((powers @ gaps) ** 2 > square * variance)

    low, high = within
    return Interval(_reach(is_beyond, root, low), _reach(is_beyond, root, high))


def _reach(is_beyond: Callable[[_Array], npt.NDArray[np.bool_]], start: float, end: float) -> float:
    """The x from `start` on, towards `end`, before the first that is beyond; `end` if none is."""
    # Roots of the polynomial behind it would be lost to rounding where two of them are near.
    steps = np.linspace(start, end, _NUM_STEPS + 1)
    beyond = np.flatnonzero(is_beyond(steps[1:]))
    if not len(beyond):
        return end
    inside, outside = steps[beyond[0]], steps[beyond[0] + 1]
    for _ in range(50):
        middle = (inside + outside) / 2
        if is_beyond(np.asarray([middle]))[0]:
            outside = middle
        else:
            inside = middle
    return float(inside)


def _joint_covariance(first: Regression | None, second: Regression | None) -> _Array | None:
    """Of the coefficients of both fits, one after the other; None where nothing is known of it."""
    if first is None or second is None:
        return None
    parts = [[a.covariance(b) for b in (first, second)] for a in (first, second)]
    if any(part is None for row in parts for part in row):
        return None
    return np.asarray(np.block(parts))  # type: ignore[arg-type]


def _num_spare(first: Regression, second: Regression, covariance: _Array, direction: _Array) -> int:
    """Degrees of freedom of a sum over both fits: of the pairs, or by Welch and Satterthwaite."""
    if first.x == second.x:
        return first.num_spare
    cut = len(first.coefficients)
    own = float(direction[:cut] @ covariance[:cut, :cut] @ direction[:cut])
    others = float(direction[cut:] @ covariance[cut:, cut:] @ direction[cut:])
    shares = own**2 / first.num_spare + others**2 / second.num_spare
    # Rounded down: rather an interval that is a little too wide.
    return max(1, int((own + others) ** 2 / shares)) if shares > 0 else first.num_spare


@functools.cache
def student_t(num_spare: int, confidence: float = CONFIDENCE) -> float:
    """How many standard errors an interval reaches to each side: 12.7 with 1 to spare, 3.18 with 3.

    The distribution for whole degrees of freedom in closed form (Abramowitz and Stegun, 26.7.3 and
    26.7.4), inverted by bisection.
    """
    if num_spare < 1 or not 0 < confidence < 1:
        raise ConfigError(
            f"expected 1 or more degrees of freedom and a confidence between 0 and 1, got "
            f"{num_spare} and {confidence}"
        )
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, num_spare) < confidence else (low, middle)
    return math.sqrt(num_spare) * math.tan((low + high) / 2)


def _within(angle: float, num_spare: int) -> float:
    """The share of Student's distribution within ± √num_spare · tan(angle)."""
    is_odd = num_spare % 2
    # Factors from one term of the sum to the next: 2/3, 4/5, … if odd, else 1/2, 3/4, …
    steps = np.arange(2 if is_odd else 1, num_spare - 2, 2, dtype=np.float64)
    factors = steps / (steps + 1) * math.cos(angle) ** 2
    total = 1.0 + float(np.cumprod(factors).sum())
    if not is_odd:
        return math.sin(angle) * total
    if num_spare == 1:
        total = 0.0
    return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
