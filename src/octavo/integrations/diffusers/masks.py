"""Attention masks of diffusers as octavo's attention takes them: keys that all queries see."""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.internals import internals

with internals("torch"):
    from torch import _assert_async

NOT_REDUCIBLE = (
    "expected a mask that hides the same keys from all queries and heads (padding), got another "
    "pattern; leave such layers to diffusers: skip_layers"
)


class ReducedMask(NamedTuple):
    """A mask that is the product of two: the keys that are seen, and the queries that see them.

    keys: bool [batch, kv_len]. queries: bool [batch, q_len], or None where all of them count; a
    query that sees nothing has the result 0, as in torch.
    """

    keys: Tensor
    queries: Tensor | None


def reduce_mask(mask: Tensor, batch_size: int, q_len: int, kv_len: int) -> ReducedMask:
    """What a bool mask of diffusers means; UnsupportedError if it is not padding.

    mask: [batch, kv_len] as in diffusers, or what broadcasts to [batch, heads, q_len, kv_len]. One
    that differs by query is looked at, which waits for the device; a compiled or captured graph
    asserts it there.
    """
    if mask.dtype != torch.bool:
        raise UnsupportedError(
            f"expected a bool mask, True where a key is seen, got {mask.dtype}: FP8 attention adds "
            "no bias; leave such layers to diffusers: skip_layers"
        )
    full = _four_dims(mask, batch_size, q_len, kv_len)
    if full.shape[1] > 1:
        _require((full == full[:, :1]).all())
        full = full[:, :1]
    if full.shape[2] == 1:
        return ReducedMask(full[:, 0, 0].expand(batch_size, kv_len), None)
    full = full[:, 0].expand(-1, q_len, kv_len)
    queries, keys = full.any(-1), full.any(-2)
    # Every visible pair lies in queries × keys: the mask is that product if there are as many.
    num_product = queries.sum(-1) * keys.sum(-1)
    _require((full.sum((-2, -1)) == num_product).all())
    return ReducedMask(keys.expand(batch_size, -1), queries.expand(batch_size, -1))


def _four_dims(mask: Tensor, batch_size: int, q_len: int, kv_len: int) -> Tensor:
    if tuple(mask.shape) == (batch_size, kv_len):  # diffusers' reading of two dimensions
        return mask[:, None, None]
    full = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    sizes = (batch_size, None, q_len, kv_len)
    is_fitting = full.dim() == 4 and all(
        # Not `size in (1, expected)`: while compiling, sizes that are symbols are in nothing.
        expected is None or size == 1 or size == expected
        for size, expected in zip(full.shape, sizes, strict=True)
    )
    if not is_fitting:
        raise ConfigError(
            f"expected a mask that broadcasts to [{batch_size}, heads, {q_len}, {kv_len}], got "
            f"{list(mask.shape)}"
        )
    return full


def _require(condition: Tensor) -> None:
    is_captured = condition.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_captured:
        _assert_async(condition, NOT_REDUCIBLE)
    elif not bool(condition):
        raise UnsupportedError(NOT_REDUCIBLE)
