"""What a model costs on a GPU: milliseconds of a token, a prompt, a tower's images, a DiT's step.

A sum of parts that can each be looked at: every linear layer and every attention is one call of an
op whose speed records say (speeds.py); what is between them reads and writes memory. Nothing is
fitted to whole models here (predict.py does that, with other models' records).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from octavo.measure.advise.speeds import Speeds

if TYPE_CHECKING:
    from octavo.integrations.diffusers.full_size import StepWork
    from octavo.integrations.traced_work import LinearWork
    from octavo.integrations.transformers.cache_layers import CacheLayer
    from octavo.integrations.transformers.model_work import DecoderWork, TowerWork

# Launches of a compiled layer beside its products and attention: norms, rotary, append, activation.
SMALL_LAUNCHES, SMALL_LAUNCH_US = 4, 1.5
# Tokens of one pass over a prompt.
CHUNK = 8192
# (copies of a layer's pages, launches) of a pass over a prompt: octavo's own attention gathers them
# in one kernel; of a peer's, torch indexes keys and values, lays them out and clears what is free.
OWN_IMPLS, OWN_GATHER, PEER_GATHER = ("gluon", "triton"), (1, 1), (3, 6)


@dataclass(frozen=True)
class Cost:
    """Milliseconds by part, and how many times their sum the whole takes.

    based_on: models whose records gave the factor. is_host_bound: the host launches more slowly
    than the GPU would run: then ms is about the host's time, and two of them cannot be compared.
    """

    parts: Mapping[str, float]
    factor: float = 1.0
    based_on: tuple[str, ...] = ()
    is_host_bound: bool = False

    @property
    def total_ms(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())

    @property
    def ms(self) -> float:
        """The time that is expected."""
        return self.total_ms * self.factor

    @property
    def parts_ms(self) -> dict[str, float]:
        """The parts of that time; none of a host's, which is not made of them."""
        return {name: ms * self.factor for name, ms in self.parts.items() if not self.is_host_bound}

    def percent(self, part: str) -> str:
        """A part's share, as a whole number."""
        return f"{100 * self.parts[part] / self.total_ms:.0f} %"


@dataclass(frozen=True)
class DecoderPlan:
    """How a decoder runs; prefill_impl: that of BF16 prompts, None is octavo's own."""

    is_kv_fp8: bool = False
    skips_windows: bool = False
    is_linear_fp8: bool = False
    prefill_impl: str | None = None

    def kv_operands(self, layer: "CacheLayer") -> str:
        """Those of a layer's keys and values."""
        is_skipped = self.skips_windows and layer.window is not None
        return "FP8" if self.is_kv_fp8 and not is_skipped else "BF16"

    def __str__(self) -> str:
        names = ["fp8" if self.is_kv_fp8 else "auto"]
        names += ["linear"] * self.is_linear_fp8 + ["skip=sliding_window"] * self.skips_windows
        return "+".join(names)


@lru_cache(maxsize=64)
def _alike(
    linear: "tuple[LinearWork, ...]", is_fp8: bool
) -> Sequence[tuple[str, int, int, int, int]]:
    """Operands, inputs, outputs and rows of layers, and how many are the same: most are."""
    names = ("BF16", "FP8")
    alike = Counter((names[is_fp8 and x.is_reached], x.inputs, x.outputs, x.rows) for x in linear)
    return [(*one, count) for one, count in alike.items()]


@lru_cache(maxsize=64)
def _joined(linear: "tuple[LinearWork, ...]") -> "tuple[LinearWork, ...]":
    """Layers as the engine multiplies them in FP8: those that share an input are one product."""
    from octavo.integrations.transformers.joint_projections import JOINT

    parts = {part: group for group in JOINT for part in group}
    found: dict[object, LinearWork] = {}
    for one in linear:
        parent, _, name = one.name.rpartition(".")
        # Only layers that are quantized are joined.
        key = (parent, parts[name]) if name in parts and one.is_reached else one.name
        first = found.get(key)
        found[key] = one if first is None else replace(first, outputs=first.outputs + one.outputs)
    return tuple(found.values())


def decode_cost(
    model: "DecoderWork", speeds: Speeds, plan: DecoderPlan, *, context: int, batch: int
) -> Cost:
    """One token of each of `batch` sequences that have `context` tokens."""

    def product_ms(operands: str, inputs: int, outputs: int) -> float:
        if operands == "BF16" and batch == 1:
            return speeds.matvec_ms(inputs, outputs)
        return speeds.product_ms(operands, batch, inputs, outputs)

    linear_ms = product_ms("BF16", model.head.inputs, model.head.outputs)
    linear = _joined(model.linear) if plan.is_linear_fp8 else model.linear
    for operands, inputs, outputs, _, count in _alike(linear, plan.is_linear_fp8):
        linear_ms += count * product_ms(operands, inputs, outputs)
    kv_ms = 0.0
    for layer in model.layers:
        operands = plan.kv_operands(layer)
        length = context if layer.window is None else min(context, layer.window)
        size = 1 if operands == "FP8" else 2
        num_bytes = 2.0 * batch * length * layer.num_kv_heads * layer.head_dim * size
        kv_ms += speeds.decode_ms(operands, num_bytes)
    parts = {"weights": linear_ms, "keys and values": kv_ms}
    if (experts := model.experts) is not None:
        num_bytes = 2.0 * experts.num_weights * experts.num_read(batch)
        parts["experts"] = experts.num_layers * speeds.copy_ms(num_bytes)
    parts["launches"] = len(model.layers) * SMALL_LAUNCHES * SMALL_LAUNCH_US / 1e3
    return Cost(parts)


