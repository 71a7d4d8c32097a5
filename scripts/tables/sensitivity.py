"""The table of the layers of the small image model that matter."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, to_markdown
from tables.common import newest

FILE = "sensitivity_cpu.jsonl"
NONE_YET = "No scan has a record yet: `octavo calibrate --pipeline --sensitivity` makes one.\n"
NUM_ROWS = 12
HEADER = ("layers", "number", "error (%)", "at the worst step (%)", "weights (%)", "stays because")
OP, OF_ALL = "sensitivity", "sensitivity_of_all"
TOTALS = {
    "all": "all that do not stay, at once",
    "all but those proposed": "the same without those that are proposed",
}


def sensitivity(results: Path) -> str:
    """The largest errors of the newest scan, and that of all layers at once."""
    if not (results / FILE).is_file():
        return NONE_YET
    found = store.read(results / FILE)
    last = max(found, key=lambda record: record.date)
    found = newest((r for r in found if _about(r) == _about(last)), _key)
    rows = sorted((r for r in found if r.op == OP), key=lambda r: -r.values["error"])
    proposed = [r for r in rows if r.case["is_proposed"]]
    totals = {r.case["layer"]: r for r in found if r.op == OF_ALL}
    shown = [_row(record) for record in rows[:NUM_ROWS]]
    for name, text in TOTALS.items():
        if name == "all" or proposed:
            shown.append((text, "", f"{100 * totals[name].values['error']:.2f}", "", "", ""))
    table = Table(caption="", header=HEADER, rows=tuple(shown))
    return f"{_sentence(last, len(rows))}\n\n{to_markdown(table)}\n\n{_proposal(proposed)}\n"


def _about(record: Measurement) -> tuple[Scalar, ...]:
    names = ("model", "dtype", "by", "num_prompts", "num_inference_steps", "num_timesteps")
    return tuple(record.case[name] for name in names)


def _key(record: Measurement) -> tuple[str, Scalar]:
    return record.op, record.case["layer"]


def _row(record: Measurement) -> tuple[str, ...]:
    values, case = record.values, record.case
    return (
        f"`{str(case['layer']).removeprefix('transformer.')}`",
        f"{values['num_layers']:.0f}",
        f"{100 * values['error']:.2f}",
        f"{100 * values['worst_error']:.2f}",
        f"{100 * values['weight_share']:.1f}",
        str(case["kept"]) or "–",
    )


def _sentence(last: Measurement, num_rows: int) -> str:
    case = last.case
    return (
        f"`{case['model']}` in {case['dtype']}, {case['num_prompts']} prompts, "
        f"{case['num_timesteps']} of {case['num_inference_steps']} steps; the first "
        f"{min(NUM_ROWS, num_rows)} of {num_rows} kinds of layers, by their error:"
    )


def _proposal(proposed: list[Measurement]) -> str:
    if not proposed:
        return "No layer that is quantized by default stands out: nothing is proposed."
    patterns = [f"`{record.case['pattern']}`" for record in proposed]
    return f"Proposed: {', '.join(patterns)}."
