"""Which layers of a pipeline matter, as a table."""

from collections.abc import Sequence

from octavo.measure.records import Measurement
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
