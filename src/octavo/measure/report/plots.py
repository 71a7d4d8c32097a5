"""Bar and line plots made from measurements, as data that plotly.js draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from octavo.errors import ConfigError
from octavo.measure.records import Measurement
from octavo.measure.report.labels import format_column, label

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
_MAX_TICKS = 8  # measured sizes are better marks than powers of ten, while there is room for them


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A sentence that says what the plot shows, and plotly's traces and layout.

    height_rem: where the page's own height would not do.
    """

    caption: str
    data: tuple[dict[str, Any], ...]
    layout: dict[str, Any]
    height_rem: int | None = None


def bars(
    records: Sequence[Measurement], *, caption: str, x: str, y: str, series: str = "impl"
) -> Figure:
    """Groups of bars: one group per value of `x`, one colour per value of `series`."""
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "x": [_text(at) for at, _ in points],
            "y": [value for _, value in points],
            "texttemplate": "%{y:.3g}",
            "textposition": "outside",
            "cliponaxis": False,
        }
        for name, points in _series(records, x, y, series).items()
    ]
    layout = _layout(x, y, len(traces), x_type="category")
    values = [value for trace in traces for value in trace["y"] if value is not None]
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
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """One line per value of `series`, its points ordered by the number `x`."""
    traces: list[dict[str, Any]] = []
    for name, points in _series(records, x, y, series).items():
        if not all(isinstance(at, int | float) for at, _ in points):
            raise ConfigError(f"the x axis of lines needs numbers, got {points[0][0]!r} for {x}")
        points.sort(key=lambda point: point[0])
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [at for at, _ in points],
                "y": [value for _, value in points],
                "marker": {"symbol": SYMBOLS[len(traces) % len(SYMBOLS)], "size": 8},
            }
        )
    x_type, y_type = ("log" if is_log else "linear" for is_log in (log_x, log_y))
    layout = _layout(x, y, len(traces), x_type=x_type, y_type=y_type)
    measured = sorted({at for trace in traces for at in trace["x"]})
    if log_x and len(measured) <= _MAX_TICKS:
        layout["xaxis"] |= {"tickvals": measured, "ticktext": format_column(measured)}
    return Figure(caption=caption, data=tuple(traces), layout=layout)


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
            found.setdefault(_text(record.get(series)), []).append(point)
    if not found:
        raise ConfigError(f"no record has both {x} and a number {y}")
    return found


def _layout(
    x: str, y: str, num_series: int, *, x_type: str, y_type: str = "linear"
) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": escape(label(x)), "font": {"size": 13}}, "type": x_type},
        "yaxis": {"title": {"text": escape(label(y)), "font": {"size": 13}}, "type": y_type},
        "showlegend": num_series > 1,
    }


def _text(value: Any) -> str:
    # plotly reads tags such as <a href> in its texts.
    return escape(format_column([value])[0])
