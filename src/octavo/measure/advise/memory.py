"""How much memory a KV cache takes, and how many sequences fit: bytes, before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.amounts import parse_bytes as parse_bytes
from octavo.amounts import parse_tokens as parse_tokens
from octavo.errors import ConfigError
from octavo.integrations.transformers.cache_layers import CachedModel, CacheLayer
from octavo.measure.report.tables import Table
from octavo.patterns import match_layers
from octavo.recipe import KvCacheSettings

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
        is_fp8 = settings is not None and layer.name not in skipped
        has_token_scales = is_fp8 and settings is not None and settings.granularity == "token"
        scale_bytes = 2 * layer.num_kv_heads * SCALE_BYTES if has_token_scales else 0
        value_bytes = 1 if is_fp8 else BF16_BYTES
        token_bytes = 2 * layer.num_kv_heads * layer.head_dim * value_bytes + scale_bytes
        num_stored = layer.num_stored(context)
        sequence += num_stored * token_bytes
        token_scales += num_stored * scale_bytes
        if layer.window is None:
            per_token += token_bytes
        else:
            rings += num_stored * token_bytes
        if is_fp8 and settings is not None and settings.granularity != "token":
            is_head = settings.granularity == "head"
            static_scales += 2 * SCALE_BYTES * (layer.num_kv_heads if is_head else 1)
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
    rows = [
        (f"bytes per token ({num_full} layers)", full.per_token, fp8.per_token),
        (f"bytes of the rings of {num_windows} layers with a window", full.rings, fp8.rings),
        (f"bytes of a sequence of {context:,} tokens", full.sequence, fp8.sequence),
        ("of these, scales of tokens and heads", full.token_scales, fp8.token_scales),
        ("static scales (once for the model)", full.static_scales, fp8.static_scales),
    ]
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
