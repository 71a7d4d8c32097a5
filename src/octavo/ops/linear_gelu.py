"""linear_gelu: a plain linear layer and the GELU behind it, as one product."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.linear_gelu.config import torch_objection
from octavo.ops.arguments import Arguments
from octavo.ops.check import check_float, check_one_device, check_same_dtype
from octavo.ops.register import Operator
from octavo.ops.select import Request, register_impl, register_reference
from octavo.reference.gemm import linear_gelu as reference


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, *, impl: str | None = None) -> Tensor:
    """GELU(x · weightᵀ + bias) by its tanh formula: [..., K] to [..., N], contiguous, in x's dtype.

    x: bf16, fp16 or fp32. weight: [N, K], as nn.Linear has it, and bias: [N], both in x's dtype.
    Products are added up in float32, and the GELU is that of the sum: nothing is rounded, or
    written to memory, in between.
    """
    result: Tensor = _OPERATOR(GeluArguments(x, weight, bias, impl))
    return result


@dataclass(eq=False)
class GeluArguments(Arguments):
    """One call of `linear_gelu`."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    impl: str | None

    def check(self) -> None:
        x, weight, bias = self.x, self.weight, self.bias
        check_float("x", x)
        if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ConfigError(
                f"expected x [..., K] and a weight [N, K], got {list(x.shape)} and "
                f"{list(weight.shape)}"
            )
        if tuple(bias.shape) != (weight.shape[0],):
            raise ConfigError(f"expected a bias [{weight.shape[0]}], got {list(bias.shape)}")
        check_same_dtype(x, weight=weight, bias=bias)
        check_one_device(x=x, weight=weight, bias=bias)

    def request(self) -> Request:
        num_columns, depth = self.weight.shape
        return Request(
            op="linear_gelu",
            device=describe(self.x.device),
            dtype=self.x.dtype,
            other_dtype=self.weight.dtype,
            sizes=(math.prod(self.x.shape[:-1]), num_columns, depth),
            bias_dtype=self.bias.dtype,
            out_dtype=self.x.dtype,
        )

    def run(self, run: Callable[..., Any]) -> Tensor:
        *outer, depth = self.x.shape
        rows = self.x.reshape(math.prod(outer), depth)  # -1 has no meaning where K is 0
        out: Tensor = run(rows, self.weight, self.bias)
        return out.contiguous().view(*outer, self.weight.shape[0])


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_OPERATOR = Operator("linear_gelu", GeluArguments, _fake)


def _reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What every implementation of `linear_gelu` takes and returns: [rows, K] to [rows, N]."""
    return reference(x, weight, bias).to(x.dtype)


def _torch_objection(request: Request) -> str | None:
    return torch_objection(request.device, request.dtype, request.sizes)


register_reference("linear_gelu", _reference)
register_impl(
    "linear_gelu",
    "torch",
    "octavo.kernels.linear_gelu.torch:linear_gelu",
    objection=_torch_objection,
    reason="cuBLAS applies GELU before it stores the product",
    is_automatic=True,
    is_repeatable=True,
)
