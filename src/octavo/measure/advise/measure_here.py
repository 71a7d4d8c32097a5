"""Short benchmarks that decide what advice cannot know: on the GPU that was asked about, or none.

What they measure are records like any others: advice takes a model's own records first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import Device
from octavo.measure.advise.gpus import Gpu, all_gpus
from octavo.measure.advise.model_shape import ModelShape
from octavo.measure.advise.workload import Workload
from octavo.measure.bench.benchmark import Objection
from octavo.measure.records import Measurement

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


def check_measurable(model: ModelShape, gpu: Gpu, workload: Workload, device: Device) -> None:
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
    device: torch.device,
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
    model: ModelShape, workload: Workload, device: torch.device, name: str, command: str
) -> Measured:
    from octavo.integrations.transformers.decoder import CONFIGS
    from octavo.measure.bench.engine_rows import make_rows, open_subject
    from octavo.measure.bench.latency import LatencyCase, run_latency
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
    results = run_latency(subject, rows, case, settings, command=command)
    records = [record for result in results for record in result.records]
    failures = [(result.row.name, result.failure) for result in results if result.failure]
    return Measured(_named(records, model.name), tuple(failures))


def _named(records: Sequence[Measurement], name: str) -> tuple[Measurement, ...]:
    """Records under the name by which advice knows the model."""
    return tuple(replace(record, case={**record.case, "model": name}) for record in records)


def _objected(objections: Sequence[Objection]) -> tuple[tuple[str, str], ...]:
    return tuple((f"{one.name}, {one.operands}", one.reason) for one in objections)


def _measure_tower(
    model: ModelShape, workload: Workload, device: torch.device, name: str, command: str
) -> Measured:
    from octavo.integrations.transformers.vision_tower import CONFIGS, make_tower, open_tower
    from octavo.measure.bench.encoder import RESOLUTIONS, EncoderCase, run_encoder

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


def _measure_step(model: ModelShape, device: torch.device, name: str, command: str) -> Measured:
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
    records, objections = run_step(case, device, command)
    return Measured(tuple(records), _objected(objections))
