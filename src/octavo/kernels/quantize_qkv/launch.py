"""What the quantize_qkv kernels are launched with: operands, strides, tables and grid."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.kernels.quantize_qkv.config import NORM_TILE, QuantizeQkvConfig
from octavo.kernels.quantize_qkv.primitives import HALVES, INTERLEAVED, NONE
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QuantizedQkv, padded_head_dim
from octavo.numerics.rotary import Rotary

Three = tuple[Tensor, Tensor, Tensor]


def by_part(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {f"{part}_{name}": value for part, value in zip("qkv", values, strict=True)}


@dataclass(frozen=True)
class Part:
    """q, k or v as [batch, length, heads, head_dim], the last dimension contiguous.

    first: the tokens that stand in front of x in each sequence, if they lie elsewhere.
    """

    x: Tensor
    first: Tensor | None = None

    @property
    def length(self) -> int:
        """Of a sequence."""
        return self.x.shape[1] + self.num_first

    @property
    def num_first(self) -> int:
        """Tokens of a sequence that lie elsewhere."""
        return 0 if self.first is None else self.first.shape[1]

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return len(self.x) * self.length

    @property
    def num_heads(self) -> int:
        """How many there are."""
        return self.x.shape[2]


def as_parts(qkv: Three, first: Three | None) -> list[Part]:
    """q, k and v; a stream without tokens is none."""
    if first is not None and qkv[0].shape[1] == 0:
        qkv, first = first, None
    if first is None or first[0].shape[1] == 0:
        return [Part(as_dense(x)) for x in qkv]
    return [Part(as_dense(x), as_dense(y)) for x, y in zip(qkv, first, strict=True)]


def as_dense(x: Tensor) -> Tensor:
    """x as [batch, length, heads, head_dim], its last dimension contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def operands(
    parts: list[Part],
    norm: QkNorm | None,
    rotary: Rotary | None,
    per_head: bool,
    config: QuantizeQkvConfig,
) -> dict[str, Any]:
    """What both kernels take: tensors, their strides, norms, rotary tables and tile."""
    q, k = parts[0].x, parts[1]
    head_dim = q.shape[3]
    memory, align, has_batch = _memory(parts)
    cos, sin = (q, q) if rotary is None else (rotary.cos, rotary.sin)
    tables = [0, 0, 0, 0] if rotary is None else [*cos.stride(), *sin.stride()]
    num_tokens = [part.num_tokens for part in parts]
    table_align = _alignment([tables[0], tables[2]])
    turning = NONE
    if rotary is not None:
        turning = INTERLEAVED if rotary.is_interleaved else HALVES
        tables[0], tables[2] = tables[0] // table_align, tables[2] // table_align
    return {
        **memory,
        **_norms(norm, q),
        "num_first": parts[0].num_first or (0 if norm is None else norm.num_first),
        "cos_ptr": cos,
        "sin_ptr": sin,
        "num_rows": max(1, len(cos)),
        **dict(zip(("cos_row", "cos_column", "sin_row", "sin_column"), tables, strict=True)),
        "num_q_tokens": num_tokens[0] if q.shape[2] else 0,
        "num_k_tokens": num_tokens[1],
        "NUM_HEADS": max(1, q.shape[2]),
        "NUM_KV_HEADS": k.num_heads,
        "q_length": max(1, parts[0].length),
        "k_length": max(1, k.length),
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


def _memory(parts: list[Part]) -> tuple[dict[str, Any], int, bool]:
    """Pointers and strides by name, what all strides are multiples of, and whether they need batch.

    What there is none of is None, which is compiled in.
    """
    streams: dict[str, Tensor | None] = {}
    for name, part in zip("qkv", parts, strict=True):
        streams |= {name: part.x, f"{name}_first": part.first}
    strides = {name: _strides(x) for name, x in streams.items() if x is not None}
    align = _alignment([stride for each in strides.values() for stride in each])
    memory: dict[str, Any] = {}
    for name, x in streams.items():
        memory[f"{name}_ptr"] = x
        for i, dimension in enumerate(("batch", "token", "head")):
            stride = None if x is None else strides[name][i] // align
            memory[f"{name}_{dimension}_stride"] = stride
    return memory, align, any(_needs_batch(part) for part in parts)


def _needs_batch(part: Part) -> bool:
    """Whether tokens of all sequences do not lie at one stride."""
    batch, token, _ = _strides(part.x)
    return len(part.x) > 1 and (part.first is not None or batch != part.length * token)


def _norms(norm: QkNorm | None, unused: Tensor) -> dict[str, Any]:
    given = (unused, unused) if norm is None else (norm.q.contiguous(), norm.k.contiguous())
    return {
        "q_norm_ptr": given[0],
        "k_norm_ptr": given[1],
        "eps": 0.0 if norm is None else norm.eps,
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
    parts: list[Part],
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
    for part in parts:
        rows = max(1, _ceil_div(part.num_tokens, config.block_tokens))
        width = padded_head_dim(part.x.shape[3])
        found.append(rows * blocks(part.num_heads, width, config.block_width))
    if has_norm:
        tokens, heads = NORM_TILE
        for i, part in enumerate(parts[:2]):
            rows = max(1, _ceil_div(part.num_tokens, tokens))
            found[i] = rows * _ceil_div(max(1, part.num_heads), heads)
    if result.value_layout == "transposed":
        v = parts[2].x
        rows = max(1, len(v) * _ceil_div(result.v.shape[-1], config.block_keys))
        found[2] = rows * blocks(v.shape[2], v.shape[3], config.block_values)
    return found


def _ceil_div(n: int, block: int) -> int:
    return -(-n // block)
