"""Warnings that go with advice: what may go wrong with this model, and what to do about it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.measure.advise.cost import DecoderPlan
from octavo.measure.advise.predict import Predictor
from octavo.measure.advise.shape import ModelShape, Workload

# A prompt's attention at this head_dim and above has no kernel with a producer warp of its own.
LARGE_HEAD_DIM = 256
# A window up to this size reads too little for FP8 to matter.
SMALL_WINDOW = 4096
MIN_RECOVERY_PERCENT = 95.0
MAX_CONTEXT = 2**20
# Share of a transformer's weights from which on those of modulation are worth a word.
MIN_MODULATION = 0.05


def of_decoder(
    predictor: Predictor,
    model: ModelShape,
    workload: Workload,
    plans: Sequence[DecoderPlan],
    chosen: DecoderPlan,
) -> Iterator[str]:
    """Those of a language model; plans: all that can run on this GPU, BF16 first."""
    assert model.decoder is not None
    first = plans[0]
    work = model.decoder
    if work.max_length is not None and workload.context + workload.output_len > work.max_length:
        yield (
            f"The model was made for {work.max_length:,} tokens, fewer than "
            f"{workload.context + workload.output_len:,}."
        )
    has_cache = any(plan.is_kv_fp8 for plan in plans)
    if has_cache:
        yield from _break_even(predictor, model, workload, first)
    if work.experts is not None:
        yield "Experts are counted as bytes and flops alone: no model with experts has a record."
    if chosen.is_linear_fp8 and not predictor.has_record(chosen):
        yield (
            "No record of a whole model has FP8 linear layers like these: what they gain is what "
            "kernels gain alone. --measure says more."
        )
    if not chosen.is_kv_fp8:
        return
    if work.head_dim >= LARGE_HEAD_DIM:
        before, after = (
            predictor.prefill(model, plan, workload.context).ms
            for plan in (first, DecoderPlan(is_kv_fp8=True))
        )
        yield (
            f"head_dim {work.head_dim}: prompts are attended to by a plain kernel in FP8, expected "
            f"to take {after / before:.2f} of BF16's time. Measure prompts before you serve long "
            "ones (octavo bench latency)."
        )
    small = [window for window in work.windows if window <= SMALL_WINDOW]
    if small and not chosen.skips_windows:
        yield f"Windows of {small[0]} tokens gain nothing from FP8: skip sliding_window."
    if not work.has_qk_norm:
        yield (
            "The model does not normalise queries and keys (no QK norm): some keys may be far "
            "beyond 448, where scales of 1.0 cut them off. octavo doctor MODEL --kv finds them."
        )
    yield (
        "Scales of the cache are the checkpoint's, and 1.0 where it has none: uncalibrated. "
        "octavo calibrate MODEL --kv --data TEXT finds them."
    )


def _break_even(
    predictor: Predictor, model: ModelShape, workload: Workload, first: DecoderPlan
) -> Iterator[str]:
    """Whether an FP8 cache pays at this context, and from which one on it does."""
    batch = workload.concurrency
    if _cache_gain(predictor, model, first, workload.context, batch) >= 1.01:
        return
    context = next(
        (
            length
            for power in range(8, MAX_CONTEXT.bit_length())
            if _cache_gain(predictor, model, first, length := 2**power, batch) >= 1.01
        ),
        None,
    )
    if context is None:
        yield "No context is long enough for an FP8 cache to save 1 % of a token's time."
    elif context > workload.context:
        yield (
            f"The context is below break-even: an FP8 cache saves 1 % of a token's time from "
            f"about {context:,} tokens on at {batch} at once. What it saves here is memory."
        )


def _cache_gain(
    predictor: Predictor, model: ModelShape, first: DecoderPlan, context: int, batch: int
) -> float:
    assert model.decoder is not None
    plans = (first, DecoderPlan(is_kv_fp8=True, skips_windows=bool(model.decoder.windows)))
    before, after = (predictor.decode(model, p, context=context, batch=batch).ms for p in plans)
    return before / after


def of_tower(is_fp8: bool, times: Mapping[str, float], host_ms: float) -> Iterator[str]:
    """Those of a vision tower; times: by recipe; host_ms: what launching all of it takes."""
    if not is_fp8:
        return
    gain = times["dynamic"] / times["static"]
    yield (
        "Dynamic scales follow the images; static ones need no pass over them, run in CUDA graphs "
        f"and are expected to be {gain:.2f} times as fast. octavo calibrate MODEL --data IMAGES "
        "finds them."
    )
    if times["dynamic"] < host_ms:
        yield (
            f"So few patches are bound by launches on the host (about {host_ms:.0f} ms) unless "
            "they run in CUDA graphs: without them FP8 may be slower than BF16."
        )


def of_step(model: ModelShape, fields: Mapping[str, Any]) -> Iterator[str]:
    """Those of a diffusion transformer."""
    assert model.step is not None
    if not fields:
        return
    yield "Times are those of compiled blocks: without torch.compile, quantizing inputs costs more."
    if "linear" in fields:
        yield (
            "Scales are dynamic here. Static ones need no amax of each token, and in compiled "
            "blocks cost next to nothing: octavo calibrate --pipeline."
        )
    yield from _modulation(model, fields)
    optional = [why for why in model.step.kept.values() if "vllm-omni" in why]
    if optional:
        why = optional[0][0].upper() + optional[0][1:]
        yield f'{why}; included_layers = ["img_mlp"] quantizes it as well.'
    yield "See what FP8 does to pictures before you serve it: octavo eval images."


def _modulation(model: ModelShape, fields: Mapping[str, Any]) -> Iterator[str]:
    """Layers that see one token hold weights that FP8 alone would halve."""
    assert model.step is not None
    kept = model.step.kept
    found = [one for one in model.step.linear if kept.get(one.name, "").startswith("modulation")]
    num_bytes = sum(2 * one.num_weights for one in found)
    if "linear" not in fields or num_bytes < MIN_MODULATION * model.step.weight_bytes:
        return
    names = dict.fromkeys(re.sub(r"^.*?\.[0-9]+\.|(\.[0-9]+)+$", "", one.name) for one in found)
    patterns = ", ".join(f'"{name}"' for name in names)
    yield (
        f"Modulation stays in BF16 and takes {num_bytes / 1e9:.1f} GB: weight_only_layers = "
        f"[{patterns}] in the recipe halves that, and leaves its input as it is."
    )


def of_records(predictor: Predictor, model: ModelShape, fields: Mapping[str, Any]) -> Iterator[str]:
    """What stored records say of this model's quality, and how sure the times are."""
    gpu, speeds, name = predictor.gpu, predictor.speeds, model.name
    if model.unknown_tower is not None:
        yield f"The vision tower stays as it is, its cost is not known: {model.unknown_tower}."
    if model.quantized is not None:
        yield (
            f"The checkpoint is quantized already ({model.quantized}): times and bytes here are of "
            "the same model in BF16."
        )
    if not speeds.has_records:
        yield (
            "No records of kernels were found: times are from stated shares of the GPU's "
            "ceilings. --results FOLDER names records, --measure makes some."
        )
    elif speeds.is_borrowed:
        yield (
            f"There are no records of kernels on {gpu.name}: times take the shares of the ceilings "
            f"that they reach on {speeds.source.name}. octavo bench kernels on one makes some."
        )
    if not fields:
        return
    rows = [row for row in predictor.records if row.case.get("model") == name]
    rated = [row for row in rows if "recovery_percent" in row.values]
    low = [row for row in rated if row.values["recovery_percent"] < MIN_RECOVERY_PERCENT]
    if low:
        worst = min(low, key=lambda row: row.values["recovery_percent"])
        yield (
            f"A record of {worst.op} has a recovery of {worst.values['recovery_percent']:.1f} % "
            f"({worst.case.get('recipe', worst.impl)}), under {MIN_RECOVERY_PERCENT:.0f} %: "
            "calibrate, use a finer granularity, or skip layers."
        )
    elif model.step is None and not rated:
        yield (
            "Quality is not measured for this model: octavo eval says the recovery; under "
            f"{MIN_RECOVERY_PERCENT:.0f} %, calibrate or skip layers."
        )
