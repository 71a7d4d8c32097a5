"""Latency over the input length as sections of a page: points, fits, and where rows break even.

All of it comes from the records of lengths: fits are made here again, so that records from before
fits had intervals are shown like new ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.measure.fit import (
    BreakEven,
    Line,
    Quadratic,
    break_even,
    fit_itl,
    fit_ttft,
    slope_ratio,
    square_ratio,
)
from octavo.measure.records import Measurement, Scalar
from octavo.measure.regression import Interval
from octavo.measure.report.html import Section
from octavo.measure.report.labels import Cell, format_column
from octavo.measure.report.plots import SYMBOLS, Figure
from octavo.measure.report.tables import Table

# Records of one section have these in common: the model, the engine and the batch.
SAME = (
    *("model", "dtype", "layers", "compile", "cuda_graphs", "page_size", "max_num_batched_tokens"),
    *("batch_size", "output_len"),
)
_MARK = "#808080"  # seen on light and dark pages
_NUM_DRAWN = 60  # points of a fitted curve
_FAR = 1.5  # a break-even beyond so many of the longest input is told in words only


@dataclass(frozen=True)
class _Row:
    """The records of a row by length, its fits, and the row that it is compared with."""

    name: str
    records: tuple[Measurement, ...]
    baseline: "_Row | None" = None

    @property
    def lengths(self) -> list[int]:
        return [int(record.case["input_len"]) for record in self.records]

    @property
    def line(self) -> Line | None:
        return fit_itl(self.records) if len(self.records) > 1 else None

    @property
    def curve(self) -> Quadratic | None:
        return fit_ttft(self.records) if len(self.records) > 2 else None

    def values(self, name: str) -> list[float]:
        return [record.values[name] for record in self.records]


def latency_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each model, engine and batch among the records of `octavo bench latency`.

    A row is that of one command, the one with the most lengths and of those the newest; of records
    of the same length the newest counts. It is compared with the other row of the same command, if
    there is one. ConfigError if there are no records of lengths.
    """
    groups: dict[tuple[Scalar | None, ...], list[Measurement]] = {}
    for record in records:
        if record.op == "latency":
            machine = record.machine.gpu or record.machine.cpu
            key = (machine, *(record.case.get(name) for name in SAME))
            groups.setdefault(key, []).append(record)
    if not groups:
        raise ConfigError(
            "expected records of octavo bench latency, got "
            f"{', '.join(sorted({record.op for record in records})) or 'none'}"
        )
    return [_section(group) for group in groups.values()]


def _rows(records: Sequence[Measurement]) -> list[_Row]:
    runs: dict[tuple[str, str], dict[int, Measurement]] = {}
    for record in records:
        run = runs.setdefault((str(record.case["row"]), record.command), {})
        length = int(record.case["input_len"])
        if length not in run or record.date >= run[length].date:
            run[length] = record
    # Another command may have measured at another time, with other settings: no row mixes two.
    chosen: dict[str, tuple[Measurement, ...]] = {}
    for (name, _), run in runs.items():
        own = tuple(run[length] for length in sorted(run))
        if name not in chosen or _rank(own) >= _rank(chosen[name]):
            chosen[name] = own
    found = []
    for name, own in chosen.items():
        first = own[0].baseline or ""
        run = runs.get((first, own[0].command), {})
        others = tuple(run[length] for length in sorted(run)) or chosen.get(first)
        found.append(_Row(name, own, _Row(first, others) if others else None))
    return found


def _rank(records: Sequence[Measurement]) -> tuple[int, str]:
    return len(records), max(record.date for record in records)


def _section(records: Sequence[Measurement]) -> Section:
    rows, case = _rows(records), records[0].case
    machine = records[0].machine
    text = (
        f"{case['batch_size']} at once, {case['output_len']} tokens after each prompt, on "
        f"{machine.gpu or machine.cpu}. ITL, the time between tokens, is a line over the context; "
        "TTFT, the time to the first token, has a square term as well, which is attention. "
        "Intervals are of 95 % (Student's; of ratios and crossings Fieller's) and are there where "
        "more lengths were measured than a fit has terms."
    )
    tables = [table for table in (_itl_table(rows), _ttft_table(rows)) if table is not None]
    return Section(
        title=f"Latency over the input length: {case['model']}",
        text="\n\n".join([text, *_notes(rows)]),
        figures=(_itl_figure(rows), _ttft_figure(rows)),
        tables=tuple(tables),
    )


