"""Which layers of a pipeline matter, as a table and as a section of a page."""

import os
from collections.abc import Sequence

from octavo.measure.records import Measurement
from octavo.measure.report.html import Section
from octavo.measure.report.plots import Figure
from octavo.measure.report.points import name_bars
from octavo.measure.report.select import grouped, newest
from octavo.measure.report.tables import Table


def sensitivity_table(records: Sequence[Measurement], num_rows: int | None = None) -> Table:
    """One row per layer, kind or block, the largest error first; num_rows: not more of them."""
    rows = [record for record in records if record.op == "sensitivity"]
    shown = rows[:num_rows]
    more = f"; the first {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
    return Table(
        caption=f"Error of the transformer's result when these alone are FP8{more}",
        header=("layer", "layers", "error %", "worst step %", "weights %", "kept", "proposed"),
        rows=tuple(
            (
                str(record.get("layer")),
                int(record.values["num_layers"]),
                100 * record.values["error"],
                100 * record.values["worst_error"],
                100 * record.values["weight_share"],
                "weight-only" if record.get("is_weight_only") else str(record.get("kept")),
                "yes" if record.get("is_proposed") else "",
            )
            for record in shown
        ),
    )


_NUM_BARS = 12  # layers of the plot, the largest errors


def sensitivity_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine, model and way to group layers of `--sensitivity`."""
    sections = []
    for (machine, model, by), own in grouped(records, "model", "by").items():
        rows = newest([row for row in own if row.op == "sensitivity"], "layer")
        rows.sort(key=lambda row: row.values["error"], reverse=True)
        whole = newest([row for row in own if row.op == "sensitivity_of_all"], "layer")
        said = [f"Together, {r.case['layer']}: {100 * r.values['error']:.2f} %." for r in whole]
        sections.append(
            Section(
                title=f"Sensitivity of layers: {model}, by {by}, {machine}",
                text="Each row's layers alone in FP8, all others as they were: the relative error "
                "of the transformer's result, over the steps. " + " ".join(said),
                headline=f"{model}: {rows[0].case['layer']} alone in FP8 has the largest error, "
                f"{100 * rows[0].values['error']:.1f} %."
                if rows
                else "",
                figures=(_figure(rows[:_NUM_BARS]),) if rows else (),
                tables=(sensitivity_table(rows),) if rows else (),
            )
        )
    return sections


def _figure(rows: Sequence[Measurement]) -> Figure:
    names = [str(row.case["layer"]) for row in rows]
    # What all of them begin with says nothing.
    start = os.path.commonprefix(names).rpartition(".")[0] if len(names) > 1 else ""
    return name_bars(
        {
            name.removeprefix(f"{start}."): 100 * row.values["error"]
            for name, row in zip(names, rows, strict=True)
        },
        caption=f"Error of the result when these layers alone are FP8, the {len(rows)} largest; "
        "lower is better.",
        value_title="relative error (%)",
    )
