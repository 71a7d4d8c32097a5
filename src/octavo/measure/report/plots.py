"""Plots as data that plotly.js draws: bars, lines, points with error bars, and their parts.

Names and titles are escaped here: plotly reads tags such as <a href> in its texts.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from octavo.errors import ConfigError
from octavo.measure.records import Measurement
from octavo.measure.report.tables import format_column, label

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
NAME_WIDTH = 18  # characters of a line of a name: a narrow page has room for it and a plot
_MARK = "#808080"  # of lines that are no series: seen on light and dark pages
_MAX_SIZES = 8  # measured sizes are better marks than powers of ten, while there is room for them
_MAX_TICKS = 6  # of a logarithmic axis: what has room across a narrow page

Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A sentence that says what the plot shows, and plotly's traces and layout.

    height_rem: where the page's own height would not do.
    """

    caption: str
    data: tuple[Trace, ...]
    layout: dict[str, Any]
    height_rem: int | None = None


@dataclass(frozen=True)
class Point:
    """A value of a name, and how far its error bar reaches above and below."""

    name: str
    value: float
    up: float = 0.0
    down: float = 0.0


def bars(
    records: Sequence[Measurement],
    *,
    caption: str,
    x: str,
    y: str,
    series: str = "impl",
    x_title: str = "",
    y_title: str = "",
    reference: float | None = None,
) -> Figure:
    """Groups of bars: one group per value of `x`, one colour per value of `series`.

    reference: a line at the value of the baseline.
    """
    style = {"texttemplate": "%{y:.3g}", "textposition": "outside", "cliponaxis": False}
    traces: list[Trace] = []
    for name, some in _series(records, x, y, series).items():
        at_x = [wrapped(format_column([at])[0]) for at, _ in some]
        y_values = [value for _, value in some]
        traces.append({"type": "bar", "name": name, "x": at_x, "y": y_values, **style})
    layout = axes(x_title or label(x), y_title or label(y), len(traces))
    layout["xaxis"]["type"], layout["yaxis"]["type"] = "category", "linear"
    values = [value for trace in traces for value in trace["y"] if value is not None]
    if reference is not None:
        layout["shapes"] = [mark("y", reference)]
        values.append(reference)
    if values and min(values) >= 0 < max(values):
        # Room for the number over the highest bar, below the legend.
        layout["yaxis"]["range"] = [0, 1.15 * max(values)]
    return Figure(caption=caption, data=tuple(traces), layout=layout)


def lines(
    records: Sequence[Measurement],
    *,
    caption: str,
    x: str,
    y: str,
    series: str = "impl",
    x_title: str = "",
    y_title: str = "",
    is_log: bool = False,
) -> Figure:
    """One line per value of `series`, its points ordered by the number `x`."""
    traces: list[Trace] = []
    for number, (name, some) in enumerate(_series(records, x, y, series).items()):
        if not all(isinstance(at, int | float) for at, _ in some):
            raise ConfigError(f"the x axis of lines needs numbers, got {some[0][0]!r} for {x}")
        some.sort(key=lambda point: point[0])
        trace = markers(name, number, [at for at, _ in some], [value for _, value in some])
        traces.append(trace | {"mode": "lines+markers"})
    layout = axes(x_title or label(x), y_title or label(y), len(traces))
    layout["xaxis"]["type"] = layout["yaxis"]["type"] = "log" if is_log else "linear"
    measured = sorted({at for trace in traces for at in trace["x"]})
    if is_log and len(measured) <= _MAX_SIZES:
        layout["xaxis"] |= {"tickvals": measured, "ticktext": format_column(measured)}
    return Figure(caption=caption, data=tuple(traces), layout=layout)


def points(
    series: Mapping[str, Sequence[Point]],
    *,
    caption: str,
    value_title: str,
    reference: float | None = None,
) -> Figure:
    """Names down, values across: one symbol and colour for each series, below each other.

    The axis of names has no title, which would lie among them; the caption says what they are.
    reference: a value that the axis includes, with a line at it.
    """
    names = list(dict.fromkeys(point.name for some in series.values() for point in some))
    places = {name: place for place, name in enumerate(names)}
    data = []
    for number, (name, some) in enumerate(series.items()):
        # Symbols of several series at one name would hide each other.
        shift = 0.6 * ((number + 0.5) / len(series) - 0.5)
        x, y = [point.value for point in some], [places[point.name] + shift for point in some]
        trace = markers(wrapped(name, 40), number, x, y, size=9)
        trace["error_x"] = error_bars([p.up for p in some], [p.down for p in some])
        trace["text"] = [escape(point.name) for point in some]
        data.append(trace | {"hovertemplate": "%{text}: %{x:.4g}<extra></extra>"})
    layout = axes(value_title, num_series=len(series))
    layout["yaxis"] |= {
        "tickvals": list(places.values()),
        "ticktext": [wrapped(name) for name in names],
        "range": [len(names) - 0.5, -0.5],  # the first name on top
    }
    if reference is not None:
        every = [point for some in series.values() for point in some]
        ends = [reference, *(p.value + p.up for p in every), *(p.value - p.down for p in every)]
        room = 0.05 * (max(ends) - min(ends)) or 1.0
        layout["xaxis"]["range"] = [min(ends) - room, max(ends) + room]
        layout["shapes"] = [mark("x", reference)]
    height = _height(names) + 2 * len(series)
    return Figure(caption=caption, data=tuple(data), layout=layout, height_rem=height)


