"""What a paged KV cache means: append to pages; gather pages, then attention."""

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import format_of, is_fp8
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import Quantized, quantize
from octavo.numerics.rotary import Rotary
from octavo.reference.attention import attend_sequence, sequence_slices
from octavo.reference.qkv import rotate
from octavo.reference.softmax import EXACT, Rounding


def append_kv(
    view: PagedView,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    query: Tensor | None = None,
    rotary: Rotary | None = None,
    q_scale: Tensor | None = None,
    saturated: Tensor | None = None,
) -> Tensor | None:
    """Write new keys and values into their slots, quantized as the cache is.

    key, value: [num_tokens, num_kv_heads, head_dim]; slots: [num_tokens], page · page_size +
    offset, and negative for tokens that are not written. Scales per token and head are computed
    here and stored beside the page; others are the cache's own. rotary turns keys, and the `query`
    of every token, which is returned: in its own dtype, or with a q_scale in e4m3.
    saturated: int64 [2], to which the numbers of saturated keys and values are added.
    """
    if rotary is not None:
        key = rotate(key, rotary)
    used = slots >= 0
    page = (slots[used] // view.page_size).long()
    offset = (slots[used] % view.page_size).long()
    for i, (x, pages, scale) in enumerate(
        (
            (key[used], view.key_pages, view.key_scale),
            (value[used], view.value_pages, view.value_scale),
        )
    ):
        if is_fp8(pages.dtype):
            if saturated is not None:
                saturated[i] += _num_saturated(x, pages, scale)
            quantized = _quantize_like(x, pages, scale)
            data = quantized.data
            if scale.dim() == 3:
                scale[page, :, offset] = quantized.scale
        else:
            data = x.to(pages.dtype)
        _bits(pages)[page, :, offset] = _bits(data)
    return None if query is None else _turn_query(query, rotary, q_scale)


def gather_kv(view: PagedView, sequence: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k, v, k_scale, v_scale) of one sequence: [length, num_kv_heads, head_dim] and its scales."""
    length, room = int(view.lengths[sequence]), view.max_pages * view.page_size
    if not 0 <= length <= room:
        raise ConfigError(
            f"expected at most {room} tokens in the {view.max_pages} pages of sequence {sequence}, "
            f"got a length of {length}"
        )
    num_pages = -(-length // view.page_size)
    pages = view.page_table[sequence, :num_pages].long()

    def gather(x: Tensor) -> Tensor:
        return _bits(x)[pages].transpose(1, 2).flatten(0, 1)[:length].view(x.dtype)

    def gather_scale(scale: Tensor) -> Tensor:
        return gather(scale.unsqueeze(-1)).squeeze(-1) if scale.dim() == 3 else scale

    return (
        gather(view.key_pages),
        gather(view.value_pages),
        gather_scale(view.key_scale),
        gather_scale(view.value_scale),
    )


def paged_attention(
    q: Tensor,
    view: PagedView,
    cu_seqlens_q: Tensor,
    spec: AttentionSpec = AttentionSpec(causal=True),
    q_scale: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    rounding: Rounding = EXACT,
    compute: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each sequence over all of its pages.

    q: [num_tokens, num_heads, head_dim], sequence i at cu_seqlens_q[i] … cu_seqlens_q[i + 1]; its
    last query is the last token in the cache. Returns (out, lse) as in `reference.attention`.
    """
    out = torch.zeros(q.shape, dtype=compute, device=q.device)
    lse = torch.zeros(q.shape[:-1], dtype=compute, device=q.device)
    q_scale = q.new_ones((), dtype=torch.float32) if q_scale is None else q_scale
    for sequence, queries in enumerate(sequence_slices("cu_seqlens_q", cu_seqlens_q, len(q))):
        k, v, k_scale, v_scale = gather_kv(view, sequence)
        out[queries], lse[queries] = attend_sequence(
            q[queries],
            k,
            v,
            spec,
            QkvScales(q_scale, k_scale, v_scale),
            sinks=sinks,
            rounding=rounding,
            compute=compute,
        )
    return out, lse


def _turn_query(query: Tensor, rotary: Rotary | None, q_scale: Tensor | None) -> Tensor:
    turned = query if rotary is None else rotate(query, rotary)
    if q_scale is None:
        return turned.to(query.dtype)
    return quantize(turned, PerHead() if q_scale.dim() else PerTensor(), scale=q_scale).data


def _quantize_like(x: Tensor, pages: Tensor, scale: Tensor) -> Quantized:
    fmt = format_of(pages.dtype)
    if scale.dim() == 3:
        return quantize(x, PerToken(), fmt)
    return quantize(x, PerHead() if scale.dim() == 1 else PerTensor(), fmt, scale=scale)


def _num_saturated(x: Tensor, pages: Tensor, scale: Tensor) -> Tensor | int:
    """How many of x lie beyond the range of a static scale; NaN is none of them."""
    if scale.dim() == 3:  # a token's own scale reaches its largest finite value
        return 0
    fmt = format_of(pages.dtype)
    # Less than half a step above the largest number still rounds to it: that is no saturation.
    largest = fmt.max * (1 + 2.0 ** -(fmt.mantissa_bits + 2))
    return (x.float().abs() > scale.view(-1, 1) * largest).sum()


def _bits(x: Tensor) -> Tensor:
    """FP8 as bytes: torch has no indexed writes for it on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
