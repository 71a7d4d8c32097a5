"""What was measured beside advice: speed-ups that records have, and short benchmarks run here.

Predictions are compared with every speed-up of whole models in records. The short benchmarks decide
what advice cannot know, on the GPU that was asked about, or none. What they measure are records
like any others: advice takes a model's own records first. Advice itself becomes records here, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.advise.advice import Advice, how_to_run, recipe_text
from octavo.measure.advise.cost import DecoderPlan
from octavo.measure.advise.gpus import Gpu, all_gpus
from octavo.measure.advise.predict import (
    STEP_RECIPES,
    Predictor,
    is_whole,
    newest,
    plan_of,
    shape_of,
    step_shape,
)
from octavo.measure.advise.shape import ModelShape, Workload
from octavo.measure.bench.cases import RESOLUTIONS, LatencyCase
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.measure.report.speed import COMPARED_OPS

if TYPE_CHECKING:
    import torch

    from octavo.kernels.device import Device
    from octavo.measure.bench.benchmark import Objection

OP = "advise"
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


def advice_records(advice: Advice, command: str) -> list[Measurement]:
    """What to expect of the recipe beside BF16, each row with the recipe, the reasons and why.

    The machine is this one, which only computed; the GPU that the advice is for is in the case.
    """
    workload = advice.workload
    about: dict[str, Scalar] = {
        "model": advice.model,
        "gpu": advice.gpu.name,
        "context": workload.context,
        "concurrency": workload.concurrency,
        "output_len": workload.output_len,
        "recipe": recipe_text(advice),
        "serve": "\n".join(how_to_run(advice)),
        "reasons": "\n".join(advice.reasons),
        "warnings": "\n".join(advice.warnings),
    }
    machine = Machine.current()

    def row(what: str, values: Mapping[str, float], note: str = "") -> Measurement:
        case = {**about, "what": what, **({"note": note} if note else {})}
        return Measurement(
            op="advice",
            impl="predicted",
            case=case,
            values=values,
            machine=machine,
            command=command,
        )

    records = []
    for one in advice.expectations:
        values = {"before_ms": one.before_ms, "after_ms": one.after_ms}
        if one.speedup is not None:
            values["speedup"] = one.speedup
        records.append(row(one.what, values, one.note))
    for size in advice.memory:
        unit = "bytes" if size.is_bytes else "count"
        records.append(row(size.what, {f"before_{unit}": size.before, f"after_{unit}": size.after}))
    return records


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


def _fastest(rows: Sequence[Measurement], *names: str) -> list[Measurement]:
    """Each recipe by its fastest way to run, graphs or none; names: what else tells cases apart."""
    best: dict[tuple[Scalar, ...], Measurement] = {}
    for row in rows:
        key = (row.case["recipe"], *(row.case.get(name, "all") for name in names))
        if key not in best or row.values["speedup"] > best[key].values["speedup"]:
            best[key] = row
    return list(best.values())


def _compare_encoder(predictor: Predictor, rows: Sequence[Measurement]) -> list[Compared]:
    """Each recipe over the fastest stock tower."""
    model, found = _model(rows[0]), []
    quantized = [row for row in rows if row.case["recipe"] != "bf16" and "speedup" in row.values]
    for row in _fastest(quantized, "resolution", "images"):
        recipe, resolution = str(row.case["recipe"]), str(row.case["resolution"])
        num_images, size = int(row.case["images"]), RESOLUTIONS[resolution]
        stock, own = (
            predictor.tower(model, name, size=size, num_images=num_images)
            for name in ("bf16", recipe)
        )
        what = f"tower, {num_images} × {resolution}"
        measured = row.values["speedup"]
        found.append(Compared(model.name, what, recipe, measured, stock.ms / own.ms))
    return found


def _compare_steps(predictor: Predictor, rows: Sequence[Measurement]) -> list[Compared]:
    """Each recipe over the fastest in BF16."""
    recipes, found = STEP_RECIPES.keys() - {"bf16"}, []
    compiled = [r for r in rows if r.case["recipe"] in recipes and r.case.get("compiled")]
    for row in _fastest(compiled, "layers"):
        model, recipe = step_shape(row), str(row.case["recipe"])
        if model is None:
            continue
        plain, own = (predictor.step(model, name) for name in ("bf16", recipe))
        layers = str(row.case.get("layers", "all"))
        blocks = f", {layers} block{'' if layers == '1' else 's'} of each kind"
        what = "a step" if layers == "all" else f"a step{blocks}"
        measured = row.values["speedup"]
        found.append(Compared(model.name, what, recipe, measured, plain.ms / own.ms))
    return found


# Tokens of each sequence that are timed, while all of them decode.
OUTPUT_LEN = 16
MAX_BATCHED_TOKENS = 8192
# Blocks of each kind that a diffusion transformer is measured with.
NUM_BLOCKS = 2
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """Records, and who could not take part: name and reason."""

    records: tuple[Measurement, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(self.records + other.records, self.failures + other.failures)


def benchmarks(model: ModelShape, workload: Workload) -> list[str]:
    """What would be measured, in words."""
    found = []
    if model.decoder is not None:
        rows = ", ".join(decoder_rows(model))
        found.append(
            f"the engine's latency at {workload.concurrency} × {workload.context:,} ({rows})"
        )
    if model.tower is not None:
        found.append("the vision tower in BF16 and FP8")
    if model.step is not None:
        found.append("a step of the diffusion transformer in BF16 and FP8")
    return found


def decoder_rows(model: ModelShape) -> list[str]:
    """The rows of `octavo bench latency` that decide."""
    assert model.decoder is not None
    windows = ["fp8+skip=sliding_window"] if model.decoder.windows else []
    return ["auto", "fp8", *windows, "fp8+linear"]


def check_measurable(model: ModelShape, gpu: Gpu, workload: Workload, device: "Device") -> None:
    """Raise unless this machine has the GPU that was asked about."""
    what = "; ".join(benchmarks(model, workload))
    if device.capability is None:
        raise UnsupportedError(
            f"--measure needs a CUDA GPU, got none here: cannot measure {what}. Leave --measure "
            f"out, or run this on {gpu.name}"
        )
    if device.name != gpu.name:
        own = [other.key for other in all_gpus().values() if other.name == device.name]
        expected = f"--gpu {own[0]}" if own else f"a GPU of {', '.join(all_gpus())}"
        raise ConfigError(
            f"--measure measures the GPU that is here: expected {expected}, got {device.name} here "
            f"and --gpu {gpu.key}; change it, or leave --measure out"
        )


def measure(
    model: ModelShape,
    workload: Workload,
    device: "torch.device",
    *,
    name: str,
    command: str,
    on_progress: Progress = lambda what: None,
) -> Measured:
    """Everything that decides; name: that of the model's sizes, or its folder."""
    found = Measured()
    if model.decoder is not None:
        on_progress("the engine's latency")
        found += _measure_decoder(model, workload, device, name, command)
    if model.tower is not None:
        on_progress("the vision tower")
        found += _measure_tower(model, workload, device, name, command)
    if model.step is not None:
        on_progress("a step")
        found += _measure_step(model, device, name, command)
    return found


