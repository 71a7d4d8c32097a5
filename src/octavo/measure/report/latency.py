"""Latency over the input length as sections of a page: points, fits, and where rows break even.

All of it comes from the records of lengths: fits are made here again, so that records from before
fits had intervals are shown like new ones.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.measure.fit import BreakEven
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.html import Section
from octavo.measure.report.latency_rows import SAME, Row, itl_crossings, rows_of, ttft_crossings
from octavo.measure.report.latency_tables import itl_table, range_text, ttft_table
from octavo.measure.report.plots import SYMBOLS, Figure
from octavo.measure.report.points import MARK, log_ticks, wrapped

_MARK_WIDTH = 26  # characters of a line of its words: half of a narrow page
_NUM_DRAWN = 60  # points of a fitted curve
_FAR = 1.5  # a break-even beyond so many of the longest input is told in words only


def latency_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each model, engine and batch among the records of `octavo bench latency`.

    Its rows are those of `rows_of`. ConfigError if there are no records of lengths.
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


def _section(records: Sequence[Measurement]) -> Section:
    rows, case = rows_of(records), records[0].case
    machine = records[0].machine
    text = (
        f"{case['batch_size']} at once, {case['output_len']} tokens after each prompt, on "
        f"{machine.gpu or machine.cpu}. ITL, the time between tokens, is a line over the context; "
        "TTFT, the time to the first token, has a square term as well, which is attention. "
        "Intervals are of 95 % (Student's; of ratios and crossings Fieller's) and are there where "
        "more lengths were measured than a fit has terms."
    )
    tables = [table for table in (itl_table(rows), ttft_table(rows)) if table is not None]
    return Section(
        title=f"Latency over the input length: {case['model']}",
        text="\n\n".join([text, *_notes(rows)]),
        figures=(_itl_figure(rows), _ttft_figure(rows)),
        tables=tuple(tables),
    )


def _notes(rows: Sequence[Row]) -> list[str]:
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


def _itl_figure(rows: Sequence[Row]) -> Figure:
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
    crossings = itl_crossings(rows)
    for row, _, found in crossings:
        at = found.crossing
        if at is not None and 0 < at < _FAR * longest:
            _mark(layout, at - half, row.name, at, is_right=at > longest / 2)
    caption = _caption("Time between tokens", rows, "line") + _said(crossings)
    return Figure(caption=caption, data=tuple(data), layout=layout)


def _ttft_figure(rows: Sequence[Row]) -> Figure:
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
    layout["yaxis"] |= log_ticks(medians)
    lengths = [length for row in rows for length in row.lengths]
    middle = math.sqrt(min(lengths) * max(lengths))
    crossings = ttft_crossings(rows)
    for row, _, found in crossings:
        at = found.crossing
        if at is not None:
            _mark(layout, at, row.name, at, is_right=at > middle)
    caption = _caption("Time to the first token", rows, "curve")
    if crossings:
        caption += " By the curves, between the lengths that were measured:" + _said(crossings)
    return Figure(caption=caption, data=tuple(data), layout=layout)


def _said(crossings: Sequence[tuple[Row, Row, BreakEven]]) -> str:
    """A sentence for each row that is compared, with a blank before it."""
    return "".join(
        f" {row.name} is {found} than {first.name}{range_text(found.interval)}."
        for row, first, found in crossings
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


def _caption(what: str, rows: Sequence[Row], fit: str) -> str:
    has_fit = any((row.line if fit == "line" else row.curve) is not None for row in rows)
    fitted = f", with the {fit} fitted to each row" if has_fit else ""
    return (
        f"{what} over the input length; lower is better. Medians{fitted}; bars reach from the "
        "10th to the 90th percentile."
    )


def _points(row: Row, metric: str, series: int) -> dict[str, Any]:
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


def _curve(row: Row, series: int, x: list[float], y: list[float]) -> dict[str, Any]:
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
    layout["shapes"], layout["annotations"] = [], []
    return layout


def _mark(layout: dict[str, Any], x: float, name: str, tokens: float, *, is_right: bool) -> None:
    """A line down at a break-even, with words that do not cover those of another."""
    layout["shapes"].append(
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
        | {"line": {"color": MARK, "width": 1, "dash": "dot"}}
    )
    before = sum(text["text"].count("<br>") + 1 for text in layout["annotations"])
    # Of texts, unlike lines, plotly takes the logarithm on an axis that has one.
    at = math.log10(x) if layout["xaxis"]["type"] == "log" else x
    layout["annotations"].append(
        {"x": at, "y": 1 - 0.1 * before, "yref": "paper", "yanchor": "top", "showarrow": False}
        | {"text": wrapped(f"break-even, {name}: {tokens:,.0f}", _MARK_WIDTH)}
        | {"align": "right" if is_right else "left", "xanchor": "right" if is_right else "left"}
    )
