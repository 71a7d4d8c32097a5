"""torch._scaled_mm (cuBLAS) as an implementation of scaled_mm."""

import torch
from torch import Tensor

from octavo.internals import internals
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import Granularity, PerTensor
from octavo.numerics.quantize import Quantized

with internals("torch"):
    from torch import _scaled_mm


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    activation: Granularity | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """a · bᵀ + bias, one scale per tensor for both, or one for each row of a and of b.

    activation: how a plain `a` is quantized to e4m3 first, by `scale` if it is given.
    """
    if isinstance(a, Tensor):
        assert activation is not None
        a = _quantized(a, activation, scale, isinstance(b.granularity, PerTensor))
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


def _quantized(
    x: Tensor, activation: Granularity, scale: Tensor | None, is_per_tensor: bool
) -> Quantized:
    """x in e4m3; with a scale of its own for each row, unless one for all is what is wanted."""
    from octavo.kernels.quantize.triton import quantize, quantize_rows

    if scale is not None and not is_per_tensor:
        return quantize_rows(x, scale, E4M3)
    return quantize(x, activation, E4M3, scale=scale, margin=1.0, power_of_two=False)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy whose rows begin at multiples of 16 bytes, as cuBLAS asks."""
    is_aligned = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return (
        x
        if is_aligned and x.stride(0) >= x.shape[1]
        else x.clone(memory_format=torch.contiguous_format)
    )