def name_bars(
    values: Mapping[str, float], *, caption: str, value_title: str, reference: float | None = None
) -> Figure:
    """One bar for each name, names down: long ones have room; reference: a line at this value."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [wrapped(name) for name in values],
        "x": list(values.values()),
        "texttemplate": "%{x:.4g}",
        "textposition": "auto",
        "hovertemplate": "%{y}: %{x:.4g}<extra></extra>",
    }
    layout = axes(value_title)
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    if reference is not None:
        layout["xaxis"]["range"] = [0, 1.1 * max([reference, *values.values()])]
        layout["shapes"] = [mark("x", reference)]
    return Figure(caption=caption, data=(trace,), layout=layout, height_rem=_height(values))


def heat_map(
    x: Sequence[Any],
    y: Sequence[Any],
    cells: Sequence[Sequence[float | None]],
    *,
    colors: Sequence[Sequence[Any]],
    span: tuple[float, float],
    title: str,
    texttemplate: str,
    hovertemplate: str,
) -> Trace:
    """Cells [y][x] with their numbers in them; None is left empty.

    colors: from the first number of the span to the last. title: over the scale of colors.
    """
    return {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": [list(row) for row in cells],
        "zmin": span[0],
        "zmax": span[1],
        "colorscale": colors,
        "colorbar": {"title": {"text": title}},
        "texttemplate": texttemplate,
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": f"{hovertemplate}<extra></extra>",
    }


def markers(name: str, series: int, x: Sequence[Any], y: Sequence[Any], *, size: int = 8) -> Trace:
    """The points of a series, which has a symbol and a colour by its number; name: escaped."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {"symbol": SYMBOLS[series % len(SYMBOLS)], "size": size},
        "meta": {"series": series},
    }


def error_bars(up: Sequence[float], down: Sequence[float]) -> Trace:
    """How far the bars of points reach on either side."""
    return {"type": "data", "symmetric": False, "array": list(up), "arrayminus": list(down)}


def guide(width: int, dash: str) -> Trace:
    """The style of a line that is no series, such as a roof or the place of a crossing."""
    return {"color": _MARK, "width": width, "dash": dash}


def mark(axis: str, value: float) -> Trace:
    """A dotted line across the plot at a value of an axis, "x" or "y"."""
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1}
    return {"type": "line", **ends, f"{other}ref": "paper", "line": guide(1, "dot")}


def guide_line(
    name: str, x: Sequence[float], y: Sequence[float], *, width: int, dash: str
) -> Trace:
    """A line that is no series, through these points."""
    trace = {"type": "scatter", "mode": "lines", "name": name, "hoverinfo": "skip"}
    return trace | {"x": list(x), "y": list(y), "line": guide(width, dash)}


def axes(x_title: str, y_title: str = "", num_series: int = 1) -> dict[str, Any]:
    """A layout that names both axes, with a legend for several series."""
    titles = ({"text": escape(text), "font": {"size": 13}} for text in (x_title, y_title))
    xaxis, yaxis = ({"title": title} for title in titles)
    return {"xaxis": xaxis, "yaxis": yaxis, "showlegend": num_series > 1}


def log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Marks of a logarithmic axis around these values: 1, 2 and 5 of each power of ten, or fewer.

    plotly's own write a 5 for 500, beside a 1000.
    """
    drawn = [value for value in values if 0 < value < math.inf]
    if not drawn:
        return {}
    low, high = min(drawn) / 2, max(drawn) * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= _MAX_TICKS:
            break
    return {"tickvals": ticks, "ticktext": list(map(_short, ticks))}


def wrapped(name: str, width: int = NAME_WIDTH) -> str:
    """A name in lines for plotly, cut after a sign or a blank where there is one."""
    return "<br>".join(map(escape, _lines(name, width)))


def _series(
    records: Sequence[Measurement], x: str, y: str, series: str
) -> dict[str, list[tuple[Any, float | None]]]:
    """The points of each series, in the order of appearance; records without x or y have none."""
    found: dict[str, list[tuple[Any, float | None]]] = {}
    for record in records:
        at, value = record.get(x), record.get(y)
        if at is not None and isinstance(value, int | float):
            # What is not finite has no place on an axis; the table beside the plot shows it.
            point = at, value if math.isfinite(value) else None
            found.setdefault(escape(format_column([record.get(series)])[0]), []).append(point)
    if not found:
        raise ConfigError(f"no record has both {x} and a number {y}")
    return found


def _short(number: float) -> str:
    if number >= 1e6:
        return f"{number / 1e6:,g}M"
    return f"{number / 1e3:g}k" if number >= 1e4 else f"{number:,g}"


def _lines(name: str, width: int = NAME_WIDTH) -> list[str]:
    lines = [""]
    for piece in re.findall(r"[^+.= ]*[+.= ]|[^+.= ]+$", name):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        while len(piece.rstrip()) > width:
            lines[-1:] = [piece[:width], ""]
            piece = piece[width:]
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _height(names: Mapping[str, Any] | Sequence[str]) -> int:
    """The height in rem that names below each other need."""
    return 8 + sum(1 + len(_lines(name)) for name in names)
