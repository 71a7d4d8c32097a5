"""What was measured beside advice: speed-ups that records have, and short benchmarks run here.

Predictions are compared with every speed-up of whole models in records. The short benchmarks decide
what advice cannot know; advice takes a model's own records first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.advise import predict
from octavo.measure.advise.advice import Advice, Expectation, how_to_run, recipe_text
from octavo.measure.advise.cost import Cost, DecoderPlan
from octavo.measure.advise.gpus import Gpu, all_gpus
from octavo.measure.advise.predict import Predictor
from octavo.measure.advise.shape import ModelShape, Workload
from octavo.measure.bench.cases import RESOLUTIONS, LatencyCase
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.measure.report.speed import COMPARED_OPS

if TYPE_CHECKING:
    import torch

    from octavo.kernels.device import Device
    from octavo.measure.bench.benchmark import Objection

HOST_BOUND = "bound by launches on the host: not predicted"


def compare(
    records: Sequence[Measurement], gpu: Gpu, model: str, *, is_left_out: bool = True
) -> list[Measurement]:
    """All speed-ups over BF16 of a model in records of this GPU, as records for a report.

    Each has the prediction beside what was measured; a note says why one has none.
    is_left_out: predict without the model's own records.
    """
    predictor = Predictor(records, gpu, leave_out=[model] if is_left_out else [])
    own = [row for row in records if row.case.get("model") == model]
    rows = [row for row in predict.newest(own) if row.machine.gpu == gpu.name]
    makers = (_compare_latency, _compare_throughput, _compare_encoder, _compare_steps)
    return [
        one
        for op, make in zip(COMPARED_OPS, makers, strict=True)
        for one in make(predictor, [row for row in rows if row.op == op])
    ]


def compare_all(records: Sequence[Measurement], gpu: Gpu) -> list[Measurement]:
    """All speed-ups of all models that records of this GPU have, each without its own records."""
    rows = [row for row in records if row.op in COMPARED_OPS and row.machine.gpu == gpu.name]
    names = dict.fromkeys(str(row.case["model"]) for row in rows)
    known = [name for name in names if predict.shape_of(name) is not None]
    return [one for name in known for one in compare(records, gpu, name)]


def advice_records(advice: Advice, command: str) -> list[Measurement]:
    """What to expect of the recipe beside BF16, each row with the recipe, the reasons and why.

    The machine is this one, which only computed; the GPU that the advice is for is in the case.
    """
    workload = advice.workload
    about: dict[str, Scalar] = {
        "model": advice.model.name,
        "gpu": advice.gpu.name,
        "context": workload.context,
        "concurrency": workload.concurrency,
        "output_len": workload.output_len,
        "recipe": recipe_text(advice),
        "serve": "\n".join(how_to_run(advice)),
        "reasons": "\n".join(advice.reasons),
        "warnings": "\n".join(advice.warnings),
    }
    record = partial(
        Measurement, op="advice", impl="predicted", machine=Machine.current(), command=command
    )
    records = []
    for one in advice.expectations:
        case = {**about, "what": one.what, **({"note": one.note} if one.note else {})}
        times = {"before_ms": one.before.ms, "after_ms": one.after.ms, "speedup": one.speedup}
        known = {name: value for name, value in times.items() if value is not None}
        records.append(record(case=case, values=known))
    for row in advice.memory:
        unit = "bytes" if row.is_bytes else "count"
        values = {f"before_{unit}": row.before, f"after_{unit}": row.after}
        records.append(record(case={**about, "what": row.what}, values=values))
    return records


def _model(row: Measurement) -> ModelShape:
    found = predict.shape_of(str(row.case["model"]))
    if found is None:
        raise ConfigError(f"expected records of a model whose sizes are known, got {row.case}")
    return found


def _compared(row: Measurement, value: str, what: str, before: Cost, after: Cost) -> Measurement:
    """A value of a record beside the ratio of two costs."""
    name, speedup = row.case.get("row", row.case.get("recipe")), row.values[value]
    case = {"model": str(row.case["model"]), "what": what, "row": str(name)}
    values = {"measured_speedup": speedup}
    if (predicted := Expectation(what, before, after).speedup) is None:
        case["note"] = HOST_BOUND
    else:
        values |= {"predicted_speedup": predicted, "error_percent": 100 * (predicted / speedup - 1)}
    return Measurement(
        op="advise",
        impl="predicted",
        case=case,
        values=values,
        machine=row.machine,
        command="octavo report",
    )


def _with_plans(
    rows: Sequence[Measurement], value: str
) -> Iterator[tuple[Measurement, tuple[DecoderPlan, DecoderPlan]]]:
    """The records of whole models with a value; how the row that each is compared with ran, and
    how its own did. Of several rows of that name, the one of the same command counts.
    """
    whole = [row for row in rows if predict.is_whole(row, _model(row))]
    for row in whole:
        if value not in row.values:
            continue
        named = [one for one in whole if one.case["row"] == row.baseline]
        if not named:
            raise ConfigError(
                f"expected a record of {row.baseline}, which {row.case} is compared with"
            )
        same = [one for one in named if one.command == row.command]
        yield row, (predict.plan_of((same or named)[0]), predict.plan_of(row))


def _compare_latency(predictor: Predictor, rows: Sequence[Measurement]) -> Iterator[Measurement]:
    for row, plans in _with_plans(rows, "itl_speedup"):
        model, load = _model(row), predict.load_of(row)
        at = f"{load.context:,} tokens"
        at = at if load.concurrency == 1 else f"{load.concurrency} × {at}"
        tokens = (predictor.token(model, plan, load) for plan in plans)
        yield _compared(row, "itl_speedup", f"ITL at {at}", *tokens)
        if load.concurrency == 1:
            prompts = (predictor.prefill(model, plan, load.context) for plan in plans)
            yield _compared(row, "ttft_speedup", f"TTFT at {at}", *prompts)


def _compare_throughput(predictor: Predictor, rows: Sequence[Measurement]) -> Iterator[Measurement]:
    for row, plans in _with_plans(rows, "output_throughput_gain"):
        load, number = predict.load_of(row), int(row.case["num_prompts"])
        costs = (predictor.requests(_model(row), plan, load, number) for plan in plans)
        what = f"output tokens/s, {load.concurrency} × {load.context:,} tokens"
        yield _compared(row, "output_throughput_gain", what, *costs)


def _fastest(rows: Sequence[Measurement], *names: str) -> list[Measurement]:
    """Each recipe by its fastest way to run, graphs or none; names: what else tells cases apart."""
    keys = [(row.case["recipe"], *(row.case.get(name, "all") for name in names)) for row in rows]
    fastest: dict[object, Measurement] = dict(zip(keys, rows, strict=True))
    for key, row in zip(keys, rows, strict=True):
        fastest[key] = max(fastest[key], row, key=lambda one: one.values["speedup"])
    return list(fastest.values())


def _compare_encoder(predictor: Predictor, rows: Sequence[Measurement]) -> Iterator[Measurement]:
    """Each recipe over the fastest stock tower."""
    quantized = [row for row in rows if row.case["recipe"] != "bf16" and "speedup" in row.values]
    for row in _fastest(quantized, "resolution", "images"):
        resolution, num_images = str(row.case["resolution"]), int(row.case["images"])
        size = RESOLUTIONS[resolution]
        costs = (
            predictor.tower(_model(row), recipe, size=size, num_images=num_images)
            for recipe in ("bf16", str(row.case["recipe"]))
        )
        what = f"tower, {num_images} × {resolution}"
        yield _compared(row, "speedup", what, *costs)


def _compare_steps(predictor: Predictor, rows: Sequence[Measurement]) -> Iterator[Measurement]:
    """Each recipe over the fastest in BF16."""
    recipes = predict.STEP_RECIPES.keys() - {"bf16"}
    compiled = [r for r in rows if r.case["recipe"] in recipes and r.case.get("compiled")]
    for row in _fastest(compiled, "layers"):
        if (model := predict.step_shape(row)) is None:
            continue
        layers = str(row.case.get("layers", "all"))
        blocks = f", {layers} block{'' if layers == '1' else 's'} of each kind"
        what = "a step" if layers == "all" else f"a step{blocks}"
        costs = (predictor.step(model, recipe) for recipe in ("bf16", str(row.case["recipe"])))
        yield _compared(row, "speedup", what, *costs)


# Tokens of each sequence that are timed, while all of them decode.
OUTPUT_LEN = 16
MAX_BATCHED_TOKENS = 8192
# Blocks of each kind that a diffusion transformer is measured with.
NUM_BLOCKS = 2
Progress = Callable[[str], None]
# Records, and who could not take part: name and reason.
Measured = tuple[list[Measurement], list[tuple[str, str]]]


def decoder_rows(model: ModelShape) -> list[str]:
    """The rows of `octavo bench latency` that decide."""
    assert model.decoder is not None
    windows = ["fp8+skip=sliding_window"] if model.decoder.windows else []
    return ["auto", "fp8", *windows, "fp8+linear"]


def check_measurable(model: ModelShape, gpu: Gpu, workload: Workload, device: "Device") -> None:
    """Raise unless this machine has the GPU that was asked about."""
    rows = "" if model.decoder is None else ", ".join(decoder_rows(model))
    if device.capability is None:
        at = f"{workload.concurrency} × {workload.context:,} ({rows})"
        benchmarks = {
            f"the engine's latency at {at}": model.decoder,
            "the vision tower in BF16 and FP8": model.tower,
            "a step of the diffusion transformer in BF16 and FP8": model.step,
        }
        what = "; ".join(words for words, part in benchmarks.items() if part is not None)
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
    measurers = (
        (model.decoder, "the engine's latency", _measure_decoder),
        (model.tower, "the vision tower", _measure_tower),
        (model.step, "a step", _measure_step),
    )
    records: list[Measurement] = []
    failures: list[tuple[str, str]] = []
    for part, what, run in measurers:
        if part is not None:
            on_progress(what)
            for measured, failed in run(model, workload, device, name, command):
                records += measured
                failures += failed
    # Under the name by which advice knows the model.
    return [replace(r, case={**r.case, "model": model.name}) for r in records], failures


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


_Part = Iterator[tuple[Sequence[Measurement], Iterable[tuple[str, str]]]]


def _measure_decoder(
    model: ModelShape, workload: Workload, device: "torch.device", name: str, command: str
) -> _Part:
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
    yield result.records, result.failures.items()


def _objected(objections: "Sequence[Objection]") -> list[tuple[str, str]]:
    return [(f"{one.name}, {one.operands}", one.reason) for one in objections]


def _measure_tower(
    model: ModelShape, workload: Workload, device: "torch.device", name: str, command: str
) -> _Part:
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
    yield records, _objected(objections)


def _measure_step(
    model: ModelShape, workload: Workload, device: "torch.device", name: str, command: str
) -> _Part:
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
    for records, objections in run_step(case, device, command):
        yield records, _objected(objections)
