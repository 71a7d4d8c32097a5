"""Quantize, dequantize and the saturating cast between them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.numerics.formats import E4M3, Fp8Format, format_of
from octavo.numerics.granularity import Granularity, PerTensor
from octavo.numerics.scales import amax_to_scale, finite_amax


@dataclass(frozen=True)
class Quantized:
    """A tensor in 8 bits: x ≈ data * scale, where `granularity` says which values share a scale."""

    data: Tensor
    scale: Tensor
    granularity: Granularity

    @property
    def format(self) -> Fp8Format:
        """The format of `data`."""
        return format_of(self.data.dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """data * scale in `dtype`; see `dequantize`."""
        return dequantize(self.data, self.scale, self.granularity, dtype)


def saturating_cast(x: Tensor, fmt: Fp8Format = E4M3) -> Tensor:
    """x in 8 bits, to nearest, ties to even; float64 goes through float32.

    Values beyond ±fmt.max, ±Inf included, become ±fmt.max; NaN stays NaN. This is what Hopper's
    `cvt.rn.satfinite` does.
    """
    # Beyond the maximum torch's own casts differ between formats, devices and versions.
    if torch.compiler.is_compiling():
        # A clamp that keeps NaN is six instructions of a compiled kernel, this is three.
        limit = torch.full_like(x, fmt.max).copysign(x)
        return torch.where(x.abs() > fmt.max, limit, x).to(fmt.dtype)
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def quantize(
    x: Tensor,
    granularity: Granularity = PerTensor(),
    fmt: Fp8Format = E4M3,
    *,
    scale: Tensor | None = None,
    margin: float = 1.0,
    power_of_two: bool = False,
) -> Quantized:
    """x in 8 bits with one scale per group: the given `scale`, or the one its amax asks for.

    Computed in float32. margin and power_of_two shape the scale as in `amax_to_scale`.
    """
    granularity.check(x.shape)
    if scale is None:
        amax = finite_amax(x, granularity)
        scale = amax_to_scale(amax, fmt, margin=margin, power_of_two=power_of_two)
    elif tuple(scale.shape) != granularity.scale_shape(x.shape):
        raise ConfigError(
            f"granularity {granularity} of a tensor {list(x.shape)} needs a scale of shape "
            f"{list(granularity.scale_shape(x.shape))}, got {list(scale.shape)}"
        )
    scale = scale.to(torch.float32)
    data = saturating_cast(x.to(torch.float32) / granularity.expand(scale, x.shape), fmt)
    return Quantized(data, scale, granularity)


def dequantize(
    data: Tensor, scale: Tensor, granularity: Granularity, dtype: torch.dtype = torch.float32
) -> Tensor:
    """data * scale, computed in float32 (float64 if that is asked for) and rounded to `dtype`."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    expanded = granularity.expand(scale.to(compute), data.shape)
    return (data.to(compute) * expanded).to(dtype)
