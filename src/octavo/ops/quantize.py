"""quantize: a tensor to FP8, with one scale for each group of values."""

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
from octavo.ops.check import check_float, check_one_device, check_scale
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_impl, register_reference


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
    check_float("x", x)
    granularity.check(tuple(x.shape))
    text, name = str(granularity), fmt.name
    if scale is None:
        check_margin(margin)
        data, scale = torch.ops.octavo.quantize_dynamic(x, text, name, margin, power_of_two, impl)
        return Quantized(data, scale, granularity)
    if margin != 1.0 or power_of_two:
        raise ConfigError("margin and power_of_two shape dynamic scales: leave them or scale out")
    check_scale("x", scale, granularity, tuple(x.shape))
    check_one_device(x=x, scale=scale)
    data = torch.ops.octavo.quantize_static(x, scale, text, name, impl)
    return Quantized(data, scale, granularity)


def _request(x: Tensor, granularity: str, fmt: str) -> Request:
    return Request(
        op="quantize",
        device=describe(x.device),
        dtype=x.dtype,
        other_dtype=format_named(fmt).dtype,
        granularity=granularity,
    )


def quantize_operand(x: Tensor, granularity: Granularity) -> Quantized:
    """x in e4m3 with dynamic scales, for ops that have checked it: not another op in theirs."""
    data, scale = _dynamic(x, str(granularity), E4M3.name, 1.0, False, None)
    return Quantized(data, scale, granularity)


def _dynamic(
    x: Tensor, granularity: str, fmt: str, margin: float, power_of_two: bool, impl: str | None
) -> tuple[Tensor, Tensor]:
    run = find_run(_request(x, granularity, fmt), impl)
    result: Quantized = run(
        x,
        parse_granularity(granularity),
        format_named(fmt),
        scale=None,
        margin=margin,
        power_of_two=power_of_two,
    )
    return result.data.contiguous(), result.scale


def _dynamic_fake(x: Tensor, granularity: str, fmt: str) -> tuple[Tensor, Tensor]:
    shape = parse_granularity(granularity).scale_shape(tuple(x.shape))
    data = x.new_empty(x.shape, dtype=format_named(fmt).dtype)
    return data, x.new_empty(shape, dtype=torch.float32)


def _static(x: Tensor, scale: Tensor, granularity: str, fmt: str, impl: str | None) -> Tensor:
    run = find_run(_request(x, granularity, fmt), impl)
    result: Quantized = run(
        x,
        parse_granularity(granularity),
        format_named(fmt),
        scale=scale.contiguous(),
        margin=1.0,
        power_of_two=False,
    )
    return result.data.contiguous()


def _static_fake(x: Tensor, fmt: str) -> Tensor:
    return x.new_empty(x.shape, dtype=format_named(fmt).dtype)


define("quantize_dynamic", _dynamic, _dynamic_fake)
define("quantize_static", _static, _static_fake)


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
)
