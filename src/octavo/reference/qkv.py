"""What it means to quantize queries, keys and values."""

import torch
from torch import Tensor

from octavo.numerics.amax import AmaxRing
from octavo.numerics.formats import Fp8Format
from octavo.numerics.granularity import Granularity, PerHead, PerTensor
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QkvScales, QuantizedQkv, align
from octavo.numerics.quantize import quantize
from octavo.numerics.rotary import Rotary
from octavo.numerics.scales import amax_to_scale, finite_amax, without_padding
from octavo.numerics.value_layout import ValueLayout, columns_of_keys, num_columns


def transpose_values(v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """v [batch, kv_len, heads, head_dim], or packed [tokens, …] with cu_seqlens, transposed."""
    num_keys = v.shape[-3]
    columns = columns_of_keys(num_keys, cu_seqlens, v.device)
    num_sequences = None
    if cu_seqlens is not None:
        num_sequences = len(cu_seqlens) - 1
        columns = columns[: int(cu_seqlens[-1])]  # tokens after the last sequence are padding
    shape = (*v.shape[:-3], *v.shape[-2:], num_columns(num_keys, num_sequences))
    result = torch.zeros(shape, dtype=torch.float32, device=v.device).to(v.dtype)
    rows = v[..., : len(columns), :, :]
    _bits(result)[..., columns] = _bits(rows).movedim(-3, -1)
    return result


def restore_values(transposed: Tensor, num_keys: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rows of transposed values: num_keys of each sequence, or of all packed ones."""
    columns = columns_of_keys(num_keys, cu_seqlens, transposed.device)
    columns = columns.clamp(max=transposed.shape[-1] - 1)  # of padding after the last sequence
    rows = _bits(transposed)[..., columns].movedim(-1, -3)
    return rows.contiguous().view(transposed.dtype)


def _bits(x: Tensor) -> Tensor:
    """FP8 as bytes: torch has no indexed writes for it on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def normalize(x: Tensor, weight: Tensor, eps: float, num_first: int) -> Tensor:
    """x [..., length, heads, head_dim] normalized in float32; weight: [streams, head_dim]."""
    values = x.float()
    root = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    is_second = torch.arange(x.shape[-3], device=x.device) >= num_first
    row = is_second.long() if len(weight) == 2 else torch.zeros_like(is_second, dtype=torch.long)
    return values * root * weight.float()[row][:, None]


Rings = tuple[AmaxRing, AmaxRing, AmaxRing]


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fmt: Fp8Format,
    *,
    scales: QkvScales | None = None,
    rings: Rings | None = None,
    granularity: Granularity = PerTensor(),
    norm: QkNorm | None = None,
    rotary: Rotary | None = None,
    value_layout: ValueLayout = "rows",
    cu_seqlens: Tensor | None = None,
    num_tokens: Tensor | None = None,
    first: tuple[Tensor, Tensor, Tensor] | None = None,
) -> QuantizedQkv:
    """q, k and v [..., heads, head_dim] in FP8 with static scales or dynamic ones.

    rings: the amax histories of q, k and v; this call is pushed into them, then their maximum gives
    the scales. Without rings the scales are those of this call alone. norm, rotary: q and k are
    normalized, then turned, in float32, and quantized from there. value_layout, cu_seqlens: where
    each value goes.
    num_tokens: int32 [1], of packed tokens; what lies behind is in no dynamic scale.
    first: q, k and v of tokens in front of these, in each sequence of a dense batch.
    """
    if first is not None:
        q, k, v = (torch.cat(both, dim=1) for both in zip(first, (q, k, v), strict=True))
    if norm is not None:
        q = normalize(q, norm.q, norm.eps, norm.num_first)
        k = normalize(k, norm.k, norm.eps, norm.num_first)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    if scales is None:
        counted = [q, k, v]
        if num_tokens is not None:
            counted = [without_padding(x, num_tokens) for x in counted]
        scales = QkvScales(
            *(
                _dynamic_scale(x, fmt, granularity, None if rings is None else rings[i])
                for i, x in enumerate(counted)
            )
        )

    def cast(x: Tensor, scale: Tensor) -> Tensor:
        return quantize(x, PerHead() if scale.dim() else PerTensor(), fmt, scale=scale).data

    v8 = cast(v, scales.v)
    v8 = align(v8) if value_layout == "rows" else transpose_values(v8, cu_seqlens)
    return QuantizedQkv(
        align(cast(q, scales.q)), align(cast(k, scales.k)), v8, scales, value_layout
    )


def _dynamic_scale(
    x: Tensor, fmt: Fp8Format, granularity: Granularity, ring: AmaxRing | None
) -> Tensor:
    if ring is None:
        return amax_to_scale(finite_amax(x, granularity), fmt)
    ring.observe(x, granularity)
    return amax_to_scale(ring.amax(), fmt)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x [..., heads, head_dim] turned by the tables, in float32."""
    tokens = x.float().reshape(-1, *x.shape[-2:])
    repeats = len(tokens) // max(1, len(rotary.cos))
    cos, sin = (t.float().repeat(repeats, 1).unsqueeze(1) for t in (rotary.cos, rotary.sin))
    turned, rest = tokens[..., : rotary.rotary_dim], tokens[..., rotary.rotary_dim :]
    if rotary.is_interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    if rotary.is_interleaved:
        turned = torch.stack(pair, dim=-1).flatten(-2)
    else:
        turned = torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1).view(x.shape)


def rotate_qk(q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """q and k [..., heads, head_dim] turned in float32, then rounded once to their dtypes."""
    return rotate(q, rotary).to(q.dtype), rotate(k, rotary).to(k.dtype)
