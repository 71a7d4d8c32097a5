"""scaled_mm: the product of an activation and an FP8 weight."""

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.numerics.formats import is_fp8
from octavo.numerics.granularity import PerBlock, PerChannel, PerTensor, PerToken, parse_granularity
from octavo.numerics.quantize import Quantized
from octavo.ops.check import FLOAT_DTYPES, check_float, check_one_device, check_scale
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_reference
from octavo.reference.gemm import scaled_mm as reference


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> Tensor:
    """a · bᵀ + bias.

    a: [rows, K], FP8 with one scale per tensor, per token or per block of 1 × columns; or plain
    bf16, fp16 or fp32, for weights in FP8 only. b: [columns, K], a weight in FP8 with one scale per
    tensor, per channel or per block. bias: [columns], bf16, fp16 or fp32. Blocks of a and b must
    have the same width along K.
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
        _check_quantized("a", a)
    _check_quantized("b", b)
    _check_granularities(a, b)
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
        "tensor" if isinstance(a, Tensor) else str(a.granularity),
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


def _check_granularities(a: Quantized | Tensor, b: Quantized) -> None:
    if not isinstance(b.granularity, PerTensor | PerChannel | PerBlock):
        raise ConfigError(f"expected b per tensor, channel or block, got per {b.granularity}")
    if isinstance(a, Tensor):
        return
    if isinstance(a.granularity, PerBlock) and a.granularity.rows != 1:
        raise ConfigError(f"expected blocks of one row for a, got {a.granularity}")
    if not isinstance(a.granularity, PerTensor | PerToken | PerBlock):
        raise ConfigError(f"expected a per tensor, token or block, got per {a.granularity}")
    if (
        isinstance(a.granularity, PerBlock)
        and isinstance(b.granularity, PerBlock)
        and a.granularity.columns != b.granularity.columns
    ):
        raise ConfigError(
            f"expected blocks of one width along K, got {a.granularity} and {b.granularity}"
        )


def _run(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    a_scale: Tensor | None,
    a_granularity: str,
    b_scale: Tensor,
    b_granularity: str,
    bias: Tensor | None,
    impl: str | None,
) -> Tensor:
    request = Request(
        op="scaled_mm",
        device=describe(a.device),
        dtype=a.dtype,
        other_dtype=b.dtype,
        granularity=f"{a_granularity} by {b_granularity}",
        features=frozenset() if bias is None else frozenset({"bias"}),
    )
    operand: Quantized | Tensor = a
    if a_scale is not None:
        operand = Quantized(a, a_scale, parse_granularity(a_granularity))
    weight = Quantized(b, b_scale, parse_granularity(b_granularity))
    result: Tensor = find_run(request, impl)(operand, weight, bias, out_dtype=out_dtype)
    return result


def _fake(a: Tensor, b: Tensor, out_dtype: torch.dtype, *rest: object) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _reference(
    a: Quantized | Tensor, b: Quantized, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """What every implementation of `scaled_mm` takes and returns."""
    return reference(a, b, bias).to(out_dtype)


define(
    "scaled_mm(Tensor a, Tensor b, ScalarType out_dtype, Tensor? a_scale, str a_granularity, "
    "Tensor b_scale, str b_granularity, Tensor? bias, str? impl) -> Tensor",
    _run,
    _fake,
)
register_reference("scaled_mm", _reference)
