"""matvec kernel: every program multiplies and adds some rows of the weight in registers."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.internals import internals
from octavo.kernels.device import describe
from octavo.kernels.launch import launch
from octavo.kernels.matvec.config import MatvecConfig, default

with internals("triton"):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


# Sizes are not compiled in: ALIGN says what loads need to know of them.
@triton.jit(do_not_specialize=["num_columns", "depth", "row_stride"])
def _matvec_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_columns,
    depth,
    row_stride,
    ALIGN: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N values of the result; depth and row_stride are in units of ALIGN values.

    IS_EVEN: BLOCK_K divides the depth.
    """
    if IS_DEPENDENT:
        gdc_launch_dependents()
        # To read the first of the weight before this wait takes registers, and was slower.
        gdc_wait()
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last one are the last one again, and are not stored.
    row = tl.minimum(n, num_columns - 1)
    column = tl.arange(0, BLOCK_K)[None, :]
    weight_ptr += row[:, None] * (row_stride.to(tl.int64) * ALIGN) + column
    x_ptr += column
    end = depth.to(tl.int64) * ALIGN
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, end, BLOCK_K):
        if IS_EVEN:
            weight = tl.load(weight_ptr + k, eviction_policy="evict_first")
            x = tl.load(x_ptr + k)
        else:
            left = tl.multiple_of(tl.minimum(end - k, BLOCK_K).to(tl.int32), ALIGN)
            mask = column < left
            weight = tl.load(weight_ptr + k, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + k, mask=mask, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += bias
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=n < num_columns)


def matvec(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: MatvecConfig | None = None
) -> Tensor:
    """weight · x + bias in x's dtype, as `octavo.reference.gemm.matvec` defines it: one launch.

    x: [K]; weight: [N, K], the values of a row side by side; bias: [N].
    """
    num_columns, depth = weight.shape
    out = torch.empty(num_columns, dtype=x.dtype, device=x.device)
    if num_columns == 0:
        return out
    config = config or default(depth, describe(x.device))
    row_stride = weight.stride(0) if num_columns > 1 else 0
    align = math.gcd(8, depth, row_stride)  # 8 values of 16 bits are the widest load
    launch(
        _matvec_kernel,
        (triton.cdiv(num_columns, config.block_n),),
        x.contiguous(),
        weight,
        None if bias is None else bias.contiguous(),
        out,
        num_columns,
        depth // align,
        row_stride // align,
        ALIGN=align,
        IS_EVEN=depth % config.block_k == 0,
        HAS_BIAS=bias is not None,
        IS_DEPENDENT=config.is_dependent,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=1,  # tiles go straight to registers
        **({"launch_pdl": True} if config.is_dependent else {}),
    )
    return out
