"""Cost models fitted to measurements, with what they leave unexplained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """y ≈ intercept + slope · x; residual: the root mean square of what is left, in y's unit."""

    intercept: float
    slope: float
    residual: float

    def at(self, x: float) -> float:
        """The line's value at x."""
        return self.intercept + self.slope * x


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The straight line with the least squares through two or more points."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if xs.ndim != 1 or xs.shape != ys.shape or len(set(xs.tolist())) < 2:
        raise ConfigError(f"expected two or more different x, each with a y, got {x} and {y}")
    if not (np.isfinite(xs).all() and np.isfinite(ys).all()):
        raise ConfigError(f"expected finite points, got {x} and {y}")
    # Around their means: x such as 128000 and 128001 would lose the slope in squares of x.
    dx, dy = xs - xs.mean(), ys - ys.mean()
    slope = float(dx @ dy / (dx @ dx))
    intercept = float(ys.mean() - slope * xs.mean())
    residual = float(np.sqrt(np.mean((ys - intercept - slope * xs) ** 2)))
    return Line(intercept, slope, residual)


@dataclass(frozen=True)
class BreakEven:
    """From which x on a line costs less than another.

    tokens: where they cross; negative if it is cheaper at every x of 0 and more, inf if there is no
    such x. up_to: the last x at which it is cheaper, where the other one wins from there on; None
    unless it is so.
    """

    tokens: float
    up_to: float | None = None

    def __str__(self) -> str:
        if self.up_to is not None:
            return f"faster up to {self.up_to:,.0f} tokens"
        if math.isinf(self.tokens) and self.tokens > 0:
            return "never faster"
        return "always faster" if self.tokens < 0 else f"faster from {self.tokens:,.0f} tokens on"


def break_even(line: Line, other: Line) -> BreakEven:
    """From which x on `line` costs less than `other`."""
    gap, gain = line.intercept - other.intercept, other.slope - line.slope
    if gain > 0:
        return BreakEven(gap / gain)
    if gain == 0:
        return BreakEven(-math.inf if gap < 0 else math.inf)
    return BreakEven(math.inf, up_to=gap / gain if gap < 0 else None)
