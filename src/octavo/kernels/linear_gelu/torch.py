"""torch._addmm_activation (cuBLAS) as an implementation of linear_gelu."""

import torch
from torch import Tensor

from octavo.internals import internals
from octavo.kernels.linear_gelu.config import ALIGNMENT

with internals("torch"):
    from torch import _addmm_activation


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU of x · weightᵀ + bias, applied to the float32 sums before they are stored."""
    operands = (_aligned(bias), _aligned(x), _aligned(weight).t())
    return _addmm_activation(*operands, use_gelu=True)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy whose rows begin at multiples of 16 bytes: other products are rounded first."""
    has_rows = x.dim() < 2 or (x.stride(0) % ALIGNMENT == 0 and x.stride(0) >= x.shape[1])
    if has_rows and x.stride(-1) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
