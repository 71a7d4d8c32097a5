"""scaled_dot_product_attention: torch's function of that name, in its layout, computed in FP8."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.attention.config import MAX_HEAD_DIM, MIN_HEAD_DIM
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import Granularity
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.ops.attention import attention
from octavo.ops.check import check_fp8_device
from octavo.ops.quantize_qkv import quantize_qkv

_LABEL = "scaled_dot_product_attention"

# Takes q, k and v [batch, length, heads, head_dim], and value_layout by name.
Quantize = Callable[..., QuantizedQkv]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    scales: QkvScales | None = None,
    granularity: Granularity | None = None,
    impl: str | None = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with Q·Kᵀ and P·V in FP8.

    query: [..., num_heads, q_len, head_dim]; key, value: [..., num_kv_heads, kv_len, head_dim];
    bf16, fp16 or fp32, any strides. The result has query's dtype and torch's shape. Arguments mean
    what they mean in torch: is_causal lines up the first query with the first key, and
    num_kv_heads must equal num_heads unless enable_gqa.
    attn_mask: bool, True where a key may be seen, the same for all queries and heads (padding):
    [..., 1, 1, kv_len]. Other masks, dropout and gradients raise UnsupportedError.

    scales: static ones; left out, they are those of this call, one per tensor or, with
    granularity PerHead(), per head. octavo.ScaledDotProductAttention keeps them from call to call.
    impl: of `ops.attention`, by name; left out, the fastest that can run.
    """
    return attend_heads_first(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        quantize=partial(quantize_qkv, scales=scales, granularity=granularity),
        label=_LABEL,
        impl=impl,
    )


def attend_heads_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    quantize: Quantize,
    label: str,
    impl: str | None,
) -> Tensor:
    """`scaled_dot_product_attention` with q, k and v quantized by `quantize`.

    label: what errors call the caller.
    """
    _check_arguments(label, attn_mask, dropout_p, is_causal, scale)
    _check_shapes(label, query, key, value, enable_gqa)
    check_fp8_device(label, query.device, impl)
    key_mask = None if attn_mask is None else _key_mask(label, attn_mask, query, key)
    out_shape = (*query.shape[:-1], value.shape[-1])
    if 0 in (query.numel(), key.numel(), value.numel()):
        return query.new_zeros(out_shape)  # as torch: a query without keys gives zeros
    head_dim = _head_dim(label, query, value, impl)
    q, k, v = (_tokens_first(x, head_dim) for x in (query, key, value))
    q_len, kv_len = q.shape[1], k.shape[1]
    if is_causal and q_len < kv_len:  # nobody sees the keys after the last query
        k, v, kv_len = k[:, :q_len], v[:, :q_len], q_len
    quantized = quantize(q, k, v, value_layout="transposed" if q.is_cuda else "rows")

    def attend(q8: Tensor, causal: bool) -> Tensor:
        return attention(
            q8,
            quantized.k,
            quantized.v,
            AttentionSpec(causal=causal, softmax_scale=scale or query.shape[-1] ** -0.5),
            quantized.scales,
            key_mask=key_mask,
            out_dtype=query.dtype,
            value_layout=quantized.value_layout,
            impl=impl,
        )

    if is_causal and q_len > kv_len:
        # octavo lines up the last query with the last key. From the last key on, queries see all.
        q8 = quantized.q
        out = torch.cat([attend(q8[:, :kv_len], True), attend(q8[:, kv_len:], False)], dim=1)
    else:
        out = attend(quantized.q, is_causal)
    return out[..., : value.shape[-1]].transpose(1, 2).reshape(out_shape)


