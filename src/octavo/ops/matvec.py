"""matvec: one token times a plain weight, which is read at the memory's speed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.matvec.config import objection
from octavo.ops.arguments import Arguments
from octavo.ops.check import check_float, check_one_device, check_same_dtype
from octavo.ops.register import Operator
from octavo.ops.select import Request, register_impl, register_reference
from octavo.reference.gemm import matvec as reference


def matvec(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: str | None = None
) -> Tensor:
    """x · weightᵀ + bias for one row x: [..., K] to [..., N], contiguous, in x's dtype.

    x: bf16, fp16 or fp32, its leading dimensions all 1, or none. weight: [N, K], as nn.Linear has
    it, and bias: [N], both in x's dtype. Rows of the weight may lie apart, as in a part of a fused
    weight; the values of a row lie side by side. Products are added up in float32, the bias as
    well, and the sum is rounded once.
    """
    result: Tensor = _OPERATOR(MatvecArguments(x, weight, bias, impl))
    return result


@dataclass(eq=False)
class MatvecArguments(Arguments):
    """One call of `matvec`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    impl: str | None

    def check(self) -> None:
        x, weight, bias = self.x, self.weight, self.bias
        check_float("x", x)
        if x.dim() == 0 or math.prod(x.shape[:-1]) != 1:
            raise ConfigError(
                f"expected x as one row, [K] or [1, K], got {list(x.shape)}: "
                "torch.nn.functional.linear takes any number of rows"
            )
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ConfigError(
                f"expected a weight [N, {x.shape[-1]}] for x {list(x.shape)}, got "
                f"{list(weight.shape)}"
            )
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ConfigError(f"expected a bias [{weight.shape[0]}], got {list(bias.shape)}")
        check_same_dtype(x, weight=weight, bias=bias)
        check_one_device(x=x, weight=weight, bias=bias)
        if weight.shape[1] > 1 and weight.stride(1) != 1:
            raise ConfigError(
                "expected a weight with the values of a row side by side, got strides "
                f"{list(weight.stride())}: call contiguous() on it once, not for every token"
            )

    def request(self) -> Request:
        num_columns, depth = self.weight.shape
        return Request(
            op="matvec",
            device=describe(self.x.device),
            dtype=self.x.dtype,
            other_dtype=self.weight.dtype,
            features=frozenset() if self.bias is None else frozenset({"bias"}),
            sizes=(1, num_columns, depth),
            bias_dtype=None if self.bias is None else self.bias.dtype,
            out_dtype=self.x.dtype,
        )

    def run(self, run: Callable[..., Any]) -> Tensor:
        *outer, depth = self.x.shape
        out: Tensor = run(self.x.reshape(depth), self.weight, self.bias)
        return out.contiguous().view(*outer, self.weight.shape[0])


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_OPERATOR = Operator("matvec", MatvecArguments, _fake)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What every implementation of `matvec` takes and returns: x [K], and a result [N]."""
    return reference(x, weight, bias).to(x.dtype)


def _triton_objection(request: Request) -> str | None:
    return objection(request.device)


register_reference("matvec", _reference)
register_impl(
    "matvec",
    "triton",
    "octavo.kernels.matvec.triton:matvec",
    objection=_triton_objection,
    reason="one row: the weight is read once, at the memory's speed",
    is_automatic=True,
    is_repeatable=True,
)
