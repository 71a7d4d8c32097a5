"""The fits of latency as tables: terms with their intervals, ratios, and where rows break even."""

import math
from collections.abc import Sequence

from octavo.measure.fit import slope_ratio, square_ratio
from octavo.measure.regression import Interval
from octavo.measure.report.labels import Cell, format_column
from octavo.measure.report.latency_rows import Row, itl_crossings, ttft_crossings
from octavo.measure.report.tables import Table


def itl_table(rows: Sequence[Row]) -> Table | None:
    """The line of each row; None if no row has one."""
    crossings = {row.name: (first, found) for row, first, found in itl_crossings(rows)}
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        line = row.line
        if line is None:
            continue
        ratio: Cell = None
        even: Cell = None
        if row.name in crossings:
            first, found = crossings[row.name]
            if first.line is not None:
                share = slope_ratio(line, first.line)
                ratio = with_interval(share.value, share.interval)
            even = f"{found}{range_text(found.interval)}"
        cells.append(
            (
                row.name,
                with_interval(line.intercept, line.intercept_interval),
                with_interval(line.slope * 1e6, line.slope_interval, 1e6),
                ratio,
                line.residual,
                even,
            )
        )
    if not cells:
        return None
    header = ("row", "intercept (ms)", "slope (µs per 1k tokens)", "slope ratio", "left (ms)")
    caption = "ITL over the context: intercept + slope · tokens; in brackets intervals of 95 %"
    return Table(caption=caption, header=(*header, "break-even"), rows=tuple(cells))


def ttft_table(rows: Sequence[Row]) -> Table | None:
    """The curve of each row; None if no row has one."""
    crossings = {row.name: found for row, _, found in ttft_crossings(rows)}
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        curve = row.curve
        if curve is None:
            continue
        first = row.baseline.curve if row.baseline is not None else None
        ratio = None if first is None else square_ratio(curve, first)
        found = crossings.get(row.name)
        cells.append(
            (
                row.name,
                with_interval(curve.constant, curve.interval("constant")),
                with_interval(curve.linear * 1e3, curve.interval("linear"), 1e3),
                with_interval(curve.square * 1e6, curve.interval("square"), 1e6),
                None if ratio is None else with_interval(ratio.value, ratio.interval),
                curve.residual,
                None if found is None else f"{found}{range_text(found.interval)}",
            )
        )
    if not cells:
        return None
    header = (
        *("row", "c (ms)", "b (ms per 1k tokens)", "a (ms per 1k tokens, squared)"),
        *("ratio of a", "left (ms)", "break-even"),
    )
    caption = (
        "TTFT over the input: a · tokens² + b · tokens + c; in brackets intervals of 95 %. The "
        "break-even is of the curves, between the lengths that were measured"
    )
    return Table(caption=caption, header=header, rows=tuple(cells))


def with_interval(value: float, interval: Interval | None, factor: float = 1.0) -> str:
    """A number and its interval in brackets, which is in units of 1 / factor."""
    text = format_column([value])[0]
    if interval is None:
        return text
    low, high = (format_column([end * factor])[0] for end in (interval.low, interval.high))
    return f"{text} [{low}, {high}]"


def range_text(interval: Interval | None) -> str:
    """Where lines cross, in words after a sentence; nothing where nothing is known."""
    if interval is None:
        return ""
    if math.isinf(interval.low):
        return " (95 %: the lines may be parallel)"
    if interval.high <= 0:
        return " (95 %: the lines cross at no length)"
    if interval.low <= 0:
        return f" (95 %: the lines cross at {interval.high:,.0f} tokens at the latest)"
    return f" (95 %: {interval.low:,.0f} to {interval.high:,.0f})"