def _check_arguments(
    label: str,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> None:
    if dropout_p:
        raise UnsupportedError(
            f"{label}: expected dropout_p=0.0, got {dropout_p}: FP8 attention is for inference; "
            "pass 0.0 when the module is not training"
        )
    if attn_mask is not None and is_causal:
        raise ConfigError(f"{label}: expected attn_mask or is_causal=True, got both")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise UnsupportedError(f"{label}: expected a positive finite scale, got {scale}")


def _check_shapes(label: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() >= 2:
        raise ConfigError(
            f"{label}: expected query, key and value [..., heads, length, head_dim], got {shapes}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ConfigError(
            f"{label}: expected query, key and value in one dtype, got {query.dtype}, "
            f"{key.dtype} and {value.dtype}"
        )
    if query.shape[-1] != key.shape[-1] or query.shape[-1] == 0:
        raise ConfigError(
            f"{label}: expected query and key of one head_dim above 0, got {query.shape[-1]} and "
            f"{key.shape[-1]}"
        )
    if key.shape[:-1] != value.shape[:-1] or query.shape[:-3] != key.shape[:-3]:
        raise ConfigError(
            f"{label}: expected query, key and value of one batch, and key and value of the same "
            f"heads and length, got {shapes}: expand the smaller ones"
        )
    if query.dim() == 2 or query.shape[-3] == key.shape[-3]:
        return
    if not enable_gqa:
        raise ConfigError(
            f"{label}: expected as many KV heads as heads, got {key.shape[-3]} and "
            f"{query.shape[-3]} in query, key and value {shapes}: pass enable_gqa=True for "
            "grouped heads"
        )
    if key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]:
        raise ConfigError(
            f"{label}: expected heads that are a multiple of the KV heads, got {query.shape[-3]} "
            f"and {key.shape[-3]}"
        )


def _key_mask(label: str, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """attn_mask as [batch, kv_len]; only its shape is looked at, which waits for no device."""
    if mask.dtype != torch.bool:
        raise UnsupportedError(
            f"{label}: expected a bool attn_mask, True where a key may be seen, got {mask.dtype}: "
            "FP8 attention adds no bias to its logits; use torch's function for such layers"
        )
    *outer, kv_len = (*query.shape[:-1], key.shape[-2])
    full = mask[(None,) * (len(outer) + 1 - mask.dim())] if mask.dim() <= len(outer) else mask
    is_fitting = full.dim() == len(outer) + 1 and all(
        size == 1 or size == expected
        for size, expected in zip(full.shape, (*outer, kv_len), strict=True)
    )
    if not is_fitting:
        raise ConfigError(
            f"{label}: expected an attn_mask that broadcasts to {[*outer, kv_len]}, got "
            f"{list(mask.shape)}"
        )
    # The last dimensions before kv_len: heads and queries, of two-dimensional operands queries.
    if any(size != 1 for size in full.shape[-3:-1]):
        raise UnsupportedError(
            f"{label}: expected an attn_mask that is the same for all heads and queries, such as "
            f"{[*(1 for _ in outer), kv_len]}, got {list(mask.shape)}: FP8 attention hides keys "
            "(padding) or the future (is_causal=True); use torch's function for such layers"
        )
    batch = outer[:-2]
    keys = full.reshape(*full.shape[:-3], full.shape[-1]).expand(*batch, kv_len)
    return keys.reshape(math.prod(batch), kv_len)


def _head_dim(label: str, query: Tensor, value: Tensor, impl: str | None) -> int:
    """The head_dim that query, key and value are padded to: one for all that kernels have."""
    head_dim = max(query.shape[-1], value.shape[-1], MIN_HEAD_DIM)
    if head_dim > MAX_HEAD_DIM and query.is_cuda and impl is None:
        raise UnsupportedError(
            f"{label}: expected a head_dim of at most {MAX_HEAD_DIM}, got {head_dim}: use torch's "
            "function, or ask for the slow impl='reference'"
        )
    return head_dim


def _tokens_first(x: Tensor, head_dim: int) -> Tensor:
    """x [..., heads, length, width] as [batch, length, heads, head_dim]: a view unless padded."""
    x = x[(None,) * max(0, 4 - x.dim())]
    if x.dim() > 4:
        x = x.flatten(0, -4)
    x = x.transpose(1, 2)
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))
