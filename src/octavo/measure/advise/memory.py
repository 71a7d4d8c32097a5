"""A model's KV cache: how much memory it takes, and whether it tolerates FP8 with scales of 1.0.

Bytes are counted before anything runs; scales of 1.0 are vLLM's default, and a text shows what they
do to keys and values.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.calibration.observers import CalibrationSettings
from octavo.errors import ConfigError
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers.cache_layers import CachedModel, CacheLayer
from octavo.integrations.transformers.calibrate import observe_windows
from octavo.integrations.transformers.text import as_patterns_see
from octavo.integrations.transformers.text_model import TextModel
from octavo.layers.decoder_attention import DecoderAttention
from octavo.measure.report.tables import Table
from octavo.numerics.formats import format_named
from octavo.patterns import match_layers
from octavo.recipe import KvCacheSettings, Recipe

BF16_BYTES, SCALE_BYTES = 2, 4


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of one sequence's cache.

    per_token: what one more token of context takes, in layers that keep all of them, the scales of
    tokens included. rings: of layers with a window, whatever the context. token_scales: the part of
    both that is scales. static_scales: of the model, not of a sequence. sequence: all of a context.
    """

    per_token: int
    rings: int
    token_scales: int
    static_scales: int
    sequence: int


def cache_memory(
    layers: Sequence[CacheLayer],
    context: int,
    settings: KvCacheSettings | None,
    skip_layers: Sequence[str] = (),
) -> CacheMemory:
    """Of a sequence of `context` tokens; settings: None stores BF16 everywhere."""
    if context < 1:
        raise ConfigError(f"expected a context of one token or more, got {context}")
    skipped = {
        found.name for found in match_layers(skip_layers, [one.as_patterns_see for one in layers])
    }
    per_token = rings = token_scales = static_scales = sequence = 0
    for layer in layers:
        per = None if settings is None or layer.name in skipped else settings.granularity
        scale_bytes = 2 * layer.num_kv_heads * SCALE_BYTES if per == "token" else 0
        value_bytes = BF16_BYTES if per is None else 1
        token_bytes = 2 * layer.num_kv_heads * layer.head_dim * value_bytes + scale_bytes
        num_stored = layer.num_stored(context)
        sequence += num_stored * token_bytes
        token_scales += num_stored * scale_bytes
        if layer.window is None:
            per_token += token_bytes
        else:
            rings += num_stored * token_bytes
        if per in ("tensor", "head"):
            static_scales += 2 * SCALE_BYTES * (layer.num_kv_heads if per == "head" else 1)
    return CacheMemory(per_token, rings, token_scales, static_scales, sequence)


