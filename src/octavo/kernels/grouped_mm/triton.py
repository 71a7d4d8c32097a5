"""grouped_mm kernel: rows sorted by expert, each times the FP8 weight of its expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.internals import internals
from octavo.kernels.device import describe
from octavo.kernels.grouped_mm.config import GroupedConfig, GroupedShape, default, max_tiles
from octavo.kernels.launch import launch
from octavo.kernels.scaled_mm.primitives import (
    columns_of,
    decode,
    load_scale,
    load_tile,
    num_chunks_of,
    scaled,
)
from octavo.numerics.granularity import Granularity, PerBlock, PerTensor
from octavo.numerics.quantize import Quantized

with internals("triton"):
    from triton.tools.tensor_descriptor import TensorDescriptor

SCALE_KINDS = {PerTensor: "tensor", PerBlock: "block"}  # all others have one scale per row


@triton.jit
def _expert_of(ends_ptr, tile, num_rows, num_experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert, first row, last row) of a row of tiles; rows of no expert come behind all others.

    Every program counts the tiles of all experts: cheaper than a kernel that does it once for all.
    """
    index = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + index, mask=index < num_experts, other=num_rows)
    begins = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index <= num_experts), other=0)
    begins = tl.where(index > num_experts, num_rows, begins)
    tiles = (tl.maximum(ends - begins, 0) + BLOCK_M - 1) // BLOCK_M
    last_tiles = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), axis=0)
    is_it = index == expert
    place = tile - tl.sum(tl.where(is_it, last_tiles - tiles, 0), axis=0)
    first = tl.sum(tl.where(is_it, begins, 0), axis=0) + place * BLOCK_M
    return expert, first, tl.sum(tl.where(is_it, ends, 0), axis=0)


