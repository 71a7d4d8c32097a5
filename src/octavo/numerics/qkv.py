"""The scales of queries, keys and values, and the three tensors quantized with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from octavo.numerics.value_layout import ValueLayout

# Heads of quantized tensors start at multiples of this many values: loads of 16 bytes.
HEAD_ALIGNMENT = 16


@dataclass(frozen=True)
class QkvScales:
    """The float32 scales of q, k and v in one attention call.

    q: [] or [num_heads]; k and v: [] or [num_kv_heads], or one for each token and head: the shape
    of k and v without the last dimension.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def ones(device: torch.device | str | None = None) -> "QkvScales":
        """The scales of tensors that are not quantized."""
        one = torch.ones((), dtype=torch.float32, device=device)
        return QkvScales(one, one, one)


@dataclass(frozen=True)
class QuantizedQkv:
    """q, k and v in FP8 with the scales that give them their size.

    v lies as value_layout says. Heads lie `padded_head_dim` apart, except in transposed values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scales: QkvScales
    value_layout: ValueLayout = "rows"


def padded_head_dim(head_dim: int) -> int:
    """head_dim rounded up to where the next head starts."""
    return -(-head_dim // HEAD_ALIGNMENT) * HEAD_ALIGNMENT


def empty_aligned(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """An empty tensor [..., heads, head_dim] on the device of `like`, its heads aligned.

    Where head_dim is no multiple of HEAD_ALIGNMENT, values that mean nothing lie between the heads.
    """
    *outer, head_dim = shape
    return like.new_empty((*outer, padded_head_dim(head_dim)), dtype=dtype)[..., :head_dim]


def align(x: Tensor) -> Tensor:
    """x with its heads aligned: itself, or a copy."""
    is_aligned = x.stride() == _aligned_stride(tuple(x.shape))
    return x if is_aligned else empty_aligned(x.shape, x.dtype, x).copy_(x)


@lru_cache(maxsize=1024)
def _aligned_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of `empty_aligned`."""
    like = torch.empty(0, device="meta")
    return empty_aligned(shape, like.dtype, like).stride()
