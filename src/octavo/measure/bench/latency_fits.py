"""Fits over the context as values of records: terms, their 95 % intervals, and the first row's.

A term's interval is two more values, with low and high before the unit. They are absent where
nothing is known of it: as many lengths as terms.
"""

from octavo.measure.fit import (
    TERMS,
    Line,
    Quadratic,
    break_even,
    curve_break_even,
    slope_ratio,
    square_ratio,
)
from octavo.measure.regression import Interval

# Of the terms of TTFT: what follows the name, and how many of it are in one of the fit's.
CURVE_UNITS = {
    "constant": ("ms", 1.0),
    "linear": ("ms_per_1k_tokens", 1e3),
    "square": ("ms_per_1k_tokens_squared", 1e6),
}


def line_values(line: Line, first: Line | None) -> dict[str, float]:
    """A line of the time between tokens over the context, beside that of the first row."""
    slope_unit = "us_per_1k_tokens"
    values = {
        "itl_intercept_ms": line.intercept,
        **_ends("itl_intercept", line.intercept_interval, "ms"),
        f"itl_slope_{slope_unit}": line.slope * 1e6,
        **_ends("itl_slope", line.slope_interval, slope_unit, 1e6),
        "itl_residual_ms": line.residual,
    }
    if first is None:
        return values
    found, ratio = break_even(line, first), slope_ratio(line, first)
    values |= {
        "intercept_gap_ms": line.intercept - first.intercept,
        "slope_ratio": ratio.value,
        **_ends("slope_ratio", ratio.interval),
        "break_even_tokens": found.tokens,
        **_ends("break_even", found.interval, "tokens"),
    }
    if found.up_to is not None:
        values["faster_up_to_tokens"] = found.up_to
    return values


def curve_values(curve: Quadratic, first: Quadratic | None) -> dict[str, float]:
    """A curve of the time to the first token over the input, beside that of the first row.

    Where they cross is said of curves that were fitted, between the lengths that both have.
    """
    values: dict[str, float] = {}
    for term in TERMS:
        unit, factor = CURVE_UNITS[term]
        values[f"ttft_{term}_{unit}"] = getattr(curve, term) * factor
        values |= _ends(f"ttft_{term}", curve.interval(term), unit, factor)
    values["ttft_residual_ms"] = curve.residual
    if first is None:
        return values
    ratio = square_ratio(curve, first)
    values |= {"square_ratio": ratio.value, **_ends("square_ratio", ratio.interval)}
    if curve.fit is None or first.fit is None:
        return values
    found = curve_break_even(curve, first)
    values |= {
        "ttft_break_even_tokens": found.tokens,
        **_ends("ttft_break_even", found.interval, "tokens"),
    }
    if found.up_to is not None:
        values["ttft_faster_up_to_tokens"] = found.up_to
    return values


def _ends(
    name: str, interval: Interval | None, unit: str = "", factor: float = 1.0
) -> dict[str, float]:
    """The two values of an interval; none, if there is none."""
    if interval is None:
        return {}
    after = f"_{unit}" if unit else ""
    ends = {"low": interval.low, "high": interval.high}
    return {f"{name}_{end}{after}": value * factor for end, value in ends.items()}