def _notes(rows: Sequence[_Row]) -> list[str]:
    """What the fits cannot say, in words."""
    notes = []
    num_lengths = min(len(row.records) for row in rows)
    if num_lengths < 4:
        fewest = [row.name for row in rows if len(row.records) == num_lengths]
        which = "" if len(fewest) == len(rows) else f"{', '.join(fewest)}: "
        word = "length" if num_lengths == 1 else "lengths"
        notes.append(
            f"{which}{num_lengths} {word}: a line needs two and a curve three, and one more each "
            "for an interval."
        )
    for row in rows:
        curve = row.curve
        if curve is None or not curve.held:
            continue
        terms = " and ".join(curve.held)
        note = f"{row.name}: the {terms} term of TTFT would be negative and is held at zero."
        if curve.contradicted:
            note += " It is below zero by more than its interval: TTFT is no such curve here."
        notes.append(note)
    return notes


def _compared(rows: Sequence[_Row]) -> list[tuple[_Row, _Row]]:
    return [(row, row.baseline) for row in rows if row.baseline is not None]


def _crossings(rows: Sequence[_Row]) -> list[tuple[_Row, _Row, BreakEven]]:
    found = []
    for row, first in _compared(rows):
        own, others = row.line, first.line
        if own is not None and others is not None:
            found.append((row, first, break_even(own, others)))
    return found


def _itl_figure(rows: Sequence[_Row]) -> Figure:
    longest = max(max(row.lengths) for row in rows)
    half = float(rows[0].records[0].case["output_len"]) / 2
    data: list[dict[str, Any]] = []
    for series, row in enumerate(rows):
        data.append(_points(row, "itl", series))
        line = row.line
        if line is not None:
            drawn = [0.0, float(longest)]
            data.append(_curve(row, series, drawn, [line.at(x + half) for x in drawn]))
    layout = _layout("ITL (ms)", len(rows), is_log=False)
    layout["shapes"], layout["annotations"] = [], []
    said = []
    for row, first, found in _crossings(rows):
        said.append(f"{row.name} is {found} than {first.name}{_range_text(found.interval)}")
        at = found.up_to if found.up_to is not None else found.tokens
        if 0 < at < _FAR * longest:
            _mark(layout, at - half, f"{escape(row.name)}: {at:,.0f}", at > longest / 2)
    caption = _caption("Time between tokens", rows, "line") + "".join(f" {one}." for one in said)
    return Figure(caption=caption, data=tuple(data), layout=layout)


def _ttft_figure(rows: Sequence[_Row]) -> Figure:
    data: list[dict[str, Any]] = []
    for series, row in enumerate(rows):
        data.append(_points(row, "ttft", series))
        curve = row.curve
        if curve is not None:
            drawn = np.geomspace(min(row.lengths), max(row.lengths), _NUM_DRAWN).tolist()
            data.append(_curve(row, series, drawn, [curve.at(x) for x in drawn]))
    layout = _layout("TTFT (ms)", len(rows), is_log=True)
    ticks = _ticks(sorted({length for row in rows for length in row.lengths}))
    layout["xaxis"] |= {"tickvals": ticks, "ticktext": list(map(_short, ticks))}
    medians = [value for row in rows for value in row.values("median_ttft_ms")]
    if max(medians) > 30 * min(medians):
        layout["yaxis"]["dtick"] = 1  # powers of ten; else plotly's 2 and 5 between them say more
    return Figure(
        caption=_caption("Time to the first token", rows, "curve"), data=tuple(data), layout=layout
    )


