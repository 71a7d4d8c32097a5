"""Predicted against measured speed-ups as a section of a page."""

from collections.abc import Sequence
from html import escape
from typing import Any

from octavo.measure.records import Measurement
from octavo.measure.report.filled import filled_table
from octavo.measure.report.html import Section
from octavo.measure.report.plots import SYMBOLS, Figure
from octavo.measure.report.points import MARK, titles, wrapped
from octavo.measure.report.select import grouped

# Whose records advice can be compared with.
COMPARED_OPS = ("latency", "throughput", "encoder", "diffusion_step")
_COLUMNS = (
    *("model", "what", "row", "predicted_speedup", "measured_speedup", "error_percent", "note"),
)


def advice_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine: records of op `advise`, which compare advice with records."""
    return [_section(str(machine), own) for (machine,), own in grouped(records).items()]


def _section(machine: str, records: Sequence[Measurement]) -> Section:
    errors = sorted(abs(r.values["error_percent"]) for r in records if "error_percent" in r.values)
    headline = ""
    if errors:
        headline = (
            f"Advice on {machine}: {len(errors)} speed-ups of whole models predicted without "
            f"their own records, half of them within {errors[(len(errors) - 1) // 2]:.1f} %, all "
            f"within {errors[-1]:.1f} %."
        )
    caption = "Speed-ups over BF16, predicted without the model's own records, and measured"
    return Section(
        title=f"Advice: predicted against measured, {machine}",
        text="What octavo advise says of a model before anything of it was measured here, beside "
        "what was measured. Rows without a prediction say why.",
        headline=headline,
        figures=(_figure(records),) if errors else (),
        tables=(filled_table(records, caption=caption, columns=_COLUMNS),),
    )


def _figure(records: Sequence[Measurement]) -> Figure:
    rows = [row for row in records if "predicted_speedup" in row.values]
    data: list[dict[str, Any]] = []
    for number, model in enumerate(dict.fromkeys(str(row.case["model"]) for row in rows)):
        own = [row for row in rows if row.case["model"] == model]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": wrapped(model),
                "x": [row.values["measured_speedup"] for row in own],
                "y": [row.values["predicted_speedup"] for row in own],
                "text": [escape(f"{row.case['what']}, {row.case['row']}") for row in own],
                "hovertemplate": "%{text}<br>measured %{x:.2f}, predicted %{y:.2f}<extra></extra>",
                "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8},
                "meta": {"series": number},
            }
        )
    ends = [end for trace in data for axis in "xy" for end in trace[axis]]
    low, high = min(ends), max(ends)
    equal = {"type": "scatter", "mode": "lines", "name": "equal", "hoverinfo": "skip"}
    data.append(
        equal
        | {"x": [low, high], "y": [low, high]}
        | {"line": {"color": MARK, "width": 1, "dash": "dot"}}
    )
    layout = titles("measured speed-up (×)", "predicted speed-up (×)") | {"showlegend": True}
    return Figure(
        caption="Predicted over measured speed-up of whole models; on the dotted line they are "
        "equal.",
        data=tuple(data),
        layout=layout,
        height_rem=26,
    )
