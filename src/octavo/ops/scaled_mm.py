"""scaled_mm: the product of an activation and an FP8 weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from octavo.ops.arguments import Arguments
from octavo.ops.check import FLOAT_DTYPES, check_float, check_one_device, check_scale
from octavo.ops.register import Operator
from octavo.ops.select import Request, register_impl, register_reference
from octavo.reference.gemm import scaled_mm as reference


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None = None,
    *,
    activation: Granularity | None = None,
    scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> Tensor:
    """Multiply quantized matrices: a · bᵀ + bias, with their scales.

    a: [rows, K], FP8 with one scale per tensor, per token or per block of 1 × columns; or plain
    bf16, fp16 or fp32 [..., K], for weights in FP8 only. b: [columns, K], a weight in FP8 with one
    scale per tensor, per channel or per block. bias: [columns], bf16, fp16 or fp32. Blocks of a and
    b must have the same width along K. activation: quantizes a plain `a` to e4m3 first, with
    dynamic scales of this granularity: per tensor, per token or per block of 1 × columns. scale:
    the static one of an activation per tensor, float32 []. Returns [..., columns].
    """
    if isinstance(a, Tensor):
        call = ProductArguments(a, scale, activation, b, bias, out_dtype, impl)
    elif activation is None and scale is None:
        call = ProductArguments(a.data, a.scale, a.granularity, b, bias, out_dtype, impl)
    else:
        raise ConfigError(
            f"a is {a.data.dtype}: leave activation and scale out, which quantize plain a"
        )
    result: Tensor = _OPERATOR(call)
    return result


@dataclass(eq=False)
class ProductArguments(Arguments):
    """One call of `scaled_mm`; a_granularity: of a's scales, given or to be found."""

    a: Tensor
    a_scale: Tensor | None
    a_granularity: Granularity | None
    b: Quantized
    bias: Tensor | None
    out_dtype: torch.dtype
    impl: str | None

    def check(self) -> None:
        a, b, bias, out_dtype = self.a, self.b, self.bias, self.out_dtype
        is_plain = not is_fp8(a.dtype)
        has_rows = a.dim() >= 1 if is_plain else a.dim() == 2
        if not has_rows or b.data.dim() != 2 or a.shape[-1] != b.data.shape[1]:
            raise ConfigError(
                f"expected a [{'...' if is_plain else 'rows'}, K] and b [columns, K], got "
                f"{list(a.shape)} and {list(b.data.shape)}"
            )
        operand = self.operand()
        if isinstance(operand, Tensor):
            check_float("a", a)
            if self.a_scale is not None:
                _check_static(self.a_scale, self.a_granularity)
        else:
            _check_quantized("a", operand)
        _check_quantized("b", b)
        _check_granularities(self.a_granularity, b.granularity)
        if bias is not None:
            check_float("bias", bias)
            if tuple(bias.shape) != (b.data.shape[0],):
                raise ConfigError(
                    f"expected a bias of shape [{b.data.shape[0]}], got {list(bias.shape)}"
                )
        if out_dtype not in FLOAT_DTYPES:
            raise ConfigError(f"expected out_dtype bfloat16, float16 or float32, got {out_dtype}")
        check_one_device(a=a, b=b.data, a_scale=self.a_scale, b_scale=b.scale, bias=bias)

    def operand(self) -> Quantized | Tensor:
        """a with its scales; plain [rows, K], if it is to be quantized or has none."""
        if not is_fp8(self.a.dtype) or self.a_scale is None or self.a_granularity is None:
            return self.a if self.a.dim() == 2 else self.a.reshape(-1, self.a.shape[-1])
        return Quantized(self.a, self.a_scale, self.a_granularity)

    def activation(self) -> Granularity | None:
        """How a plain a is quantized; None if it is not."""
        return None if is_fp8(self.a.dtype) else self.a_granularity

    def request(self) -> Request:
        activation = self.activation()
        used = {
            "bias": self.bias is not None,
            "activation": activation is not None,
            "static": activation is not None and self.a_scale is not None,
        }
        rows = math.prod(self.a.shape[:-1])
        return Request(
            op="scaled_mm",
            device=describe(self.a.device),
            dtype=self.a.dtype,
            other_dtype=self.b.data.dtype,
            granularity=f"{self.a_granularity or 'tensor'} by {self.b.granularity}",
            features=frozenset(name for name, is_used in used.items() if is_used),
            sizes=(rows, *self.b.data.shape),
            bias_dtype=None if self.bias is None else self.bias.dtype,
            out_dtype=self.out_dtype,
        )

    def run(self, run: Callable[..., Any]) -> Tensor:
        activation = self.activation()
        static = {} if activation is None or self.a_scale is None else {"scale": self.a_scale}
        result: Tensor = run(
            self.operand(),
            self.b,
            self.bias,
            out_dtype=self.out_dtype,
            activation=activation,
            **static,
        )
        return result if self.a.dim() == 2 else result.view(*self.a.shape[:-1], result.shape[-1])


def _check_quantized(name: str, x: Quantized) -> None:
    if not is_fp8(x.data.dtype):
        raise ConfigError(f"expected {name}'s data in FP8, got {x.data.dtype}")
    check_scale(name, x.scale, x.granularity, tuple(x.data.shape))


def _check_static(scale: Tensor, activation: Granularity | None) -> None:
    if not isinstance(activation, PerTensor):
        how = "none" if activation is None else f"per {activation}"
        raise ConfigError(f"expected an activation per tensor for a static scale, got {how}")
    check_scale("a", scale, activation, ())


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


def _fake(a: Tensor, b_data: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((*a.shape[:-1], b_data.shape[0]), dtype=out_dtype)


def _reference(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    activation: Granularity | None,
    scale: Tensor | None = None,
) -> Tensor:
    """What every implementation of `scaled_mm` takes and returns; a plain a is [rows, K].

    scale: of an activation with a static one; left out otherwise.
    """
    if activation is not None and isinstance(a, Tensor):
        a = reference_quantize(a, activation, scale=scale)
    return reference(a, b, bias).to(out_dtype)


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


_OPERATOR = Operator("scaled_mm", ProductArguments, _fake)
register_reference("scaled_mm", _reference)
register_impl(
    "scaled_mm",
    "triton",
    "octavo.kernels.scaled_mm.triton:scaled_mm",
    objection=_triton_objection,
    reason="any scales and sizes; for few rows the weight is read at the memory's speed",
    is_automatic=True,
    is_repeatable=True,
)
register_impl(
    "scaled_mm",
    "torch",
    "octavo.kernels.scaled_mm.torch:scaled_mm",
    objection=_torch_objection,
    reluctance=_torch_reluctance,
    reason="torch._scaled_mm is the fastest for many rows",
    is_automatic=True,
    is_repeatable=True,
)
