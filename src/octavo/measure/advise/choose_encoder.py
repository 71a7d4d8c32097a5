"""What to quantize in a vision tower and in a diffusion transformer."""

from collections import Counter
from typing import Any

from octavo.measure.advise import cautions
from octavo.measure.advise.advice import MemoryRow, Part
from octavo.measure.advise.choose_decoder import MIN_GAIN, expectation
from octavo.measure.advise.model_shape import ModelShape
from octavo.measure.advise.predict import STEP_RECIPES, Predictor
from octavo.measure.advise.workload import Workload


def choose_tower(predictor: Predictor, model: ModelShape, workload: Workload) -> Part:
    """Attention of a vision tower in FP8, or in BF16 by octavo's fused path."""
    assert model.tower is not None
    case: dict[str, Any] = {"size": workload.image_size, "num_images": workload.num_images}
    names = ["bf16", "fused-bf16"]
    ops = (("quantize_qkv", "BF16 to FP8"), ("attention", "FP8"))
    own = {predictor.speeds.selected(op, kind, model.tower.head_dim) for op, kind in ops}
    if predictor.gpu.has_fp8 and not own & {"reference", "none"}:
        names += ["dynamic", "static"]
    found = {name: predictor.tower(model, name, **case) for name in names}
    times = {name: one.ms for name, one in found.items()}
    best = min(times.values())
    is_fp8 = min(times["bf16"], times["fused-bf16"]) > best * (1 + MIN_GAIN)
    chosen = "dynamic" if is_fp8 else "fused-bf16"
    height, width = workload.image_size
    what = f"the vision tower, {workload.num_images} × {width} x {height}"
    share = found["bf16"].cost.parts["attention"] / found["bf16"].cost.total_ms
    reasons = [
        f"Attention is {100 * share:.0f} % of the vision tower's time in BF16; octavo's path "
        "splits, rotates and casts q, k and v in one pass."
    ]
    if is_fp8:
        gain = times["fused-bf16"] / times["dynamic"]
        reasons.append(f"FP8 itself makes the tower {gain:.2f} times as fast as that path in BF16.")
    else:
        reasons.append(
            "FP8 attention would gain less than 1 % over that path in BF16."
            if "dynamic" in times
            else f"octavo has no FP8 attention for {predictor.gpu.name}."
        )
    host_ms = model.tower.depth * predictor.host_ms_per_layer()
    return Part(
        {"vision_attention": "fp8" if is_fp8 else "bf16"},
        (expectation(what, found["bf16"], found[chosen]),),
        (),
        tuple(reasons),
        tuple(cautions.of_tower(is_fp8, times, host_ms)),
    )


def choose_step(predictor: Predictor, model: ModelShape) -> Part:
    """Linear layers and attention of a diffusion transformer."""
    assert model.step is not None
    names = ["bf16"]
    if predictor.gpu.has_fp8:
        names = list(STEP_RECIPES)
    found = {name: predictor.step(model, name) for name in names}
    best = min(one.ms for one in found.values())
    chosen = next(name for name, one in found.items() if one.ms <= best * (1 + MIN_GAIN))
    is_linear, is_fp8 = STEP_RECIPES[chosen]
    fields = {name: "fp8" for name, on in (("linear", is_linear), ("attention", is_fp8)) if on}
    parts = found["bf16"].cost.parts
    total = found["bf16"].cost.total_ms
    reasons = [
        f"Of a step in BF16, linear layers are {100 * parts['linear layers'] / total:.0f} % and "
        f"attention {100 * parts['attention'] / total:.0f} % ({model.step.about})."
    ]
    if is_linear:
        kept = Counter(why.partition(":")[0] for why in model.step.kept.values())
        reasons.append(
            "Linear layers that stay in BF16 without being asked: "
            + ", ".join(kept)
            + " (docs/reference/diffusion.md says why)."
        )
    if not predictor.gpu.has_fp8:
        reasons.append(f"{predictor.gpu.name} has no FP8 (compute capability 8.9 or newer has).")
    after = model.step.fp8_weight_bytes if is_linear else model.step.weight_bytes
    return Part(
        fields,
        (expectation("a step, compiled", found["bf16"], found[chosen]),),
        (MemoryRow("weights of the transformer", model.step.weight_bytes, after),),
        tuple(reasons),
        tuple(cautions.of_step(model, fields)),
    )
