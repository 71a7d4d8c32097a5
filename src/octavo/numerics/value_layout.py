"""Where attention finds a value: row by row like keys, or transposed for FP8 tensor cores.

FP8 matrix units of Hopper want both operands with the summed dimension innermost: for P·V that is
the key. And the registers in which they leave q·kᵀ hold keys 8g + 2t + e (t 0 … 3; g, e 0 … 1)
where they want keys 4t + 2g + e of P as an operand: with values stored in that order, P moves
nowhere.

    rows        v [batch, kv_len, num_kv_heads, head_dim], or packed [tokens, num_kv_heads, …]
    transposed  vᵀ [batch, num_kv_heads, head_dim, columns], or packed [num_kv_heads, head_dim, …];
                in every 16 keys, column 4t + 2g + e holds key 8g + 2t + e

Columns are a multiple of 16. The packed sequence i starts at column (cu_seqlens[i] + 16·i) rounded
down to a multiple of 16: aligned and apart from the others, without a sum over the lengths. A
column that belongs to no key holds zeros.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from octavo.errors import ConfigError

ValueLayout = Literal["rows", "transposed"]
KEY_GROUP = 16


def check_value_layout(layout: str) -> None:
    """Raise unless `layout` is one of the two."""
    if layout not in get_args(ValueLayout):
        raise ConfigError(f"expected value_layout rows or transposed, got {layout!r}")


def num_columns(num_keys: int, num_sequences: int | None = None) -> int:
    """Columns of vᵀ: of one sequence of a dense batch, or of `num_sequences` packed ones."""
    aligned = -(-num_keys // KEY_GROUP) * KEY_GROUP
    return aligned if num_sequences is None else aligned + KEY_GROUP * num_sequences


def columns_of_keys(num_keys: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """[num_keys] int64: the column of each key of a sequence, or of each packed token."""
    key = torch.arange(num_keys, device=device)
    first = torch.zeros_like(key)
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens, key, right=True, out_int32=True).long() - 1
        start = cu_seqlens.long()[sequence]
        first = (start + KEY_GROUP * sequence) // KEY_GROUP * KEY_GROUP
        key = key - start
    g, t, e = key // 8 % 2, key // 2 % 4, key % 2
    return first + key // KEY_GROUP * KEY_GROUP + 4 * t + 2 * g + e