@triton.jit
def _row_scale(scale_ptr, row, mask, k, depth, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """The scales of rows of a, which lie anywhere, at this column: a vector, or one for all."""
    if KIND == "tensor":
        scale = tl.load(scale_ptr)
    elif KIND == "row":
        scale = tl.load(scale_ptr + row, mask=mask, other=1.0)
    else:
        place = scale_ptr + row * tl.cdiv(depth, WIDTH) + k // WIDTH
        scale = tl.load(place, mask=mask, other=1.0)
    return scale


@triton.jit
def _grouped_kernel(
    a_ptr,
    b_ref,
    out_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    ends_ptr,
    token_ptr,
    num_rows,
    num_experts,
    num_columns,
    depth,
    a_stride,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    DECODE: tl.constexpr,
    IS_STREAMED: tl.constexpr,
    IS_TMA: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of one expert's results, transposed if the weight IS_STREAMED.

    Each chunk of K is added up by the tensor core and then in float32: two-level accumulation. A
    plain `a` meets a weight decoded to its dtype, by the GPU or from DECODE bytes. Programs of one
    row of tiles follow each other, so that they find a, and the next row the weight, in the L2.
    """
    A_AXIS: tl.constexpr = 1 if IS_STREAMED else 0
    num_column_tiles = tl.cdiv(num_columns, BLOCK_N)
    tile = tl.program_id(0) // num_column_tiles
    n = tl.program_id(0) % num_column_tiles * BLOCK_N
    expert, first, last = _expert_of(ends_ptr, tile, num_rows, num_experts, BLOCK_M, EXPERTS)
    if expert > num_experts:
        return
    last = tl.minimum(last, num_rows)
    is_expert = expert < num_experts
    expert = tl.minimum(expert, num_experts - 1).to(tl.int64)
    row = first + tl.arange(0, BLOCK_M).to(tl.int64)
    row_mask = row < last
    token = row
    if HAS_TOKENS:
        token = tl.load(token_ptr + row, mask=row_mask, other=0).to(tl.int64)
    column = n + tl.arange(0, BLOCK_N)
    column_mask = column < num_columns
    if B_SCALE == "row":
        b_scale_ptr += expert * num_columns
    if B_SCALE == "block":
        b_scale_ptr += expert * (tl.cdiv(num_columns, HEIGHT) * tl.cdiv(depth, WIDTH))
    if not IS_TMA:
        b_ref += expert * num_columns * depth

    if IS_STREAMED:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Rows of no expert are zero.
    num_chunks = tl.where(is_expert, num_chunks_of(depth, WIDTH, BLOCK_K), 0)
    for chunk in range(num_chunks):
        k, end = columns_of(chunk, depth, WIDTH, BLOCK_K)
        if IS_TMA:
            b = b_ref.load([(expert * num_columns).to(tl.int32) + n, k])
        else:
            b = load_tile(b_ref, n, k, end, num_columns, depth, BLOCK_N, BLOCK_K, False)
        inner = k + tl.arange(0, BLOCK_K)
        place = a_ptr + token[:, None] * a_stride + inner[None, :]
        a = tl.load(place, mask=row_mask[:, None] & (inner < end)[None, :], other=0.0)
        if A_SCALE == "none":
            if DECODE != "":
                b = decode(b, DECODE == "e5m2", a.dtype)
            elif b.dtype == tl.float8e5:
                b = b.to(tl.float16).to(a.dtype)  # Triton 3.6 makes bfloat16 numbers of e5m2's Inf
            else:
                b = b.to(a.dtype)
        part = tl.dot(b, a.T, input_precision="tf32x3") if IS_STREAMED else tl.dot(a, b.T)
        if A_SCALE == "block":
            scale = _row_scale(a_scale_ptr, token, row_mask, k, depth, A_SCALE, WIDTH)
            part = scaled(part, scale, A_AXIS)
        if B_SCALE == "block":
            scale = load_scale(
                b_scale_ptr, n, k, num_columns, depth, B_SCALE, HEIGHT, WIDTH, BLOCK_N
            )
            part = scaled(part, scale, 1 - A_AXIS)
        total += part

    if A_SCALE == "tensor" or A_SCALE == "row":
        scale = _row_scale(a_scale_ptr, token, row_mask, 0, depth, A_SCALE, 1)
        total = scaled(total, scale, A_AXIS)
    if B_SCALE != "block":
        scale = load_scale(b_scale_ptr, n, 0, num_columns, depth, B_SCALE, 1, 1, BLOCK_N)
        total = scaled(total, scale, 1 - A_AXIS)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * num_columns + column, mask=column_mask, other=0.0)
        total += tl.expand_dims(bias.to(tl.float32), A_AXIS)
    total = tl.where(is_expert, total, 0.0)
    place = tl.expand_dims(row, 1 - A_AXIS) * num_columns + tl.expand_dims(column, A_AXIS)
    mask = tl.expand_dims(row_mask, 1 - A_AXIS) & tl.expand_dims(column_mask, A_AXIS)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


def grouped_mm(
    a: Quantized | Tensor,
    b: Quantized,
    ends: Tensor,
    tokens: Tensor | None,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    config: GroupedConfig | None = None,
) -> Tensor:
    """Rows of a by their experts' weights, as `octavo.reference.gemm.grouped_mm` defines it.

    One launch, whose grid depends on shapes alone; the result is contiguous.
    """
    is_plain = isinstance(a, Tensor)
    x = a if is_plain else a.data
    x = x if x.stride(1) == 1 else x.contiguous()
    num_experts, num_columns, depth = b.data.shape
    num_rows = len(x if tokens is None else tokens)
    out = torch.empty(num_rows, num_columns, dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    if num_experts == 0:
        return out.zero_()
    width = next((g.columns for g in _granularities(a, b) if isinstance(g, PerBlock)), 0)
    shape = GroupedShape(num_rows, num_columns, depth, num_experts)
    config = config or default(shape, describe(x.device), width, is_fp8=not is_plain)
    weight, decode_as = b.data.contiguous(), ""
    if is_plain and config.is_decoded_by_bits:
        decode_as, weight = b.format.name, weight.view(torch.uint8)
    is_tma = config.is_tma and depth > 0 and depth % 16 == 0 and weight.data_ptr() % 16 == 0
    is_tma = is_tma and width % config.block_k == 0
    b_ref = weight
    if is_tma:
        flat = weight.view(num_experts * num_columns, depth)
        b_ref = TensorDescriptor.from_tensor(flat, [config.block_n, config.block_k])
    launch(
        _grouped_kernel,
        (max_tiles(shape, config.block_m) * triton.cdiv(num_columns, config.block_n),),
        x,
        b_ref,
        out,
        None if is_plain else a.scale.contiguous(),
        b.scale.contiguous(),
        None if bias is None else bias.contiguous(),
        ends.contiguous(),
        None if tokens is None else tokens.contiguous(),
        num_rows,
        num_experts,
        num_columns,
        depth,
        x.stride(0),
        A_SCALE="none" if is_plain else SCALE_KINDS.get(type(a.granularity), "row"),
        B_SCALE=SCALE_KINDS.get(type(b.granularity), "row"),
        WIDTH=width,
        HEIGHT=b.granularity.rows if isinstance(b.granularity, PerBlock) else 1,
        HAS_BIAS=bias is not None,
        HAS_TOKENS=tokens is not None,
        DECODE=decode_as,
        IS_STREAMED=config.is_streamed,
        IS_TMA=is_tma,
        EXPERTS=triton.next_power_of_2(num_experts + 2),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _granularities(a: Quantized | Tensor, b: Quantized) -> list[Granularity]:
    return [x.granularity for x in (a, b) if isinstance(x, Quantized)]
