"""Values from rows to the transposed layout and back: what quantize_qkv and attention agree on."""

import torch
from torch import Tensor

from octavo.numerics.value_layout import columns_of_keys, num_columns


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
