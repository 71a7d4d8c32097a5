"""Predicted against measured: every speed-up of whole models that records have."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.measure.advise.cost import DecoderPlan
from octavo.measure.advise.gpus import Gpu
from octavo.measure.advise.model_shape import ModelShape
from octavo.measure.advise.predict import (
    STEP_RECIPES,
    Predictor,
    is_whole,
    newest,
    plan_of,
    shape_of,
    step_shape,
)
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.measure.report.speed import COMPARED_OPS
from octavo.measure.report.tables import Table, from_records

OP = "advise"
COLUMNS = (
    *("model", "what", "row", "predicted_speedup", "measured_speedup", "error_percent", "note"),
)
HOST_BOUND = "bound by launches on the host: not predicted"


@dataclass(frozen=True)
class Compared:
    """A speed-up over BF16; predicted is None where none can be said, and `note` says why."""

    model: str
    what: str
    row: str
    measured: float
    predicted: float | None
    note: str = ""

    @property
    def error_percent(self) -> float | None:
        """How far the prediction is from what was measured."""
        if self.predicted is None:
            return None
        return 100 * (self.predicted / self.measured - 1)


def compare(
    records: Sequence[Measurement], gpu: Gpu, model: str, *, is_left_out: bool = True
) -> list[Compared]:
    """All speed-ups of a model in records of this GPU.

    is_left_out: predict without the model's own records.
    """
    predictor = Predictor(records, gpu, leave_out=[model] if is_left_out else [])
    own = [row for row in records if row.case.get("model") == model]
    rows = [row for row in newest(own) if row.machine.gpu == gpu.name]
    found: list[Compared] = []
    makers = (_compare_latency, _compare_throughput, _compare_encoder, _compare_steps)
    for op, make in zip(COMPARED_OPS, makers, strict=True):
        of_op = [row for row in rows if row.op == op]
        if of_op:
            found += make(predictor, of_op)
    return found


def compare_all(records: Sequence[Measurement], gpu: Gpu) -> list[Compared]:
    """All speed-ups of all models that records of this GPU have, each without its own records."""
    rows = [row for row in records if row.op in COMPARED_OPS and row.machine.gpu == gpu.name]
    names = dict.fromkeys(str(row.case["model"]) for row in rows)
    known = [name for name in names if shape_of(name) is not None]
    return [one for name in known for one in compare(records, gpu, name)]


def as_records(compared: Sequence[Compared], machine: Machine, command: str) -> list[Measurement]:
    """The same as records, for a report."""
    records = []
    for one in compared:
        about: dict[str, Scalar] = {"model": one.model, "what": one.what, "row": one.row}
        if one.note:
            about["note"] = one.note
        values = {"measured_speedup": one.measured}
        if one.predicted is not None and one.error_percent is not None:
            values |= {"predicted_speedup": one.predicted, "error_percent": one.error_percent}
        records.append(
            Measurement(
                op=OP, impl="predicted", case=about, values=values, machine=machine, command=command
            )
        )
    return records


def compared_table(records: Sequence[Measurement]) -> Table:
    """Records of `as_records` as a table."""
    caption = "Speed-ups over BF16, predicted without the model's own records, and measured"
    return from_records(records, caption=caption, columns=COLUMNS)


def _model(row: Measurement) -> ModelShape:
    found = shape_of(str(row.case["model"]))
    if found is None:
        raise ConfigError(f"expected records of a model whose sizes are known, got {row.case}")
    return found


def _first_plan(row: Measurement, rows: Sequence[Measurement]) -> DecoderPlan:
    """How the row ran that a record was compared with: one of the same command, if it is there."""
    named = [one for one in rows if one.case["row"] == row.baseline]
    if not named:
        raise ConfigError(f"expected a record of {row.baseline}, which {row.case} is compared with")
    same = [one for one in named if one.command == row.command]
    return plan_of((same or named)[0])


def _compare_latency(predictor: Predictor, rows: Sequence[Measurement]) -> list[Compared]:
    model, found = _model(rows[0]), []
    whole = [row for row in rows if is_whole(row, model)]
    for row in (row for row in whole if "itl_speedup" in row.values):
        first = _first_plan(row, whole)
        length, batch = int(row.case["input_len"]), int(row.case["batch_size"])
        middle, plan = length + int(row.case["output_len"]) // 2, plan_of(row)
        tokens = [
            predictor.decode(model, one, context=middle, batch=batch).ms for one in (first, plan)
        ]
        name, at = str(row.case["row"]), f"{length:,} tokens"
        at = at if batch == 1 else f"{batch} × {at}"
        measured = row.values["itl_speedup"]
        found.append(Compared(model.name, f"ITL at {at}", name, measured, tokens[0] / tokens[1]))
        if batch > 1:
            continue
        before, after = (predictor.prefill(model, one, length) for one in (first, plan))
        is_bound = before.is_host_bound or after.is_host_bound
        predicted = None if is_bound else before.ms / after.ms
        note = HOST_BOUND if is_bound else ""
        measured = row.values["ttft_speedup"]
        found.append(Compared(model.name, f"TTFT at {at}", name, measured, predicted, note))
    return found


def _compare_throughput(predictor: Predictor, rows: Sequence[Measurement]) -> list[Compared]:
    model, found = _model(rows[0]), []
    whole = [row for row in rows if is_whole(row, model)]
    for row in (row for row in whole if "output_throughput_gain" in row.values):
        first = _first_plan(row, whole)
        load = {
            "context": int(row.case["input_len"]),
            "output_len": int(row.case["output_len"]),
            "batch": int(row.case.get("max_concurrency") or row.case["max_num_seqs"]),
            "num_requests": int(row.case["num_prompts"]),
        }
        before, after = (predictor.duration_s(model, p, **load) for p in (first, plan_of(row)))
        what = f"output tokens/s, {load['batch']} × {load['context']:,} tokens"
        measured = row.values["output_throughput_gain"]
        found.append(Compared(model.name, what, str(row.case["row"]), measured, before / after))
    return found


def _compare_encoder(predictor: Predictor, rows: Sequence[Measurement]) -> list[Compared]:
    """Each recipe by its fastest way to run, graphs or none, over the fastest stock tower."""
    from octavo.measure.bench.encoder import RESOLUTIONS

    model = _model(rows[0])
    best: dict[tuple[str, int, str], Measurement] = {}
    for row in rows:
        if row.case["recipe"] != "bf16" and "speedup" in row.values:
            recipe = str(row.case["recipe"])
            key = str(row.case["resolution"]), int(row.case["images"]), recipe
            if key not in best or row.values["speedup"] > best[key].values["speedup"]:
                best[key] = row
    found = []
    for (resolution, num_images, recipe), row in best.items():
        case = {"size": RESOLUTIONS[resolution], "num_images": num_images}
        stock, own = (predictor.tower(model, name, **case) for name in ("bf16", recipe))  # type: ignore[arg-type]
        what = f"tower, {num_images} × {resolution}"
        measured = row.values["speedup"]
        found.append(Compared(model.name, what, recipe, measured, stock.ms / own.ms))
    return found


def _compare_steps(predictor: Predictor, rows: Sequence[Measurement]) -> list[Compared]:
    """Each recipe by its fastest way to run, over the fastest in BF16."""
    best: dict[tuple[str, str], Measurement] = {}
    for row in rows:
        recipe = str(row.case["recipe"])
        if recipe == "bf16" or recipe not in STEP_RECIPES or not row.case.get("compiled"):
            continue
        key = str(row.case.get("layers", "all")), recipe
        if key not in best or row.values["speedup"] > best[key].values["speedup"]:
            best[key] = row
    found = []
    for (layers, recipe), row in best.items():
        model = step_shape(row)
        if model is None:
            continue
        plain, own = (predictor.step(model, name) for name in ("bf16", recipe))
        blocks = f", {layers} block{'' if layers == '1' else 's'} of each kind"
        what = "a step" if layers == "all" else f"a step{blocks}"
        measured = row.values["speedup"]
        found.append(Compared(model.name, what, recipe, measured, plain.ms / own.ms))
    return found
