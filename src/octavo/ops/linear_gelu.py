"""linear_gelu: a plain linear layer and the GELU behind it, as one product."""

import math

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.linear_gelu.config import torch_objection
from octavo.ops.check import check_float, check_one_device
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_impl, register_reference
from octavo.reference.gemm import linear_gelu as reference


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, *, impl: str | None = None) -> Tensor:
    """GELU(x · weightᵀ + bias) by its tanh formula: [..., K] to [..., N], contiguous, in x's dtype.

    x: bf16, fp16 or fp32. weight: [N, K], as nn.Linear has it, and bias: [N], both in x's dtype.
    Products are added up in float32, and the GELU is that of the sum: nothing is rounded, or
    written to memory, in between.
    """
    check_float("x", x)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ConfigError(
            f"expected x [..., K] and a weight [N, K], got {list(x.shape)} and {list(weight.shape)}"
        )
    if tuple(bias.shape) != (weight.shape[0],):
        raise ConfigError(f"expected a bias [{weight.shape[0]}], got {list(bias.shape)}")
    for name, one in (("weight", weight), ("bias", bias)):
        if one.dtype != x.dtype:
            raise ConfigError(f"expected {name} in {x.dtype} like x, got {one.dtype}: convert it")
    check_one_device(x=x, weight=weight, bias=bias)
    result: Tensor = torch.ops.octavo.linear_gelu(x, weight, bias, impl)
    return result


def _run(x: Tensor, weight: Tensor, bias: Tensor, impl: str | None) -> Tensor:
    num_columns, depth = weight.shape
    rows = x.reshape(math.prod(x.shape[:-1]), depth)  # -1 has no meaning where K is 0
    request = Request(
        op="linear_gelu",
        device=describe(x.device),
        dtype=x.dtype,
        other_dtype=weight.dtype,
        sizes=(len(rows), num_columns, depth),
        bias_dtype=bias.dtype,
        out_dtype=x.dtype,
    )
    out: Tensor = find_run(request, impl)(rows, weight, bias)
    return out.contiguous().view(*x.shape[:-1], num_columns)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


define("linear_gelu", _run, _fake)


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
)
