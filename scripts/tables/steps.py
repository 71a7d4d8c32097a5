"""The table of diffusion steps: FP8 beside compiled BF16, in full size."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, to_markdown
from tables.common import grouped, newest

NONE_YET = "No step in full size has a record yet: `octavo bench diffusion` makes one on a GPU.\n"
HEADER = ("", "step (ms)", "over BF16", "memory", "relative error")
WORDS = {
    "bf16": "BF16",
    "bf16-faster": "BF16, plain layers in faster forms",
    "linear": "FP8 linear layers",
    "attention": "FP8 attention",
    "linear+attention": "FP8 linear layers and attention",
    "linear+attention+modulation": "the same, modulation with FP8 weights",
    "linear-static": "FP8 linear layers, static scales",
    "linear-static+attention": "FP8 linear layers with static scales, and attention",
    "linear-static+attention-static": "FP8 linear layers and attention, static scales",
    "linear-block": "FP8 linear layers, blocks of 128 × 128",
}


def steps(results: Path) -> str:
    """Each model's newest records; a sentence if there are none."""
    path = results / "diffusion_h200.jsonl"
    records = store.read(path) if path.is_file() else []
    latest = newest(records, lambda r: (_model(r), r.case["recipe"], r.case["graphs"]))
    return "\n\n".join(map(_steps_of, grouped(latest, _model))) + "\n" if latest else NONE_YET


def _model(record: Measurement) -> tuple[Scalar, ...]:
    return tuple(record.case[name] for name in ("model", "inputs", "layers", "compiled"))


def _steps_of(records: list[Measurement]) -> str:
    case, machine = records[0].case, records[0].machine
    layers = "all" if case["layers"] == "all" else f"{case['layers']} of each kind of"
    # BF16 comes first in a run: whatever is older is of an earlier one.
    start = max((r.date for r in records if r.case["recipe"] == "bf16"), default="")
    rows = tuple(_row(record, is_earlier=record.date < start) for record in records)
    table = Table(caption="", header=HEADER, rows=rows)
    return (
        f"**{case['model']}** (random weights, {layers} blocks, {case['inputs']}) on an "
        f"{machine.gpu}: medians of one step. The baseline is {records[0].baseline}, in the same "
        f"run as each row; BF16's row is of the newest. The memory is that of the weights and a "
        f"step, over BF16's.\n\n{to_markdown(table)}"
    )


def _row(record: Measurement, *, is_earlier: bool) -> tuple[str, ...]:
    case, values = record.case, record.values
    how = ", by CUDA graphs" if case["graphs"] else ""
    how += ", an earlier run" if is_earlier else ""
    memory = values.get("peak_bytes_ratio")
    return (
        f"{WORDS[str(case['recipe'])]}{how} ({case['attention']} attention)",
        f"{values['median_ms']:.1f}",
        f"{values['speedup']:.2f}×",
        "–" if memory is None else f"{memory:.2f}×",
        f"{values['relative_rms']:.3f}",
    )
