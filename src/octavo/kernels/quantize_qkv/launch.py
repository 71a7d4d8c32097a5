"""What the quantize_qkv kernels are launched with: operands, strides, tables and grid."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from octavo.kernels.quantize_qkv.config import NORM_TILE, QuantizeQkvConfig
from octavo.kernels.quantize_qkv.primitives import HALVES, INTERLEAVED, NONE
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QuantizedQkv, padded_head_dim
from octavo.numerics.rotary import Rotary


def by_part(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {f"{part}_{name}": value for part, value in zip("qkv", values, strict=True)}


def as_dense(x: Tensor) -> Tensor:
    """x as [batch, length, heads, head_dim], its last dimension contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def operands(
    parts: list[Tensor],
    norm: QkNorm | None,
    rotary: Rotary | None,
    per_head: bool,
    config: QuantizeQkvConfig,
) -> dict[str, Any]:
    """What both kernels take: tensors, their strides, norms, rotary tables and tile."""
    q, k, v = parts
    head_dim = q.shape[3]
    strides = [_strides(x) for x in parts]
    align = _alignment([stride for each in strides for stride in each])
    has_batch = any(
        len(x) > 1 and batch != x.shape[1] * token
        for x, (batch, token, _) in zip(parts, strides, strict=True)
    )
    named = {
        f"{part}_{name}_stride": stride // align
        for part, each in zip("qkv", strides, strict=True)
        for name, stride in zip(("batch", "token", "head"), each, strict=True)
    }
    cos, sin = (q, q) if rotary is None else (rotary.cos, rotary.sin)
    tables = [0, 0, 0, 0] if rotary is None else [*cos.stride(), *sin.stride()]
    num_tokens = [len(x) * x.shape[1] for x in parts]
    table_align = _alignment([tables[0], tables[2]])
    turning = NONE
    if rotary is not None:
        turning = INTERLEAVED if rotary.is_interleaved else HALVES
        tables[0], tables[2] = tables[0] // table_align, tables[2] // table_align
    return {
        **named,
        **by_part("ptr", parts),
        **_norms(norm, q),
        "cos_ptr": cos,
        "sin_ptr": sin,
        "num_rows": max(1, len(cos)),
        **dict(zip(("cos_row", "cos_column", "sin_row", "sin_column"), tables, strict=True)),
        "num_q_tokens": num_tokens[0] if q.shape[2] else 0,
        "num_k_tokens": num_tokens[1],
        "NUM_HEADS": max(1, q.shape[2]),
        "NUM_KV_HEADS": k.shape[2],
        "q_length": max(1, q.shape[1]),
        "k_length": max(1, k.shape[1]),
        "ROTARY": turning.value,
        "ROTARY_DIM": 0 if rotary is None else rotary.rotary_dim,
        "HEAD_DIM": head_dim,
        "PADDED": padded_head_dim(head_dim),
        "ALIGN": align,
        "TABLE_ALIGN": table_align,
        "HAS_BATCH": has_batch,
        "HAS_REPEATS": rotary is not None and len(cos) < max(num_tokens),
        "PER_HEAD": per_head,
        "BLOCK_TOKENS": config.block_tokens,
        "BLOCK_WIDTH": config.block_width,
        "num_warps": config.num_warps,
        # Products of rotary embedding are rounded one by one, as everywhere else.
        "enable_fp_fusion": False,
    }


def _norms(norm: QkNorm | None, unused: Tensor) -> dict[str, Any]:
    given = (unused, unused) if norm is None else (norm.q.contiguous(), norm.k.contiguous())
    return {
        "q_norm_ptr": given[0],
        "k_norm_ptr": given[1],
        "eps": 0.0 if norm is None else norm.eps,
        "num_first": 0 if norm is None else norm.num_first,
        "NUM_NORMS": 0 if norm is None else len(norm.q),
        "NORM_TOKENS": NORM_TILE[0],
        "NORM_HEADS": NORM_TILE[1],
    }


def _strides(x: Tensor) -> list[int]:
    """Strides of batch, token and head; those of single ones do not matter and are 0."""
    return [x.stride(i) if x.shape[i] > 1 else 0 for i in range(3)]


def _alignment(strides: list[int]) -> int:
    """The largest power of two up to 8 that divides all strides: values of a wide load."""
    return math.gcd(8, *strides)


def num_programs(
    parts: list[Tensor],
    result: QuantizedQkv,
    has_norm: bool,
    per_head: bool,
    config: QuantizeQkvConfig,
) -> list[int]:
    """Tiles of q, of k and of v; at least one for each scale, which writes it."""

    def blocks(num_heads: int, width: int, block: int) -> int:
        heads = max(1, num_heads)
        return heads * _ceil_div(width, block) if per_head else _ceil_div(heads * width, block)

    found = []
    for x in parts:
        rows = max(1, _ceil_div(len(x) * x.shape[1], config.block_tokens))
        found.append(rows * blocks(x.shape[2], padded_head_dim(x.shape[3]), config.block_width))
    if has_norm:
        tokens, heads = NORM_TILE
        for i, x in enumerate(parts[:2]):
            rows = max(1, _ceil_div(len(x) * x.shape[1], tokens))
            found[i] = rows * _ceil_div(max(1, x.shape[2]), heads)
    if result.value_layout == "transposed":
        v = parts[2]
        rows = max(1, len(v) * _ceil_div(result.v.shape[-1], config.block_keys))
        found[2] = rows * blocks(v.shape[2], v.shape[3], config.block_values)
    return found


def _ceil_div(n: int, block: int) -> int:
    return -(-n // block)
