"""Tables of needles: what was found, by the length of the prompt."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table, to_markdown
from tables.common import grouped, newest

RETRIEVAL = "retrieval-model"
NONE_YET = "No model has a record yet: `octavo eval needle MODEL -o RECORDS` makes one.\n"
WORDS = {
    "bf16": "BF16",
    "float32": "float32",
    "fp8 unit": "FP8, two-level accumulation",
    "fp8 unit+promote=none": "FP8, one-level accumulation",
    "fp8 head": "FP8, static scales per head",
    "fp8 head+rotate+center": "the same, keys rotated and centered",
}


def retrieval(results: Path) -> str:
    """What the retrieval model finds."""
    return _tables(results, is_retrieval=True)


def needles(results: Path) -> str:
    """What other models find."""
    return _tables(results, is_retrieval=False)


def _tables(results: Path, *, is_retrieval: bool) -> str:
    """The newest records of models, whatever machine they are of; a sentence without any."""
    found = [r for path in sorted(results.glob("needle_*.jsonl")) for r in store.read(path)]
    wanted = (
        r for r in found if r.op == "needle" and (r.case["model"] == RETRIEVAL) == is_retrieval
    )
    latest = newest(wanted, lambda r: (_subject(r), *_cell(r)))
    if not latest:
        return NONE_YET
    return "\n\n".join(map(_of_subject, grouped(latest, _subject))) + "\n"


def _subject(record: Measurement) -> tuple[object, ...]:
    return record.case["model"], record.machine.gpu or record.machine.cpu


def _cell(record: Measurement) -> tuple[object, ...]:
    return tuple(record.case[name] for name in ("recipe", "length", "depth", "num_keys"))


def _of_subject(records: list[Measurement]) -> str:
    lengths = sorted({int(r.case["length"]) for r in records})
    rows = []
    for group in grouped(records, lambda r: r.case["recipe"]):
        cells = (_percent([r for r in group if r.case["length"] == length]) for length in lengths)
        rows.append((WORDS[str(group[0].case["recipe"])], *cells))
    header = ("", *(f"{length // 1024}k" for length in lengths))
    model, machine = _subject(records[0])
    depths = len({r.case["depth"] for r in records})
    repetitions = int(records[0].case["repetitions"])
    prompts = "1 prompt" if repetitions == 1 else f"{repetitions} prompts"
    return (
        f"Needles found by {model} (%) on an {machine}: {depths} depths, {prompts} for each, so "
        f"that one needle of a cell is {100 / (depths * repetitions):.0f} %.\n\n"
        f"{to_markdown(Table(caption='', header=header, rows=tuple(rows)))}"
    )


def _percent(records: list[Measurement]) -> str:
    """Over all depths, which have as many prompts each."""
    values = [r.values["found_percent"] for r in records]
    return f"{sum(values) / len(values):.0f}"
