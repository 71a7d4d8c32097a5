"""scaled_mm: the product of an activation and an FP8 weight."""

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.scaled_mm.config import (
    MatmulShape,
    objection,
    torch_objection,
    torch_reluctance,
)
from octavo.numerics.formats import E4M3, is_fp8
from octavo.numerics.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    parse_granularity,
)
from octavo.numerics.quantize import Quantized
from octavo.numerics.quantize import quantize as reference_quantize
from octavo.ops.check import FLOAT_DTYPES, check_float, check_one_device, check_scale
from octavo.ops.quantize import quantize_operand
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_impl, register_reference
from octavo.reference.gemm import scaled_mm as reference


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None = None,
    *,
    activation: Granularity | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> Tensor:
    """Multiply quantized matrices: a · bᵀ + bias, with their scales.

    a: [rows, K], FP8 with one scale per tensor, per token or per block of 1 × columns; or plain
    bf16, fp16 or fp32, for weights in FP8 only. b: [columns, K], a weight in FP8 with one scale per
    tensor, per channel or per block. bias: [columns], bf16, fp16 or fp32. Blocks of a and b must
    have the same width along K. activation: quantizes a plain `a` to e4m3 first, with dynamic
    scales of this granularity: per tensor, per token or per block of 1 × columns.
    """
    a_data = a if isinstance(a, Tensor) else a.data
    if a_data.dim() != 2 or b.data.dim() != 2 or a_data.shape[1] != b.data.shape[1]:
        raise ConfigError(
            f"expected a [rows, K] and b [columns, K], got {list(a_data.shape)} and "
            f"{list(b.data.shape)}"
        )
    if isinstance(a, Tensor):
        check_float("a", a)
    else:
        if activation is not None:
            raise ConfigError(f"a is {a_data.dtype}: leave activation out, which quantizes plain a")
        _check_quantized("a", a)
    _check_quantized("b", b)
    a_granularity = activation if isinstance(a, Tensor) else a.granularity
    _check_granularities(a_granularity, b.granularity)
    if bias is not None:
        check_float("bias", bias)
        if tuple(bias.shape) != (b.data.shape[0],):
            raise ConfigError(
                f"expected a bias of shape [{b.data.shape[0]}], got {list(bias.shape)}"
            )
    if out_dtype not in FLOAT_DTYPES:
        raise ConfigError(f"expected out_dtype bfloat16, float16 or float32, got {out_dtype}")
    a_scale = None if isinstance(a, Tensor) else a.scale
    check_one_device(a=a_data, b=b.data, a_scale=a_scale, b_scale=b.scale, bias=bias)
    result: Tensor = torch.ops.octavo.scaled_mm(
        a_data,
        b.data,
        out_dtype,
        a_scale,
        None if a_granularity is None else str(a_granularity),
        b.scale,
        str(b.granularity),
        bias,
        impl,
    )
    return result


def _check_quantized(name: str, x: Quantized) -> None:
    if not is_fp8(x.data.dtype):
        raise ConfigError(f"expected {name}'s data in FP8, got {x.data.dtype}")
    check_scale(name, x.scale, x.granularity, tuple(x.data.shape))


def _check_granularities(a: Granularity | None, b: Granularity) -> None:
    if not isinstance(b, PerTensor | PerChannel | PerBlock):
        raise ConfigError(f"expected b per tensor, channel or block, got per {b}")
    if a is None:
        return
    if isinstance(a, PerBlock) and a.rows != 1:
        raise ConfigError(f"expected blocks of one row for a, got {a}")
    if not isinstance(a, PerTensor | PerToken | PerBlock):
        raise ConfigError(f"expected a per tensor, token or block, got per {a}")
    if isinstance(a, PerBlock) and isinstance(b, PerBlock) and a.columns != b.columns:
        raise ConfigError(f"expected blocks of one width along K, got {a} and {b}")


def _run(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    a_scale: Tensor | None,
    a_granularity: str | None,
    b_scale: Tensor,
    b_granularity: str,
    bias: Tensor | None,
    impl: str | None,
) -> Tensor:
    activation = a_granularity if a_scale is None else None
    used = {"bias": bias is not None, "activation": activation is not None}
    request = Request(
        op="scaled_mm",
        device=describe(a.device),
        dtype=a.dtype,
        other_dtype=b.dtype,
        granularity=f"{a_granularity or 'tensor'} by {b_granularity}",
        features=frozenset(name for name, is_used in used.items() if is_used),
        sizes=(a.shape[0], *b.shape),
        bias_dtype=None if bias is None else bias.dtype,
        out_dtype=out_dtype,
    )
    operand: Quantized | Tensor = a
    if a_scale is not None and a_granularity is not None:
        operand = Quantized(a, a_scale, parse_granularity(a_granularity))
    weight = Quantized(b, b_scale, parse_granularity(b_granularity))
    result: Tensor = find_run(request, impl)(
        operand,
        weight,
        bias,
        out_dtype=out_dtype,
        activation=None if activation is None else parse_granularity(activation),
    )
    return result


def _fake(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _reference(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    activation: Granularity | None,
) -> Tensor:
    """What every implementation of `scaled_mm` takes and returns."""
    if activation is not None and isinstance(a, Tensor):
        a = reference_quantize(a, activation)
    return reference(a, b, bias).to(out_dtype)


def _torch(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    activation: Granularity | None,
) -> Tensor:
    from octavo.kernels.scaled_mm.torch import scaled_mm as run

    if activation is not None and isinstance(a, Tensor):
        a = quantize_operand(a, activation)
    if isinstance(a, Tensor):
        raise ConfigError(f"expected a in FP8 for torch._scaled_mm, got {a.dtype}")
    return run(a, b, bias, out_dtype=out_dtype)


def _granularities(request: Request) -> tuple[Granularity, Granularity]:
    a, _, b = request.granularity.partition(" by ")
    return parse_granularity(a), parse_granularity(b or a)


def _triton_objection(request: Request) -> str | None:
    is_quantized = "activation" in request.features
    activation = _granularities(request)[0] if is_quantized else None
    is_fp8_product = is_quantized or is_fp8(request.dtype)
    return objection(request.device, is_fp8=is_fp8_product, activation=activation)


def _torch_objection(request: Request) -> str | None:
    a, b = _granularities(request)
    a_dtype = E4M3.dtype if "activation" in request.features else request.dtype
    return torch_objection(
        request.device,
        _shape_of(request),
        dtypes=(a_dtype, request.other_dtype or E4M3.dtype),
        granularities=(a, b),
        bias_dtype=request.bias_dtype,
        out_dtype=request.out_dtype or torch.bfloat16,
    )


def _torch_reluctance(request: Request) -> str | None:
    return torch_reluctance(_shape_of(request), _granularities(request))


def _shape_of(request: Request) -> MatmulShape | None:
    return None if request.sizes is None else MatmulShape(*request.sizes)


define("scaled_mm", _run, _fake)
register_reference("scaled_mm", _reference)
register_impl(
    "scaled_mm",
    "triton",
    "octavo.kernels.scaled_mm.triton:scaled_mm",
    objection=_triton_objection,
    reason="any scales and sizes; for few rows the weight is read at the memory's speed",
    is_automatic=True,
)
register_impl(
    "scaled_mm",
    "torch",
    _torch,
    objection=_torch_objection,
    reluctance=_torch_reluctance,
    reason="torch._scaled_mm is the fastest for many rows",
    is_automatic=True,
)
