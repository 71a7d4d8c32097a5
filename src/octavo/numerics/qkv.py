"""The scales of queries, keys and values, and the three tensors quantized with them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QkvScales:
    """float32 scales of one attention call.

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
    """q, k and v in FP8 with the scales that give them their size."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: QkvScales
