"""Points with error bars over names, and what bars and points have in common."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from octavo.measure.report.plots import SYMBOLS, Figure

NAME_WIDTH = 22  # characters of a line of a name: several names fit beside each other
MARK = "#808080"  # of lines that are no series: seen on light and dark pages


@dataclass(frozen=True)
class Point:
    """A value over a name, and how far its error bar reaches up and down."""

    name: str
    value: float
    up: float = 0.0
    down: float = 0.0


def points(
    series: Mapping[str, Sequence[Point]], *, caption: str, x_title: str, y_title: str
) -> Figure:
    """One symbol and colour for each series, beside each other over the same name."""
    names = list(dict.fromkeys(point.name for some in series.values() for point in some))
    places = {name: place for place, name in enumerate(names)}
    data = []
    for number, (name, some) in enumerate(series.items()):
        # Symbols of several series over one name would hide each other.
        shift = 0.5 * ((number + 0.5) / len(series) - 0.5)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": wrapped(name, 40),
                "x": [places[point.name] + shift for point in some],
                "y": [point.value for point in some],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [point.up for point in some],
                    "arrayminus": [point.down for point in some],
                },
                "text": [escape(point.name) for point in some],
                "hovertemplate": "%{text}: %{y:.4g}<extra></extra>",
                "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 9},
                "meta": {"series": number},
            }
        )
    layout = titles(x_title, y_title) | {"showlegend": len(series) > 1}
    layout["xaxis"] |= {
        "tickvals": list(places.values()),
        "ticktext": [wrapped(name) for name in names],
        "range": [-0.5, len(names) - 0.5],
    }
    return Figure(caption=caption, data=tuple(data), layout=layout)


def titles(x_title: str, y_title: str) -> dict[str, Any]:
    """The part of a layout that names both axes."""
    pairs = {"xaxis": x_title, "yaxis": y_title}
    return {
        axis: {"title": {"text": escape(text), "font": {"size": 13}}}
        for axis, text in pairs.items()
    }


def titled(figure: Figure, x_title: str, y_title: str) -> Figure:
    """The figure with other titles of its axes, and names folded so that they fit beside others."""
    layout = dict(figure.layout)
    for axis, title in titles(x_title, y_title).items():
        layout[axis] = {**layout.get(axis, {}), **title}
    return replace(figure, layout=layout, data=tuple(map(_folded, figure.data)))


def wrapped(name: str, width: int = NAME_WIDTH) -> str:
    """A name in lines for plotly, cut after a plus sign or a blank where there is one."""
    lines = textwrap.wrap(name.replace("+", "+ "), width, break_on_hyphens=False)
    return "<br>".join(escape(line.replace("+ ", "+")) for line in lines)


def _folded(trace: dict[str, Any]) -> dict[str, Any]:
    # plots.bars has escaped the names already.
    fold = {name: name.replace("+", "+<br>") for name in trace["x"] if len(name) > NAME_WIDTH}
    return trace | {"x": [fold.get(name, name) for name in trace["x"]]}
