"""What to do about a systematic shift: a sentence for each row that is lower than the first one."""

import math
import statistics
from collections.abc import Mapping, Sequence

from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table
from octavo.measure.statistics import shift_values

CALIBRATE = "calibrate"


def shifts(records: Sequence[Measurement]) -> dict[str, Mapping[str, float]]:
    """`shift_values` of each row that was tested, by its name; one model, data and first row."""
    found: dict[str, Mapping[str, float]] = {}
    lengths: dict[str, dict[float, list[Measurement]]] = {}
    for record in records:
        name = str(record.case.get("recipe"))
        if "is_shifted" in record.values:
            found[name] = record.values
        elif record.op == "needle" and record.baseline is not None:
            lengths.setdefault(name, {}).setdefault(float(record.case["length"]), []).append(record)
    for name, cells in lengths.items():
        if values := shift_values([_joined(own) for own in cells.values()]):
            found[name] = values
    return found


def _joined(cells: Sequence[Measurement]) -> dict[str, float]:
    """The difference of a length over its depths; nothing where records do not have theirs."""
    if any("difference_noise_percent" not in cell.values for cell in cells):
        return {}
    noise = math.hypot(*(cell.values["difference_noise_percent"] for cell in cells))
    return {
        "difference_percent": statistics.fmean(cell.values["difference_percent"] for cell in cells),
        "difference_noise_percent": noise / len(cells),
    }


def advice(records: Sequence[Measurement]) -> list[str]:
    """A sentence for each row with a systematic shift, with the command that calibrates."""
    first = next((r.baseline for r in records if r.baseline is not None), None)
    return [
        f"{name} is systematically lower than {first}: {-values['shift_points']:.2g} points "
        f"(p = {values['shift_p_value']:.1g}). {CALIBRATE.capitalize()} on data like yours: octavo "
        f"calibrate {records[0].case['model']} --kv --data FILE --scale-save-path scales.json"
        for name, values in shifts(records).items()
        if values["is_shifted"]
    ]


def advised(table: Table, records: Sequence[Measurement]) -> Table:
    """A table of recipes with the column `advice`, if a row of it has a systematic shift."""
    shifted = {name for name, values in shifts(records).items() if values["is_shifted"]}
    if not shifted:
        return table
    rows = tuple((*row, CALIBRATE if row[0] in shifted else None) for row in table.rows)
    return Table(caption=table.caption, header=(*table.header, "advice"), rows=rows)


def shift_headline(records: Sequence[Measurement]) -> str:
    """What to do about systematic shifts, as the headline of a section."""
    return " ".join(advice(records))
