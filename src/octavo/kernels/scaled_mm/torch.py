"""torch._scaled_mm (cuBLAS) as an implementation of scaled_mm."""

import torch
from torch import Tensor

from octavo.internals import internals
from octavo.numerics.granularity import PerTensor
from octavo.numerics.quantize import Quantized

with internals("torch"):
    from torch import _scaled_mm


def scaled_mm(a: Quantized, b: Quantized, bias: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """a · bᵀ + bias, one scale per tensor for both, or one for each row of a and of b."""
    a_scale, b_scale = a.scale, b.scale
    if not (isinstance(a.granularity, PerTensor) and isinstance(b.granularity, PerTensor)):
        a_scale = a_scale.expand(a.data.shape[0]).unsqueeze(1).contiguous()
        b_scale = b_scale.expand(b.data.shape[0]).unsqueeze(0).contiguous()
    # Without fast accumulation: sums stay within float32's error (docs/explanation/numerics.md).
    return _scaled_mm(
        _aligned(a.data),
        _aligned(b.data).t(),
        a_scale,
        b_scale,
        bias=None if bias is None else bias.contiguous(),
        out_dtype=out_dtype,
        use_fast_accum=False,
    )


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy whose rows begin at multiples of 16 bytes, as cuBLAS asks."""
    is_aligned = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return (
        x
        if is_aligned and x.stride(0) >= x.shape[1]
        else x.clone(memory_format=torch.contiguous_format)
    )
