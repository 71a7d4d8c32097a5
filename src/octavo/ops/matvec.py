"""matvec: one token times a plain weight, which is read at the memory's speed."""

import math

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.matvec.config import objection
from octavo.ops.check import check_float, check_one_device
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_impl, register_reference
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
    check_float("x", x)
    if x.dim() == 0 or math.prod(x.shape[:-1]) != 1:
        raise ConfigError(
            f"expected x as one row, [K] or [1, K], got {list(x.shape)}: "
            "torch.nn.functional.linear takes any number of rows"
        )
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ConfigError(
            f"expected a weight [N, {x.shape[-1]}] for x {list(x.shape)}, got {list(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ConfigError(f"expected a bias [{weight.shape[0]}], got {list(bias.shape)}")
    for name, one in (("weight", weight), ("bias", bias)):
        if one is not None and one.dtype != x.dtype:
            raise ConfigError(f"expected {name} in {x.dtype} like x, got {one.dtype}: convert it")
    check_one_device(x=x, weight=weight, bias=bias)
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise ConfigError(
            "expected a weight with the values of a row side by side, got strides "
            f"{list(weight.stride())}: call contiguous() on it once, not for every token"
        )
    result: Tensor = torch.ops.octavo.matvec(x, weight, bias, impl)
    return result


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, impl: str | None) -> Tensor:
    num_columns, depth = weight.shape
    request = Request(
        op="matvec",
        device=describe(x.device),
        dtype=x.dtype,
        other_dtype=weight.dtype,
        features=frozenset() if bias is None else frozenset({"bias"}),
        sizes=(1, num_columns, depth),
        bias_dtype=None if bias is None else bias.dtype,
        out_dtype=x.dtype,
    )
    out: Tensor = find_run(request, impl)(x.reshape(depth), weight, bias)
    return out.contiguous().view(*x.shape[:-1], num_columns)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


define("matvec", _run, _fake)


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
)