def _ticks(lengths: Sequence[int]) -> list[int]:
    """The lengths that have room for a mark on a narrow page, the longest among them."""
    kept: list[int] = []
    for length in reversed(lengths):
        if not kept or kept[-1] >= 2.5 * length:
            kept.append(length)
    return kept[::-1]


def _short(length: int) -> str:
    """A number of tokens as the command line takes it: 125k is 128,000."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length:,}"


def _caption(what: str, rows: Sequence[_Row], fit: str) -> str:
    has_fit = any((row.line if fit == "line" else row.curve) is not None for row in rows)
    fitted = f", with the {fit} fitted to each row" if has_fit else ""
    return (
        f"{what} over the input length; lower is better. Medians{fitted}; bars reach from the "
        "10th to the 90th percentile."
    )


def _points(row: _Row, metric: str, series: int) -> dict[str, Any]:
    medians = row.values(f"median_{metric}_ms")
    low, high = (row.values(f"{end}_{metric}_ms") for end in ("p10", "p90"))
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(row.name),
        "x": row.lengths,
        "y": medians,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [end - middle for end, middle in zip(high, medians, strict=True)],
            "arrayminus": [middle - end for end, middle in zip(low, medians, strict=True)],
        },
        "marker": {"symbol": SYMBOLS[series % len(SYMBOLS)], "size": 8},
        "legendgroup": escape(row.name),
        "meta": {"series": series},
    }


def _curve(row: _Row, series: int, x: list[float], y: list[float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{escape(row.name)}, fitted",
        "x": x,
        "y": y,
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": escape(row.name),
        "meta": {"series": series},
    }


def _layout(y_title: str, num_series: int, *, is_log: bool) -> dict[str, Any]:
    kind = "log" if is_log else "linear"
    titles = {"xaxis": "input length (tokens)", "yaxis": y_title}
    layout: dict[str, Any] = {
        axis: {"title": {"text": text, "font": {"size": 13}}, "type": kind}
        for axis, text in titles.items()
    }
    layout["showlegend"] = num_series > 1
    return layout


def _mark(layout: dict[str, Any], x: float, text: str, is_right: bool) -> None:
    """A line down at a break-even, with words that do not cover those of another."""
    number = len(layout["shapes"])
    layout["shapes"].append(
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
        | {"line": {"color": _MARK, "width": 1, "dash": "dot"}}
    )
    layout["annotations"].append(
        {"x": x, "y": 1 - 0.1 * number, "yref": "paper", "yanchor": "top", "showarrow": False}
        | {"text": f"break-even, {text}", "xanchor": "right" if is_right else "left"}
    )


def _itl_table(rows: Sequence[_Row]) -> Table | None:
    crossings = {row.name: (first, found) for row, first, found in _crossings(rows)}
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
            even = f"{found}{_range_text(found.interval)}"
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


def _ttft_table(rows: Sequence[_Row]) -> Table | None:
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        curve = row.curve
        if curve is None:
            continue
        first = row.baseline.curve if row.baseline is not None else None
        ratio = None if first is None else square_ratio(curve, first)
        cells.append(
            (
                row.name,
                with_interval(curve.constant, curve.interval("constant")),
                with_interval(curve.linear * 1e3, curve.interval("linear"), 1e3),
                with_interval(curve.square * 1e6, curve.interval("square"), 1e6),
                None if ratio is None else with_interval(ratio.value, ratio.interval),
                curve.residual,
            )
        )
    if not cells:
        return None
    header = ("row", "c (ms)", "b (ms per 1k tokens)", "a (ms per 1k tokens, squared)")
    caption = "TTFT over the input: a · tokens² + b · tokens + c; in brackets intervals of 95 %"
    return Table(caption=caption, header=(*header, "ratio of a", "left (ms)"), rows=tuple(cells))


def with_interval(value: float, interval: Interval | None, factor: float = 1.0) -> str:
    """A number and its interval in brackets, which is in units of 1 / factor."""
    text = format_column([value])[0]
    if interval is None:
        return text
    low, high = (format_column([end * factor])[0] for end in (interval.low, interval.high))
    return f"{text} [{low}, {high}]"


def _range_text(interval: Interval | None) -> str:
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
