"""What `quantize_qkv` is asked for: shapes and dtypes that fit together, never data."""

import math

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.quantize_qkv.config import MAX_RING_LENGTH
from octavo.numerics.amax import AmaxHistory, AmaxRing
from octavo.numerics.granularity import Granularity
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.rotary import Rotary
from octavo.numerics.value_layout import ValueLayout, check_value_layout
from octavo.ops.check import (
    HEADS_FIRST,
    check_cu_seqlens,
    check_float,
    check_heads,
    check_one_device,
)

History = tuple[AmaxHistory, AmaxHistory, AmaxHistory]
Rings = tuple[AmaxRing, AmaxRing, AmaxRing]
Three = tuple[Tensor, Tensor, Tensor]


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless these are q, k and v of one call."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x)
        if x.dim() < 3:
            raise ConfigError(f"expected {name} [..., heads, head_dim], got {list(x.shape)}")
    if k.shape != v.shape:
        raise ConfigError(f"expected k and v of one shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"expected q and k of one head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    check_heads(q.shape[-2], k.shape[-2], HEADS_FIRST)


def check_num_tokens(q: Tensor, k: Tensor, num_tokens: Tensor | None) -> None:
    """Raise unless num_tokens, if given, counts packed tokens."""
    if num_tokens is None:
        return
    if q.dim() != 3 or len(q) != len(k):
        raise ConfigError(
            "num_tokens is for packed q, k and v of the same tokens [tokens, heads, head_dim], got "
            f"q {list(q.shape)} and k {list(k.shape)}"
        )
    if num_tokens.dtype != torch.int32 or num_tokens.shape != (1,):
        raise ConfigError(
            f"expected num_tokens as int32 [1], got {num_tokens.dtype} {list(num_tokens.shape)}"
        )


def check_layout(k: Tensor, layout: ValueLayout, cu_seqlens: Tensor | None) -> None:
    """Raise unless values of this shape can lie so."""
    check_value_layout(layout)
    if layout == "rows":
        if cu_seqlens is not None:
            raise ConfigError("cu_seqlens place transposed values: leave them out for rows")
        return
    expected = 4 if cu_seqlens is None else 3
    if k.dim() != expected:
        raise ConfigError(
            "expected values to transpose as [batch, kv_len, heads, head_dim], or packed [tokens, "
            f"heads, head_dim] with cu_seqlens; got {list(k.shape)} "
            f"{'without' if cu_seqlens is None else 'with'} cu_seqlens"
        )
    if cu_seqlens is not None:
        check_cu_seqlens("cu_seqlens", cu_seqlens)


def check_first(first: Three, qkv: Three, is_packed: bool) -> None:
    """Raise unless first is q, k and v of tokens that stand in front of dense qkv."""
    if is_packed:
        raise ConfigError(
            "first stands in front of dense sequences: leave cu_seqlens and num_tokens out"
        )
    for name, x, other in zip("qkv", first, qkv, strict=True):
        if other.dim() != 4:
            raise ConfigError(
                f"expected {name} [batch, length, heads, head_dim] behind first, got "
                f"{list(other.shape)}"
            )
        expected = (other.shape[0], *other.shape[2:])
        if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != expected:
            raise ConfigError(
                f"expected {name} of first as {name} but for its length, {list(other.shape)}, got "
                f"{list(x.shape)}"
            )
        if x.dtype != other.dtype:
            raise ConfigError(
                f"expected {name} of first in {other.dtype} like {name}, got {x.dtype}"
            )
        check_one_device(**{name: other, f"{name} of first": x})
    for name, three in (("first", first), ("q, k and v behind first", qkv)):
        lengths = [x.shape[1] for x in three]
        if not lengths[0] == lengths[1] == lengths[2]:
            raise ConfigError(f"expected {name} of the same tokens, got lengths {lengths}")


def check_rotary(rotary: Rotary, q: Tensor, k: Tensor, num_first: int) -> None:
    """Raise unless the tables fit q and k, each sequence with num_first tokens in front."""
    check_float("cos and sin", rotary.cos)
    check_one_device(q=q, cos=rotary.cos, sin=rotary.sin)
    for x in (q, k):
        rotary.check(math.prod(x.shape[:-2]) + len(x) * num_first, x.shape[-1])


def check_norm(norm: QkNorm, q: Tensor, k: Tensor, first: Three | None, is_packed: bool) -> None:
    """Raise unless the norms fit q and k, and what stands in front of them."""
    if len(norm.q) == 2 and is_packed:
        raise ConfigError(
            "norms of two streams are for dense sequences: leave cu_seqlens and num_tokens out"
        )
    check_float("norm weights", norm.q)
    check_one_device(q=q, norm=norm.q, **{"norm of k": norm.k})
    num_first = 0
    if first is not None:
        num_first = first[0].shape[1]
        if len(norm.q) == 2 and norm.num_first != num_first:
            raise ConfigError(
                f"expected norms whose num_first is the length of first, {num_first}, got "
                f"{norm.num_first}"
            )
    for x in (q, k):
        norm.check(num_first + x.shape[-3], x.shape[-1])


def check_history(history: History) -> Rings:
    """The rings of a history, one for each of q, k and v."""
    if len(history) != 3:
        raise ConfigError(f"expected a history of q, of k and of v, got {len(history)} of them")
    q, k, v = history
    if q is k or k is v or q is v:
        raise ConfigError("expected a history of each of q, k and v, got one of them twice")
    return q.ring, k.ring, v.ring


def check_rings(rings: Rings, granularity: Granularity, tensors: Three) -> None:
    """Raise unless each ring holds amax values of its tensor."""
    for name, ring, x in zip("qkv", rings, tensors, strict=True):
        expected, values = granularity.scale_shape(tuple(x.shape)), ring.values
        if tuple(values.shape[1:]) != expected:
            raise ConfigError(
                f"expected a history of {name} for amax values of shape {list(expected)}, got one "
                f"for {list(values.shape[1:])}"
            )
        if len(values) > MAX_RING_LENGTH:
            raise ConfigError(
                f"expected a history of {name} of at most {MAX_RING_LENGTH} passes, got "
                f"{len(values)}"
            )
        if not values.is_contiguous():
            raise ConfigError(
                f"expected contiguous values in the history of {name}, got strides "
                f"{values.stride()}"
            )
        check_one_device(**{name: x, f"{name}'s history": values})