def memory_table(
    model: CachedModel,
    context: int,
    settings: KvCacheSettings,
    skip_layers: Sequence[str] = (),
    gpu_bytes: int | None = None,
) -> Table:
    """BF16 beside FP8: bytes per token, of windows, of scales, of a sequence, and how many fit."""
    full = cache_memory(model.layers, context, None)
    fp8 = cache_memory(model.layers, context, settings, skip_layers)
    num_windows = sum(layer.window is not None for layer in model.layers)
    num_full = len(model.layers) - num_windows
    sizes = {
        f"bytes per token ({num_full} layers)": "per_token",
        f"bytes of the rings of {num_windows} layers with a window": "rings",
        f"bytes of a sequence of {context:,} tokens": "sequence",
        "of these, scales of tokens and heads": "token_scales",
        "static scales (once for the model)": "static_scales",
    }
    rows = [(what, getattr(full, size), getattr(fp8, size)) for what, size in sizes.items()]
    if gpu_bytes is not None:
        free = gpu_bytes - model.weight_bytes
        in_bf16, in_fp8 = (max(0, free - m.static_scales) // m.sequence for m in (full, fp8))
        left = f"in {_gib(gpu_bytes)} less {_gib(model.weight_bytes)} of weights"
        rows.append((f"sequences that fit {left}", in_bf16, in_fp8))
    cells = [(name, a, b, f"{b / a:.3f}" if a else None) for name, a, b in rows]
    form = f"{settings.format}, per {settings.granularity}"
    skips = f", but for {', '.join(skip_layers)}" if skip_layers else ""
    return Table(
        caption=f"KV cache of {model.name}",
        header=("what", "BF16", f"FP8 ({form}{skips})", "FP8 / BF16"),
        rows=tuple(cells),
    )


def memory_notes(model: CachedModel, context: int, gpu_bytes: int | None) -> list[str]:
    """What a reader of the table should know besides."""
    notes = [
        "Pages of 64 tokens; a layer with a window has a ring of pages. A cache that grows holds "
        "up to 1/32 more. Weights and cache only: activations and CUDA graphs need room, too.",
        "Decoding keeps queries as they are; q_scale acts where queries are quantized, in prefill.",
    ]
    if model.max_length is not None and context > model.max_length:
        notes.append(f"The model was made for {model.max_length:,} tokens, fewer than these.")
    for name, kind in model.others.items():
        notes.append(f"{name} ({kind}) keeps something else than keys and values: not counted.")
    if gpu_bytes is None:
        notes.append("No GPU is here: --gpu-memory 141GiB says how many sequences fit in one.")
    elif gpu_bytes < model.weight_bytes:
        notes.append(f"The weights alone, {_gib(model.weight_bytes)}, do not fit.")
    return notes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


# e4m3 keeps about 31 dB of normal numbers: below this, many have lost their last bits or are zero.
LOW_SQNR_DB = 25.0


@dataclass(frozen=True)
class LayerCheck:
    """One layer's keys and values at scale 1.0; the largest ones are of the model as it is.

    SQNR is known for e4m3 alone.
    """

    index: int
    name: str
    key_amax: float
    value_amax: float
    keys_saturated: int
    values_saturated: int
    num_nonfinite: int
    key_sqnr_db: float | None = None
    value_sqnr_db: float | None = None

    @property
    def verdict(self) -> str:
        """Whether a value saturates or is none, or values are so small that few bits are left."""
        if self.keys_saturated + self.values_saturated + self.num_nonfinite > 0:
            return "breaks"
        both = (self.key_sqnr_db, self.value_sqnr_db)
        return "coarse" if any(db is not None and db < LOW_SQNR_DB for db in both) else "fine"


@dataclass(frozen=True)
class KvCheck:
    """What a text has shown."""

    model: str
    num_tokens: int
    format: str
    layers: tuple[LayerCheck, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing saturated."""
        return all(layer.verdict != "breaks" for layer in self.layers)


def check_kv(text_model: TextModel, windows: Sequence[Tensor], format: str = "e4m3") -> KvCheck:
    """Run a model over windows of a text: as it is, then with an FP8 cache and scales of 1.0."""
    if not windows:
        raise ConfigError("expected one window or more, got none")
    model, lists = text_model.model, [window.tolist() for window in windows]
    observed = observe_windows(model, lists, CalibrationSettings()).layers
    seen = {name: layer for name, layer in observed.items() if layer is not None}
    apply_(model, Recipe(kv_cache={"format": format, "scaling": "unit"}))
    try:
        with torch.inference_mode():
            for window in windows:
                tokens = window.to(next(model.parameters()).device)[None]
                model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        modules = [m for m in model.modules() if isinstance(m, DecoderAttention)]
        saturated = {module.name: module.saturated.tolist() for module in modules}
    finally:
        restore_(model)
    indices = {layer.name: layer.index or 0 for layer in as_patterns_see(model)}
    layers = []
    for name, observer in seen.items():
        parts = [observer.parts["k"], observer.parts["v"]]
        amaxes = [float(part.amax.max()) for part in parts]
        num_nonfinite = sum(int(part.num_nonfinite) for part in parts)
        sqnr = [part.sqnr_db(torch.ones_like(part.amax)) for part in parts if format == "e4m3"]
        found: Any = (*amaxes, *saturated[name], num_nonfinite, *sqnr)
        layers.append(LayerCheck(indices[name], name, *found))
    num_tokens = sum(len(window) for window in windows)
    return KvCheck(text_model.name, num_tokens, format, tuple(layers))


def check_table(check: KvCheck) -> Table:
    """Every layer, and what is wrong with it."""
    header: tuple[str, ...] = ("layer", "largest key", "largest value", "keys beyond")
    header += ("values beyond", "not finite", "keys (dB)", "values (dB)", "verdict")
    form = f"an FP8 KV cache ({check.format}) with scales of 1.0"
    return Table(
        caption=f"{check.model}: {check.num_tokens} tokens through {form}",
        header=header,
        rows=tuple((*astuple(layer)[1:], layer.verdict) for layer in check.layers),
    )


def kv_advice(check: KvCheck, model: str) -> list[str]:
    """What the table means, and what to do."""
    limit = format_named(check.format).max
    largest = max(max(layer.key_amax, layer.value_amax) for layer in check.layers)
    broken, coarse = (
        " ".join(str(layer.index) for layer in check.layers if layer.verdict == verdict)
        for verdict in ("breaks", "coarse")
    )
    lines = []
    if broken:
        lines.append(
            f"Scales of 1.0 break layers {broken}: what lies beyond {limit:g} is cut off. "
            f"Calibrate (octavo calibrate {model} --kv --data TEXT), or give every token its own "
            'scale (granularity "token"), or leave these layers as they are '
            f"(--kv-cache-dtype-skip-layers {broken})."
        )
    if any(layer.num_nonfinite for layer in check.layers):
        lines.append("Values that are not finite come from the model itself: no scale mends them.")
    if coarse:
        lines.append(
            f"Layers {coarse} have values so small that scales of 1.0 leave them few "
            f"bits (below {LOW_SQNR_DB:g} dB): calibrate them."
        )
    if not broken:
        lines.append(
            f"Nothing saturates on these {check.num_tokens} tokens: the largest value is "
            f"{largest:.4g}, {limit / largest if largest else float('inf'):.3g} times below the "
            "limit. Another text may have larger ones."
        )
    lines.append("Decoding keeps queries as they are; prefill quantizes them (q_scale).")
    return lines
