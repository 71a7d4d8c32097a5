"""Points with error bars and bars beside names, and what all plots have in common."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape, unescape
from typing import Any

from octavo.measure.report.plots import SYMBOLS, Figure

NAME_WIDTH = 18  # characters of a line of a name: a narrow page has room for it and a plot
_MAX_TICKS = 6  # of a logarithmic axis: what has room across a narrow page
MARK = "#808080"  # of lines that are no series: seen on light and dark pages


@dataclass(frozen=True)
class Point:
    """A value of a name, and how far its error bar reaches above and below."""

    name: str
    value: float
    up: float = 0.0
    down: float = 0.0


def points(series: Mapping[str, Sequence[Point]], *, caption: str, value_title: str) -> Figure:
    """Names down, values across: one symbol and colour for each series, below each other.

    The axis of names has no title, which would lie among them; the caption says what they are.
    """
    names = list(dict.fromkeys(point.name for some in series.values() for point in some))
    places = {name: place for place, name in enumerate(names)}
    data = []
    for number, (name, some) in enumerate(series.items()):
        # Symbols of several series at one name would hide each other.
        shift = 0.6 * ((number + 0.5) / len(series) - 0.5)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": wrapped(name, 40),
                "x": [point.value for point in some],
                "y": [places[point.name] + shift for point in some],
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [point.up for point in some],
                    "arrayminus": [point.down for point in some],
                },
                "text": [escape(point.name) for point in some],
                "hovertemplate": "%{text}: %{x:.4g}<extra></extra>",
                "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 9},
                "meta": {"series": number},
            }
        )
    layout = titles(value_title) | {"showlegend": len(series) > 1}
    layout["yaxis"] |= {
        "tickvals": list(places.values()),
        "ticktext": [wrapped(name) for name in names],
        "range": [len(names) - 0.5, -0.5],  # the first name on top
    }
    height = 8 + sum(1 + _num_lines(name) for name in names) + 2 * len(series)
    return Figure(caption=caption, data=tuple(data), layout=layout, height_rem=height)


def name_bars(values: Mapping[str, float], *, caption: str, value_title: str) -> Figure:
    """One bar for each name, names down: long ones have room."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [wrapped(name) for name in values],
        "x": list(values.values()),
        "texttemplate": "%{x:.4g}",
        "textposition": "auto",
        "hovertemplate": "%{y}: %{x:.4g}<extra></extra>",
    }
    layout = titles(value_title) | {"showlegend": False}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    height = 8 + sum(1 + _num_lines(name) for name in values)
    return Figure(caption=caption, data=(trace,), layout=layout, height_rem=height)


def titles(x_title: str, y_title: str = "") -> dict[str, Any]:
    """The part of a layout that names both axes."""
    pairs = {"xaxis": x_title, "yaxis": y_title}
    return {
        axis: {"title": {"text": escape(text), "font": {"size": 13}}}
        for axis, text in pairs.items()
    }


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


def _short(number: float) -> str:
    if number >= 1e6:
        return f"{number / 1e6:,g}M"
    return f"{number / 1e3:g}k" if number >= 1e4 else f"{number:,g}"


def titled(figure: Figure, x_title: str, y_title: str) -> Figure:
    """The figure with other titles of its axes, and names folded so that they fit beside others."""
    layout = dict(figure.layout)
    for axis, title in titles(x_title, y_title).items():
        layout[axis] = {**layout.get(axis, {}), **title}
    return replace(figure, layout=layout, data=tuple(map(_folded, figure.data)))


def wrapped(name: str, width: int = NAME_WIDTH) -> str:
    """A name in lines for plotly, cut after a sign or a blank where there is one."""
    return "<br>".join(map(escape, _lines(name, width)))


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


def _num_lines(name: str) -> int:
    return len(_lines(name))


def _folded(trace: dict[str, Any]) -> dict[str, Any]:
    # plots.bars has escaped the names already.
    return trace | {"x": [wrapped(unescape(name)) for name in trace["x"]]}
