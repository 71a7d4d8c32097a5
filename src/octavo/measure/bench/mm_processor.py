"""The pipeline of a vision-language model, stage by stage: vLLM's `bench mm-processor`.

Requests run one after the other. Stages have vLLM's names; transformers has no cache of processed
images, so the stages that serve one are 0, and most processors put image tokens into the prompt
themselves, which leaves 0 for apply_prompt_updates too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import torch

from octavo.errors import ConfigError, OctavoError
from octavo.integrations.transformers.calibrate import autosave
from octavo.integrations.transformers.encoder_options import EncoderOptions
from octavo.integrations.transformers.vision_language import VisionLanguage, find_tower, generate
from octavo.measure.bench.expect import expect, expect_percentiles
from octavo.measure.bench.requests import ImagePrompt, spread
from octavo.measure.report.tables import Table
from octavo.numerics.amax import HISTORY_LENGTH

STAGES = (
    "get_mm_hashes",
    "get_cache_missing_items",
    "apply_hf_processor",
    "merge_mm_kwargs",
    "apply_prompt_updates",
    "preprocessor_total",
    "encoder_forward",
    "num_encoder_calls",
)
LATENCY = "latency"  # of the whole request, beside its stages


def _now_ms(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


@contextmanager
def _timed_encoder(model: Any) -> Iterator[list[float]]:
    """Milliseconds of each call of a model's vision tower, between two waits for the device."""
    tower, starts, calls = find_tower(model), [0.0], list[float]()

    def start(*_: Any) -> None:
        starts[0] = _now_ms(model.device)

    def stop(*_: Any) -> None:
        calls.append(_now_ms(model.device) - starts[0])

    handles = [tower.register_forward_pre_hook(start), tower.register_forward_hook(stop)]
    try:
        yield calls
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
    counts = (len(requests), output_len, num_warmups)
    is_right = min(counts[:2]) >= 1 and num_warmups >= 0
    expect(is_right, "at least one request, one token and no less than 0 warm-ups", counts)
    expect_percentiles(percentiles)
    num_passes, save_path = num_warmups + len(requests), options.fp8_scale_save_path
    if save_path is not None and num_passes < HISTORY_LENGTH:
        raise ConfigError(
            f"scales are saved after {HISTORY_LENGTH} passes: expected as many prompts and "
            f"warm-ups, got {num_passes}"
        )
    options.apply(language.model)
    saver = None
    if save_path is not None:
        saver = autosave(language.model, save_path, margin=options.margin, model_name=language.name)
    rows: list[dict[str, float]] = []
    errors: list[Exception] = []
    warm_ups = [requests[number % len(requests)] for number in range(num_warmups)]
    with _timed_encoder(language.model) as calls:
        for number, request in enumerate([*warm_ups, *requests], -num_warmups):
            calls.clear()
            try:
                row = _run_one(language, request, calls, output_len)
                rows += [row] if number >= 0 else []
            except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
                if isinstance(error, OctavoError):
                    raise  # what was asked for cannot be done, for this request or any other
                errors += [error] if number >= 0 else []
            progress()
    if not rows:
        raise errors[0]
    if saver is not None:
        saver.close()
    return {
        "completed": len(rows),
        "failed": len(errors),
        **_statistics(rows, [float(p) for p in percentiles]),
        "errors": [f"{type(error).__name__}: {error}" for error in errors],
        "config": {
            "model": language.name,
            "num_prompts": len(requests),
            "input_len": max(len(request.prompt) for request in requests),
            "output_len": output_len,
        },
        "timestamp": datetime.now().isoformat(),
    }


def _run_one(
    language: VisionLanguage, request: ImagePrompt, encoder_ms: list[float], output_len: int
) -> dict[str, float]:
    """The stages of one request and its whole latency, in milliseconds."""
    start = time.perf_counter() * 1e3
    prepared = language.prepare(request.prompt, request.images)
    total_ms = time.perf_counter() * 1e3 - start
    generate(language.model, prepared.inputs, output_len)
    return dict.fromkeys(STAGES, 0.0) | {
        "apply_hf_processor": prepared.processor_ms,
        "apply_prompt_updates": prepared.update_prompt_ms,
        "preprocessor_total": total_ms,
        "encoder_forward": sum(encoder_ms),
        "num_encoder_calls": float(len(encoder_ms)),
        LATENCY: _now_ms(language.model.device) - start,
    }


def _statistics(rows: Sequence[dict[str, float]], percentiles: Sequence[float]) -> dict[str, Any]:
    """vLLM's fields of the requests that came through."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    calls = columns.pop("num_encoder_calls")
    named = {f"p{p}": p for p in percentiles}
    stages = {name: spread(values, named) for name, values in columns.items()}
    e2el = stages.pop(LATENCY)
    return {
        **{f"{kind}_e2el_ms": e2el[kind] for kind in ("mean", "median", "std")},
        "percentiles_e2el_ms": [[p, e2el[name]] for name, p in named.items()],
        "mm_processor_stats": stages,
        "encoder_summary": {
            "total_encoder_calls": int(sum(calls)),
            "num_requests_with_encoder_calls": sum(number > 0 for number in calls),
        },
    }


def told(result: dict[str, Any]) -> Iterator[str | Table]:
    """vLLM's tables of stages and whole requests, and how often the encoder ran."""
    stages = result["mm_processor_stats"]
    heads = tuple(key.capitalize() for key in stages["preprocessor_total"])  # Mean, …, P99.0
    rows = tuple((stage, *values.values()) for stage, values in stages.items())
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
