"""quantize: a tensor to FP8, with one scale for each group of values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.quantize.config import objection
from octavo.numerics import quantize as numerics
from octavo.numerics.formats import E4M3, Fp8Format, format_named
from octavo.numerics.granularity import Granularity, PerTensor, parse_granularity
from octavo.numerics.quantize import Quantized
from octavo.numerics.scales import check_margin
from octavo.ops.arguments import Arguments
from octavo.ops.check import check_float, check_one_device, check_scale
from octavo.ops.register import Operator
from octavo.ops.select import Request, register_impl, register_reference


def quantize(
    x: Tensor,
    granularity: Granularity = PerTensor(),
    fmt: Fp8Format = E4M3,
    *,
    scale: Tensor | None = None,
    margin: float = 1.0,
    power_of_two: bool = False,
    impl: str | None = None,
) -> Quantized:
    """Quantize x to FP8: x ≈ data * scale.

    x: any shape that has the granularity, bf16, fp16 or fp32. scale: static, float32 and of the
    granularity's scale shape; left out, it is dynamic: margin · amax / fmt.max, rounded up to a
    power of two if asked. Values beyond the range saturate, NaN stays NaN
    (docs/explanation/numerics.md).
    """
    if scale is None:
        data, scale = _DYNAMIC(DynamicArguments(x, granularity, fmt, margin, power_of_two, impl))
        return Quantized(data, scale, granularity)
    if margin != 1.0 or power_of_two:
        raise ConfigError("margin and power_of_two shape dynamic scales: leave them or scale out")
    data = _STATIC(StaticArguments(x, scale, granularity, fmt, impl))
    return Quantized(data, scale, granularity)


@dataclass(eq=False)
class DynamicArguments(Arguments):
    """One call of `quantize` that finds its scales."""

    x: Tensor
    granularity: Granularity
    fmt: Fp8Format
    margin: float
    power_of_two: bool
    impl: str | None

    def check(self) -> None:
        check_float("x", self.x)
        self.granularity.check(tuple(self.x.shape))
        check_margin(self.margin)

    def request(self) -> Request:
        return _request(self.x, self.granularity, self.fmt)

    def run(self, run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        result: Quantized = run(
            self.x,
            self.granularity,
            self.fmt,
            scale=None,
            margin=self.margin,
            power_of_two=self.power_of_two,
        )
        return result.data.contiguous(), result.scale


@dataclass(eq=False)
class StaticArguments(Arguments):
    """One call of `quantize` with a scale."""

    x: Tensor
    scale: Tensor
    granularity: Granularity
    fmt: Fp8Format
    impl: str | None

    def check(self) -> None:
        check_float("x", self.x)
        self.granularity.check(tuple(self.x.shape))
        check_scale("x", self.scale, self.granularity, tuple(self.x.shape))
        check_one_device(x=self.x, scale=self.scale)

    def request(self) -> Request:
        return _request(self.x, self.granularity, self.fmt)

    def run(self, run: Callable[..., Any]) -> Tensor:
        result: Quantized = run(
            self.x,
            self.granularity,
            self.fmt,
            scale=self.scale.contiguous(),
            margin=1.0,
            power_of_two=False,
        )
        return result.data.contiguous()


def _request(x: Tensor, granularity: Granularity, fmt: Fp8Format) -> Request:
    return Request(
        op="quantize",
        device=describe(x.device),
        dtype=x.dtype,
        other_dtype=fmt.dtype,
        granularity=str(granularity),
    )


def _dynamic_fake(x: Tensor, granularity: str, fmt: str) -> tuple[Tensor, Tensor]:
    shape = parse_granularity(granularity).scale_shape(tuple(x.shape))
    return _static_fake(x, fmt), x.new_empty(shape, dtype=torch.float32)


def _static_fake(x: Tensor, fmt: str) -> Tensor:
    return x.new_empty(x.shape, dtype=format_named(fmt).dtype)


_DYNAMIC = Operator("quantize_dynamic", DynamicArguments, _dynamic_fake)
_STATIC = Operator("quantize_static", StaticArguments, _static_fake)


def _triton_objection(request: Request) -> str | None:
    return objection(request.device, parse_granularity(request.granularity))


register_reference("quantize", numerics.quantize)
register_impl(
    "quantize",
    "triton",
    "octavo.kernels.quantize.triton:quantize",
    objection=_triton_objection,
    reason="FP8 casts on the GPU in one or two launches",
    is_automatic=True,
    is_repeatable=True,
)