def prefill_cost(
    model: "DecoderWork", speeds: Speeds, plan: DecoderPlan, *, num_tokens: int
) -> Cost:
    """A prompt of so many tokens, in passes of CHUNK."""
    sizes = {CHUNK: num_tokens // CHUNK, num_tokens % CHUNK: 1}
    parts = dict.fromkeys(("linear layers", "attention", "pages gathered", "the rest"), 0.0)
    width = sum(one.inputs + one.outputs for one in model.linear)
    for size, times in sizes.items():
        if not size or not times:
            continue
        linear_ms = speeds.product_ms("BF16", 1, model.head.inputs, model.head.outputs)
        for operands, inputs, outputs, _, count in _alike(model.linear, plan.is_linear_fp8):
            linear_ms += count * speeds.product_ms(operands, size, inputs, outputs)
        if (experts := model.experts) is not None:
            rows = size * experts.num_per_token
            expert_ms = speeds.product_ms("BF16", rows, experts.num_weights // 1024, 1024)
            linear_ms += experts.num_layers * expert_ms
        parts["linear layers"] += times * linear_ms
        # What a linear layer writes, something else reads, and the other way round.
        parts["the rest"] += times * speeds.copy_ms(2.0 * size * width, len(model.linear))
    # Attention goes pass by pass: each gathers all pages so far, windows or not.
    stops = [*range(CHUNK, num_tokens, CHUNK), num_tokens]
    flops, sinks = 4.0 * model.num_heads * model.head_dim * num_tokens**2 / 2, model.has_sinks
    plain = speeds.attention_impl("BF16", flops, model.head_dim, plan.prefill_impl, has_sinks=sinks)
    # Without any record it is nobody's, and no peer's pages are laid out anew.
    is_own = plan.prefill_impl is None or plain in (*OWN_IMPLS, "none")
    alike = Counter(replace(layer, name="", index=0) for layer in model.layers)
    for layer, count in alike.items():
        operands, head_dim = plan.kv_operands(layer), layer.head_dim
        is_fp8 = operands == "FP8"
        impl, value_bytes = (None, 1) if is_fp8 else (plain, 2)
        copies, launches = OWN_GATHER if is_fp8 or is_own else PEER_GATHER
        for start, stop in pairwise((0, *stops)):
            flops = 4.0 * model.num_heads * head_dim * _num_pairs(start, stop, layer.window)
            parts["attention"] += count * speeds.attention_ms(operands, flops, head_dim, impl)
            num_bytes = 2.0 * stop * layer.num_kv_heads * head_dim * value_bytes
            gather_ms = speeds.copy_ms(2 * copies * num_bytes, launches)
            parts["pages gathered"] += count * gather_ms
        if is_fp8:
            values = num_tokens * head_dim * (model.num_heads + 2 * layer.num_kv_heads)
            parts["the rest"] += count * speeds.quantize_ms(3.0 * values)
    return Cost(parts)


def _num_pairs(start: int, stop: int, window: int | None) -> float:
    """Of queries and keys, when tokens from start to stop attend to all before them."""

    def until(length: int) -> float:
        seen = length if window is None else min(length, window)
        return seen**2 / 2 + float(length - seen) * seen

    return until(stop) - until(start)


def tower_cost(
    model: "TowerWork", speeds: Speeds, recipe: str, *, size: tuple[int, int], num_images: int
) -> Cost:
    """Images through a vision tower; recipe: bf16 (stock), fused-bf16, dynamic or static."""
    patches = model.num_patches(*size)
    total = patches * num_images
    linear_ms = sum(
        speeds.product_ms("BF16", max(1, round(total * share)), one.inputs, one.outputs)
        for one, share in model.linear
    )
    flops = 4.0 * model.num_heads * model.head_dim * num_images * patches**2
    operands = "FP8" if recipe in ("dynamic", "static") else "BF16"
    attention_ms = model.depth * speeds.encoder_ms(operands, flops, model.head_dim, recipe)
    # octavo's one pass over q, k and v splits and rotates them.
    one_pass = 2.0 * 3 * 2 * model.num_heads * model.head_dim
    attention_bytes = model.attention_bytes if recipe == "bf16" else one_pass
    num_bytes = model.other_bytes * total + attention_bytes * total
    rest_ms = model.depth * speeds.copy_ms(num_bytes)
    return Cost({"linear layers": linear_ms, "attention": attention_ms, "the rest": rest_ms})


def step_cost(model: "StepWork", speeds: Speeds, is_linear_fp8: bool, is_fp8: bool) -> Cost:
    """One step of a diffusion transformer, compiled; is_fp8: its attention."""
    linear_ms = rest_ms = attention_ms = 0.0
    for operands, inputs, outputs, rows, count in _alike(model.linear, is_linear_fp8):
        linear_ms += count * speeds.product_ms(operands, rows, inputs, outputs)
        rest_ms += count * speeds.copy_ms(2.0 * rows * (inputs + outputs))
    for call in model.attention:
        if is_fp8:
            attention_ms += speeds.attention_ms("FP8", call.flops, call.head_dim)
            values = call.num_heads * call.head_dim * (call.num_queries + 2 * call.num_keys)
            attention_ms += speeds.quantize_ms(3.0 * values)
        else:
            attention_ms += speeds.attention_ms("BF16", call.flops, call.head_dim, "fastest")
    return Cost({"linear layers": linear_ms, "attention": attention_ms, "the rest": rest_ms})
