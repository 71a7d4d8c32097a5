"""The pipeline of a vision-language model, stage by stage: vLLM's `bench mm-processor`.

Requests run one after the other. Stages have vLLM's names; transformers has no cache of processed
images, so the stages that serve one (get_mm_hashes, get_cache_missing_items, merge_mm_kwargs) are
0.0, and most processors put image tokens into the prompt themselves, which leaves 0.0 for
apply_prompt_updates too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import torch

from octavo.errors import ConfigError, OctavoError
from octavo.integrations.transformers.calibrate import autosave
from octavo.integrations.transformers.encoder_options import EncoderOptions
from octavo.integrations.transformers.vision_language import (
    VisionLanguage,
    find_tower,
    generate,
)
from octavo.measure.bench.requests import ImagePrompt
from octavo.measure.report.tables import Table
from octavo.numerics.amax import HISTORY_LENGTH

STAGES = (
    *("get_mm_hashes", "get_cache_missing_items", "apply_hf_processor", "merge_mm_kwargs"),
    *("apply_prompt_updates", "preprocessor_total", "encoder_forward", "num_encoder_calls"),
)


@dataclass
class _EncoderClock:
    """Milliseconds and calls of the encoder since the last `take`."""

    device: torch.device
    total_ms: float = 0.0
    num_calls: int = 0
    _start: float = field(default=0.0, repr=False)

    def start(self) -> None:
        self._start = self._now()

    def stop(self) -> None:
        self.total_ms += (self._now() - self._start) * 1e3
        self.num_calls += 1

    def take(self) -> tuple[float, int]:
        taken = self.total_ms, self.num_calls
        self.total_ms, self.num_calls = 0.0, 0
        return taken

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@contextmanager
def _timed_encoder(model: Any) -> Iterator[_EncoderClock]:
    """The clock of a model's vision tower, which runs between two waits for the device."""
    tower, clock = find_tower(model), _EncoderClock(model.device)
    handles = [
        tower.register_forward_pre_hook(lambda *_: clock.start()),
        tower.register_forward_hook(lambda *_: clock.stop()),
    ]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def run_mm_processor(
    language: VisionLanguage,
    requests: Sequence[ImagePrompt],
    options: EncoderOptions,
    *,
    num_warmups: int = 1,
    output_len: int = 1,
    percentiles: Sequence[float] = (99.0,),
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """What vLLM's benchmark writes as JSON, of these requests; scales are saved on the way.

    progress: called after each request, warm-ups included. A request that fails is counted and its
    error kept; if all fail, the first error is raised.
    """
    _check_counts(requests, options, num_warmups, output_len, percentiles)
    options.apply(language.model)
    saver = None
    if options.fp8_scale_save_path is not None:
        saver = autosave(
            language.model,
            options.fp8_scale_save_path,
            margin=options.margin,
            model_name=language.name,
        )
    stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
    latencies: list[float] = []
    errors: list[Exception] = []
    with _timed_encoder(language.model) as clock:
        for number in range(num_warmups + len(requests)):
            is_warm_up = number < num_warmups
            request = requests[number % len(requests) if is_warm_up else number - num_warmups]
            try:
                row, latency = _run_one(language, request, clock, output_len)
            except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
                if isinstance(error, OctavoError):
                    raise  # what was asked for cannot be done, for this request or any other
                clock.take()
                errors += [] if is_warm_up else [error]
            else:
                if not is_warm_up:
                    latencies.append(latency)
                    for stage, value in row.items():
                        stages[stage].append(value)
            progress()
    if not latencies:
        raise errors[0]
    if saver is not None:
        saver.close()
    return _result(language, stages, latencies, errors, percentiles, requests, output_len)


def _check_counts(
    requests: Sequence[ImagePrompt],
    options: EncoderOptions,
    num_warmups: int,
    output_len: int,
    percentiles: Sequence[float],
) -> None:
    if not requests or num_warmups < 0 or output_len < 1:
        raise ConfigError(
            f"expected at least one request, one token and no less than 0 warm-ups, got "
            f"{len(requests)}, {output_len} and {num_warmups}"
        )
    if not percentiles or not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(f"expected percentiles of 0 to 100, got {list(percentiles)}")
    num_passes = num_warmups + len(requests)
    if options.fp8_scale_save_path is not None and num_passes < HISTORY_LENGTH:
        raise ConfigError(
            f"scales are saved after {HISTORY_LENGTH} passes: expected as many prompts and "
            f"warm-ups, got {num_passes}"
        )


def _run_one(
    language: VisionLanguage, request: ImagePrompt, clock: _EncoderClock, output_len: int
) -> tuple[dict[str, float], float]:
    """The stages of one request, and its whole latency in milliseconds."""
    start = time.perf_counter()
    prepared = language.prepare(request.prompt, request.images)
    total_ms = (time.perf_counter() - start) * 1e3
    generate(language.model, prepared.inputs, output_len)
    latency_ms = (clock._now() - start) * 1e3
    encoder_ms, num_calls = clock.take()
    row = dict.fromkeys(STAGES, 0.0) | {
        "apply_hf_processor": prepared.processor_ms,
        "apply_prompt_updates": prepared.update_prompt_ms,
        "preprocessor_total": total_ms,
        "encoder_forward": encoder_ms,
        "num_encoder_calls": float(num_calls),
    }
    return row, latency_ms


def _result(
    language: VisionLanguage,
    stages: dict[str, list[float]],
    latencies: list[float],
    errors: list[Exception],
    percentiles: Sequence[float],
    requests: Sequence[ImagePrompt],
    output_len: int,
) -> dict[str, Any]:
    calls = stages.pop("num_encoder_calls")
    e2el = _statistics(latencies, percentiles)
    return {
        "completed": len(latencies),
        "failed": len(errors),
        "mean_e2el_ms": e2el["mean"],
        "median_e2el_ms": e2el["median"],
        "std_e2el_ms": e2el["std"],
        "percentiles_e2el_ms": [[p, e2el[f"p{p}"]] for p in map(float, percentiles)],
        "mm_processor_stats": {
            stage: _statistics(values, percentiles) for stage, values in stages.items()
        },
        "encoder_summary": {
            "total_encoder_calls": int(sum(calls)),
            "num_requests_with_encoder_calls": sum(number > 0 for number in calls),
        },
        "errors": [f"{type(error).__name__}: {error}" for error in errors],
        "config": {
            "model": language.name,
            "num_prompts": len(requests),
            "input_len": max(len(request.prompt) for request in requests),
            "output_len": output_len,
        },
        "timestamp": datetime.now().isoformat(),
    }


def _statistics(values_ms: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = np.asarray(values_ms)
    statistics = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    statistics |= {f"p{float(p)}": np.percentile(values, p) for p in percentiles}
    return {name: float(value) for name, value in statistics.items()}


def told(result: dict[str, Any]) -> Iterator[str | Table]:
    """vLLM's tables of stages and whole requests, and how often the encoder ran."""
    stages = result["mm_processor_stats"]
    keys = tuple(stages["preprocessor_total"])  # mean, median, std, p99.0
    heads = tuple(key.capitalize() for key in keys)
    rows = tuple((stage, *(values[key] for key in keys)) for stage, values in stages.items())
    caption = f"Multimodal Processor Benchmark Results (ms): {result['config']['model']}"
    yield Table(caption=caption, header=("Stage", *heads), rows=rows)
    e2el = (result["mean_e2el_ms"], result["median_e2el_ms"], result["std_e2el_ms"])
    percentiles = (value for _, value in result["percentiles_e2el_ms"])
    yield Table(caption="End-to-End Latency (ms)", header=heads, rows=((*e2el, *percentiles),))
    summary = result["encoder_summary"]
    yield (
        f"Summary: {summary['total_encoder_calls']} total encoder calls across "
        f"{summary['num_requests_with_encoder_calls']} requests."
    )
