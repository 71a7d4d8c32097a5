"""What attention means, in plain torch on any device and never with a q_len × kv_len matrix.

`Rounding` puts FP8 rounding where the kernels round, so that a kernel can be held against a model
of itself; without it the result is softmax attention in the `compute` dtype.

q is [batch, q_len, num_heads, head_dim], k and v are [batch, kv_len, num_kv_heads, head_dim]; or
packed, [tokens, heads, head_dim] with a `Packing`. Query head h reads KV head
h // (num_heads / num_kv_heads). sinks: [num_heads], one more logit in each denominator.

The result is (out, lse): out has q's shape and the `compute` dtype; lse, the log of the softmax
denominator, has q's shape without the last dimension. A query that sees no key gives zeros.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.qkv import QkvScales
from octavo.reference.softmax import EXACT, OnlineSoftmax, Rounding

# Keys that the kernels take at a time: P is rounded relative to the largest logit so far.
KEY_TILE = 128


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = AttentionSpec(),
    scales: QkvScales | None = None,
    *,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
    rounding: Rounding = EXACT,
    compute: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of a dense batch; key_mask: [batch, kv_len] bool, True where a key may be seen."""
    out = torch.zeros(q.shape, dtype=compute, device=q.device)
    lse = torch.zeros(q.shape[:-1], dtype=compute, device=q.device)
    scales = scales or QkvScales.ones(q.device)
    for i in range(q.shape[0]):
        out[i], lse[i] = attend_sequence(
            q[i],
            k[i],
            v[i],
            spec,
            QkvScales(scales.q, _of_tokens(scales.k, i, k), _of_tokens(scales.v, i, v)),
            sinks=sinks,
            key_mask=None if key_mask is None else key_mask[i],
            rounding=rounding,
            compute=compute,
        )
    return out, lse


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    spec: AttentionSpec = AttentionSpec(),
    scales: QkvScales | None = None,
    *,
    sinks: Tensor | None = None,
    rounding: Rounding = EXACT,
    compute: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences."""
    out = torch.zeros(q.shape, dtype=compute, device=q.device)
    lse = torch.zeros(q.shape[:-1], dtype=compute, device=q.device)
    scales = scales or QkvScales.ones(q.device)
    of_queries = sequence_slices("cu_seqlens_q", packing.cu_seqlens_q, len(q))
    of_keys = sequence_slices("cu_seqlens_k", packing.cu_seqlens_k, len(k))
    for queries, keys in zip(of_queries, of_keys, strict=True):
        out[queries], lse[queries] = attend_sequence(
            q[queries],
            k[keys],
            v[keys],
            spec,
            QkvScales(scales.q, _of_tokens(scales.k, keys, k), _of_tokens(scales.v, keys, v)),
            sinks=sinks,
            rounding=rounding,
            compute=compute,
        )
    return out, lse


@dataclass(frozen=True)
class _Sequence:
    """Keys and values of one sequence, heads first, and which of them a query sees."""

    k: Tensor  # [num_kv_heads, kv_len, head_dim]
    v: Tensor  # [num_kv_heads, kv_len, head_dim]
    k_scale: Tensor  # broadcasts to [num_kv_heads, 1, kv_len]
    key_mask: Tensor | None  # [kv_len] bool
    first_position: int  # of query 0 on the axis of keys
    spec: AttentionSpec

    def tiles(self, queries: range) -> list[slice]:
        """The tiles of keys that these queries can see."""
        first, last = 0, self.k.shape[1]
        if self.spec.causal:
            last = min(last, self.first_position + queries.stop)
        if self.spec.window is not None:
            first = max(first, self.first_position + queries.start - self.spec.window + 1)
            last = min(last, self.first_position + queries.stop - 1 + self.spec.window)
        starts = range(first // KEY_TILE * KEY_TILE, last, KEY_TILE)
        return [slice(start, min(start + KEY_TILE, self.k.shape[1])) for start in starts]

    def is_visible(self, queries: range, tile: slice) -> Tensor:
        """[queries, keys] bool."""
        device = self.k.device
        query = torch.arange(queries.start, queries.stop, device=device) + self.first_position
        distance = query[:, None] - torch.arange(tile.start, tile.stop, device=device)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.spec.causal:
            visible &= distance >= 0
        if self.spec.window is not None:
            visible &= distance.abs() < self.spec.window
        if self.key_mask is not None:
            visible &= self.key_mask[tile]
        return visible

    def logits(self, rows: Tensor, factor: Tensor, tile: slice, rounding: Rounding) -> Tensor:
        """[num_kv_heads, rows, keys] for rows [num_kv_heads, rows, head_dim], not masked yet."""
        keys = self.k[:, tile]
        if rounding.accumulator is None:
            products = rows.to(factor.dtype) @ keys.to(factor.dtype).transpose(-1, -2)
        else:
            products = rounding.accumulator.matmul(rows, keys).to(factor.dtype)
        logits = products * factor.unsqueeze(-1) * _of_keys(self.k_scale, tile)
        if self.spec.softcap is not None:
            logits = self.spec.softcap * torch.tanh(logits / self.spec.softcap)
        return logits


def attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    scales: QkvScales,
    *,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
    rounding: Rounding = EXACT,
    compute: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: q [q_len, num_heads, head_dim], k and v [kv_len, …]."""
    q_len, num_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    v_scale, v_weight = _split_value_scale(_heads_first(scales.v, compute))
    sequence = _Sequence(
        k=k.transpose(0, 1),
        v=v.transpose(0, 1),
        k_scale=_heads_first(scales.k, compute),
        key_mask=key_mask,
        first_position=kv_len - q_len,
        spec=spec,
    )
    factor = scales.q.to(compute).expand(num_heads) * spec.scale_for(head_dim)
    sink = torch.full_like(factor, -torch.inf) if sinks is None else sinks.to(compute)

    out = torch.zeros(q.shape, dtype=compute, device=q.device)
    lse = torch.zeros(q.shape[:-1], dtype=compute, device=q.device)
    # The accumulator model spells out every product, so it takes few rows at a time.
    chunk = 512 if rounding.accumulator is None else 16
    for start in range(0, q_len, chunk):
        queries = range(start, min(start + chunk, q_len))
        rows = _to_rows(q[start : queries.stop], num_kv_heads)
        row_factor = _to_rows(factor.expand(len(queries), -1), num_kv_heads)
        row_sink = _to_rows(sink.expand(len(queries), -1), num_kv_heads)
        shape = (num_kv_heads, rows.shape[1], head_dim)
        softmax = OnlineSoftmax(shape, spec, rounding, dtype=compute, device=q.device)
        for tile in sequence.tiles(queries):
            logits = sequence.logits(rows, row_factor, tile, rounding)
            hidden = ~sequence.is_visible(queries, tile).repeat(num_heads // num_kv_heads, 1)
            logits = logits.masked_fill(hidden, -torch.inf)
            weight = None if v_weight is None else v_weight[..., tile]
            softmax.add_tile(logits, sequence.v[:, tile], weight)
        row_out, row_lse = softmax.finish(row_sink)
        out[start : queries.stop] = _from_rows(row_out * v_scale, len(queries))
        lse[start : queries.stop] = _from_rows(row_lse, len(queries))
    return out, lse


def _to_rows(x: Tensor, num_kv_heads: int) -> Tensor:
    """[queries, num_heads, …] → [num_kv_heads, group × queries, …]."""
    num_queries, num_heads, *rest = x.shape
    grouped = x.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, *rest)
    return grouped.movedim(0, 2).flatten(1, 2)