def measured_output_len(workload: Workload) -> int:
    """Tokens for each sequence, so that the first still decodes when the last prompt is done.

    While prompts are computed, every sequence whose own is done has a token in each step.
    """
    if workload.concurrency > MAX_BATCHED_TOKENS // 2:
        raise UnsupportedError(
            f"expected up to {MAX_BATCHED_TOKENS // 2} sequences at once to measure, got "
            f"{workload.concurrency}: in steps of {MAX_BATCHED_TOKENS} tokens they leave their "
            "prompts no room"
        )
    num_prompt_tokens = (workload.concurrency - 1) * workload.context  # behind the first
    num_tokens = MAX_BATCHED_TOKENS - workload.concurrency  # of prompts, in a step
    return -(-num_prompt_tokens // num_tokens) + min(workload.output_len, OUTPUT_LEN) + 1


def _measure_decoder(
    model: ModelShape, workload: Workload, device: "torch.device", name: str, command: str
) -> Measured:
    from octavo.integrations.transformers.decoder import CONFIGS
    from octavo.measure.bench.engine import make_rows, open_subject
    from octavo.measure.bench.engine_load import run_load
    from octavo.serving.engine.settings import EngineSettings

    is_config = name in CONFIGS
    if not is_config and not Path(name).is_dir():
        raise UnsupportedError(
            f"expected weights to measure, or sizes of {', '.join(CONFIGS)}; got {name}, whose "
            "language model has neither: give the model's folder"
        )
    places = (None, name) if is_config else (name, None)
    subject = open_subject(*places, dtype="auto", device=str(device), layers=None)
    case = LatencyCase(
        input_lens=(workload.context,),
        output_len=measured_output_len(workload),
        batch_size=workload.concurrency,
        num_iters=1,
    )
    settings = EngineSettings(
        max_num_seqs=workload.concurrency,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        compile=device.type == "cuda",
    )
    rows = make_rows(decoder_rows(model), subject)
    result = run_load(subject, rows, case, settings, command=command)
    return Measured(_named(result.records, model.name), tuple(result.failures.items()))


def _named(records: Sequence[Measurement], name: str) -> tuple[Measurement, ...]:
    """Records under the name by which advice knows the model."""
    return tuple(replace(record, case={**record.case, "model": name}) for record in records)


def _objected(objections: "Sequence[Objection]") -> tuple[tuple[str, str], ...]:
    return tuple((f"{one.name}, {one.operands}", one.reason) for one in objections)


def _measure_tower(
    model: ModelShape, workload: Workload, device: "torch.device", name: str, command: str
) -> Measured:
    from octavo.integrations.transformers.vision_tower import CONFIGS, make_tower, open_tower
    from octavo.measure.bench.encoder import EncoderCase, run_encoder

    named = {size: resolution for resolution, size in RESOLUTIONS.items()}
    if workload.image_size not in named:
        raise ConfigError(
            f"--measure takes images of {', '.join(RESOLUTIONS)}; got "
            f"{workload.image_size[1]}x{workload.image_size[0]}"
        )
    tower = make_tower(name, device) if name in CONFIGS else open_tower(Path(name), device)
    case = EncoderCase(named[workload.image_size], workload.num_images)
    records, objections = run_encoder(tower, case, command, use_graphs=device.type == "cuda")
    return Measured(_named(records, model.name), _objected(objections))


def _measure_step(model: ModelShape, device: "torch.device", name: str, command: str) -> Measured:
    from octavo.integrations.diffusers.full_size import FULL_SIZES
    from octavo.measure.bench.diffusion import StepCase, run_step

    if model.name not in FULL_SIZES:
        raise UnsupportedError(
            f"expected a diffusion transformer of {', '.join(FULL_SIZES)} to measure, got {name}: "
            "octavo image --compare bf16 times a pipeline's own"
        )
    is_cuda = device.type == "cuda"
    recipes = ("bf16", "linear", "linear+attention")
    case = StepCase(model.name, recipes, NUM_BLOCKS, is_compiled=is_cuda, use_graphs=is_cuda)
    found = Measured()
    for records, objections in run_step(case, device, command):
        found += Measured(tuple(records), _objected(objections))
    return found