def _from_rows(x: Tensor, num_queries: int) -> Tensor:
    """[num_kv_heads, group × queries, …] → [queries, num_heads, …]."""
    num_kv_heads, num_rows, *rest = x.shape
    grouped = x.reshape(num_kv_heads, num_rows // num_queries, num_queries, *rest)
    return grouped.movedim(2, 0).flatten(1, 2)


def _heads_first(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale of one sequence, [], [heads] or [tokens, heads], as [] or [heads, 1, tokens or 1]."""
    scale = scale.to(dtype)
    if scale.dim() == 0:
        return scale
    return (scale.t() if scale.dim() == 2 else scale.unsqueeze(-1)).unsqueeze(1)


def _split_value_scale(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """(factor of the result, factors of single keys ≤ 1 that P takes on before it is rounded)."""
    if scale.dim() == 0 or scale.shape[-1] == 1:
        return scale, None
    if scale.shape[-1] == 0:
        return scale.new_ones(()), None
    largest = scale.amax(dim=-1, keepdim=True)
    return largest, scale / largest


def _of_keys(factor: Tensor, tile: slice) -> Tensor:
    """The part of a [heads, 1, keys] factor that belongs to a tile; others as they are."""
    return factor if factor.dim() == 0 or factor.shape[-1] == 1 else factor[..., tile]


def _of_tokens(scale: Tensor, tokens: int | slice, x: Tensor) -> Tensor:
    """The part of a scale of x that belongs to some tokens; scales without tokens as they are."""
    return scale[tokens] if scale.dim() == x.dim() - 1 else scale


def sequence_slices(name: str, cu_seqlens: Tensor, num_tokens: int) -> list[slice]:
    """Where each sequence lies; tokens after the last one are padding."""
    ends = cu_seqlens.tolist()
    if ends != sorted(ends) or ends[0] != 0 or ends[-1] > num_tokens:
        raise ConfigError(f"expected {name} to rise from 0 to at most {num_tokens}, got {ends}")
    return [slice(start, stop) for start, stop in pairwise(ends)]
