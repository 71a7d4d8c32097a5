"""Matrix products with an FP8 weight: in large tiles, or streaming the weight past few rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.internals import internals
from octavo.kernels.device import describe
from octavo.kernels.launch import launch
from octavo.kernels.primitives import amax_to_scale, finite_magnitude
from octavo.kernels.quantize.triton import cast_rows, quantize
from octavo.kernels.scaled_mm.config import (
    MAX_TOKEN_WIDTH,
    MatmulShape,
    StreamConfig,
    TileConfig,
    choose,
)
from octavo.kernels.scaled_mm.primitives import (
    columns_of,
    decode,
    load_scale,
    load_tile,
    num_chunks_of,
    prefetch_rows,
    scaled,
    tile_of,
)
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import Granularity, PerBlock, PerTensor, PerToken
from octavo.numerics.quantize import Quantized

with internals("triton"):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

SCALE_KINDS = {PerTensor: "tensor", PerBlock: "block"}  # all others have one scale per row


@triton.jit
def _tile_kernel(
    a_ref,
    b_ref,
    out_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    depth,
    a_stride,
    b_stride,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_TMA: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """FP8 × FP8 in tiles of the result, by as many programs as there are, or fewer that go on.

    Each chunk of K is added up by the tensor core and then in float32: two-level accumulation. A
    tile of two parts needs registers for the tensor core's sums of one.
    """
    PART: tl.constexpr = BLOCK_M // NUM_PARTS
    num_tiles = tl.cdiv(num_rows, BLOCK_M) * tl.cdiv(num_columns, BLOCK_N)
    num_chunks = num_chunks_of(depth, WIDTH, BLOCK_K)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_of(tile, num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP)
        total = tl.zeros([PART, BLOCK_N], tl.float32)
        lower = tl.zeros([PART, BLOCK_N], tl.float32)  # of the second part, if there is one
        for chunk in range(num_chunks):
            k, end = columns_of(chunk, depth, WIDTH, BLOCK_K)
            b = load_tile(b_ref, n, k, end, num_columns, b_stride, BLOCK_N, BLOCK_K, IS_TMA)
            a = load_tile(a_ref, m, k, end, num_rows, a_stride, PART, BLOCK_K, IS_TMA)
            if B_SCALE == "block":
                b_scale = load_scale(
                    b_scale_ptr, n, k, num_columns, depth, B_SCALE, HEIGHT, WIDTH, BLOCK_N
                )
            if A_SCALE == "block":
                a_scale = load_scale(a_scale_ptr, m, k, num_rows, depth, A_SCALE, 1, WIDTH, PART)
            part = tl.dot(a, b.T)
            if A_SCALE == "block":
                part = scaled(part, a_scale, 0)
            if B_SCALE == "block":
                part = scaled(part, b_scale, 1)
            total += part
            if NUM_PARTS == 2:
                a = load_tile(a_ref, m + PART, k, end, num_rows, a_stride, PART, BLOCK_K, IS_TMA)
                if A_SCALE == "block":
                    a_scale = load_scale(
                        a_scale_ptr, m + PART, k, num_rows, depth, A_SCALE, 1, WIDTH, PART
                    )
                part = tl.dot(a, b.T)
                if A_SCALE == "block":
                    part = scaled(part, a_scale, 0)
                if B_SCALE == "block":
                    part = scaled(part, b_scale, 1)
                lower += part
        for index in tl.static_range(NUM_PARTS):
            result = total if index == 0 else lower
            first = m + index * PART
            if A_SCALE != "block":
                scale = load_scale(a_scale_ptr, first, 0, num_rows, depth, A_SCALE, 1, 1, PART)
                result = scaled(result, scale, 0)
            if B_SCALE != "block":
                scale = load_scale(b_scale_ptr, n, 0, num_columns, depth, B_SCALE, 1, 1, BLOCK_N)
                result = scaled(result, scale, 1)
            row = first + tl.arange(0, PART).to(tl.int64)
            column = n + tl.arange(0, BLOCK_N)
            column_mask = column < num_columns
            if HAS_BIAS:
                bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0)
                result += bias.to(tl.float32)[None, :]
            tl.store(
                out_ptr + row[:, None] * num_columns + column[None, :],
                result.to(out_ptr.dtype.element_ty),
                mask=(row < num_rows)[:, None] & column_mask[None, :],
            )


@triton.jit
def _stream_kernel(
    a_ref,
    b_ref,
    out_ptr,
    partial_ptr,
    counter_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    depth,
    a_stride,
    b_stride,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    IS_TMA: tl.constexpr,
):
    """A tile of the result, transposed: the weight is the operand with many rows.

    a may be plain; the weight is then decoded to a's dtype: by the GPU, or from "e4m3" or "e5m2"
    bytes if DECODE says so. Programs may share a tile by splitting K; the last one to finish adds
    their sums, always in the same order.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    m, n = tile_of(tile, num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP)
    num_chunks = num_chunks_of(depth, WIDTH, BLOCK_K)
    begin = split * num_chunks // NUM_SPLITS
    end_chunk = (split + 1) * num_chunks // NUM_SPLITS
    if PREFETCH > 0:
        first, _ = columns_of(begin, depth, WIDTH, BLOCK_K)
        _, last = columns_of(end_chunk - 1, depth, WIDTH, BLOCK_K)
        last = tl.minimum(last, first + PREFETCH)
        prefetch_rows(b_ref, n, first, last, num_columns, b_stride, BLOCK_N)
    if IS_DEPENDENT:
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(begin, end_chunk):
        k, end = columns_of(chunk, depth, WIDTH, BLOCK_K)
        b = load_tile(b_ref, n, k, end, num_columns, b_stride, BLOCK_N, BLOCK_K, IS_TMA)
        a = load_tile(a_ref, m, k, end, num_rows, a_stride, BLOCK_M, BLOCK_K, IS_TMA)
        if A_SCALE == "none":
            if DECODE != "":
                b = decode(b, DECODE == "e5m2", a.dtype)
            elif b.dtype == tl.float8e5:
                b = b.to(tl.float16).to(a.dtype)  # Triton 3.6 makes bfloat16 numbers of e5m2's Inf
            else:
                b = b.to(a.dtype)
        if A_SCALE == "none" and B_SCALE != "block":
            total = tl.dot(b, a.T, total, input_precision="tf32x3")
        elif BLOCK_K > 128:
            total = tl.dot(b, a.T, total, max_num_imprecise_acc=128)
        else:
            part = tl.dot(b, a.T, input_precision="tf32x3")
            if A_SCALE == "block":
                scale = load_scale(a_scale_ptr, m, k, num_rows, depth, A_SCALE, 1, WIDTH, BLOCK_M)
                part = scaled(part, scale, 1)
            if B_SCALE == "block":
                scale = load_scale(
                    b_scale_ptr, n, k, num_columns, depth, B_SCALE, HEIGHT, WIDTH, BLOCK_N
                )
                part = scaled(part, scale, 0)
            total += part
    row = m + tl.arange(0, BLOCK_M).to(tl.int64)
    column = n + tl.arange(0, BLOCK_N)
    place = row[None, :] * num_columns + column[:, None]
    mask = (row < num_rows)[None, :] & (column < num_columns)[:, None]
    if NUM_SPLITS > 1:
        partial = (split * num_rows + row)[None, :] * num_columns + column[:, None]
        tl.store(partial_ptr + partial, total, mask=mask)
        tl.debug_barrier()  # every thread's sums before the one that counts
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") != NUM_SPLITS - 1:
            return
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for index in tl.static_range(NUM_SPLITS):
            partial = (index * num_rows + row)[None, :] * num_columns + column[:, None]
            total += tl.load(partial_ptr + partial, mask=mask, other=0.0, cache_modifier=".cg")
    if A_SCALE == "tensor" or A_SCALE == "row":
        scale = load_scale(a_scale_ptr, m, 0, num_rows, depth, A_SCALE, 1, 1, BLOCK_M)
        total = scaled(total, scale, 1)
    if B_SCALE != "block":
        scale = load_scale(b_scale_ptr, n, 0, num_columns, depth, B_SCALE, 1, 1, BLOCK_N)
        total = scaled(total, scale, 0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < num_columns, other=0.0)
        total += bias.to(tl.float32)[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_tokens_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    counter_ptr,
    num_columns,
    row_stride,
    num_counters,
    margin_over_max,
    IS_STATIC: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    HAS_COUNTERS: tl.constexpr,
    HAS_FMA: tl.constexpr,
    IS_PRIMARY: tl.constexpr,
):
    """A part of one token in FP8; the product that follows may start, and finds counters at 0.

    Every part looks at the whole token for its scale, which is quicker than to wait for the others,
    unless there is one scale for all tokens, IS_STATIC.
    """
    if IS_PRIMARY:
        gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr += row * row_stride
    offset = tl.arange(0, BLOCK)
    if not IS_STATIC:
        x = tl.load(x_ptr + offset, mask=offset < num_columns, other=0.0)
    column = part * PART + tl.arange(0, PART)
    mask = column < num_columns
    values = tl.load(x_ptr + column, mask=mask, other=0.0)
    if HAS_COUNTERS:
        first = (tl.program_id(0) * tl.num_programs(1) + part) * BLOCK
        for start in range(first, num_counters, tl.num_programs(0) * tl.num_programs(1) * BLOCK):
            tl.store(counter_ptr + start + offset, 0, mask=start + offset < num_counters)
    if IS_STATIC:
        scale = tl.load(scale_ptr + tl.arange(0, 1))
    else:
        amax = tl.max(finite_magnitude(x)[None, :], axis=1)
        scale = amax_to_scale(amax, margin_over_max, False)
        if part == 0:
            tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    data = cast_rows(values[None, :], scale, data_ptr.dtype.element_ty, MAX, HAS_FMA)
    place = data_ptr + row * num_columns + column
    tl.store(place[None, :], data, mask=mask[None, :])


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    activation: Granularity | None = None,
    scale: Tensor | None = None,
    config: TileConfig | StreamConfig | None = None,
) -> Tensor:
    """a · bᵀ + bias, as `octavo.reference.gemm.scaled_mm` defines it; the result is contiguous.

    activation: how a plain `a` is quantized first; left out, the weight is decoded to a's dtype.
    scale: per tensor, where it is not found here.
    """
    is_plain = isinstance(a, Tensor)
    x = a if is_plain else a.data
    out = torch.empty(len(x), len(b.data), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    granularity = activation if is_plain else a.granularity
    if config is None:
        shape = MatmulShape(len(x), len(b.data), x.shape[1])
        width = _width(granularity, b.granularity)
        config = choose(shape, describe(x.device), width, is_fp8=granularity is not None)
    counters = None
    is_dependent = False
    if isinstance(config, StreamConfig) and config.num_splits > 1:
        num_tiles = triton.cdiv(len(x), config.block_m) * triton.cdiv(len(b.data), config.block_n)
        counters = torch.empty(num_tiles, dtype=torch.int32, device=x.device)
    is_by_token = isinstance(activation, PerToken) or scale is not None
    is_streamed_token = is_by_token and isinstance(config, StreamConfig)
    if is_streamed_token and 0 < x.shape[1] <= MAX_TOKEN_WIDTH:
        is_dependent = config.is_dependent
        a = _quantize_tokens(x, scale, counters, is_dependent)
    else:
        if activation is not None:
            a = quantize(x, activation, E4M3, scale=scale, margin=1.0, power_of_two=False)
        if counters is not None:
            counters.zero_()
    if isinstance(config, TileConfig):
        _run_tiles(a, b, bias, out, config)
    else:
        _run_stream(a, b, bias, out, counters, is_dependent, config)
    return out


def _quantize_tokens(
    x: Tensor, given: Tensor | None, counters: Tensor | None, is_primary: bool
) -> Quantized:
    """x per token, for a product that follows at once; the counters are set to 0.

    given: one scale for all tokens.
    """
    x = _rows_contiguous(x)
    data = torch.empty(x.shape, dtype=E4M3.dtype, device=x.device)
    scale = given
    if scale is None:
        scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    part = min(block, 2048)
    launch(
        _quantize_tokens_kernel,
        (len(x), triton.cdiv(x.shape[1], part)),
        x,
        data,
        scale,
        counters,
        x.shape[1],
        x.stride(0),
        0 if counters is None else len(counters),
        1.0 / E4M3.max,
        IS_STATIC=given is not None,
        MAX=E4M3.max,
        BLOCK=block,
        PART=part,
        HAS_COUNTERS=counters is not None,
        HAS_FMA=x.is_cuda,  # the interpreter rounds twice
        IS_PRIMARY=is_primary,
        num_warps=max(1, min(16, block // 512)),
    )
    return Quantized(data, scale, PerToken() if given is None else PerTensor())


def _run_tiles(
    a: Quantized, b: Quantized, bias: Tensor | None, out: Tensor, config: TileConfig
) -> None:
    x, weight = _rows_contiguous(a.data), _rows_contiguous(b.data)
    options = _options(a.granularity, b.granularity, bias, config)
    num_programs = triton.cdiv(out.shape[0], config.block_m) * triton.cdiv(
        out.shape[1], config.block_n
    )
    if config.programs_per_sm:
        num_slots = config.programs_per_sm * max(1, describe(x.device).num_sms)
        num_programs = min(num_programs, num_slots)
    is_tma = _fits_tma(x, weight, config) and options["WIDTH"] % config.block_k == 0
    a_ref, b_ref = x, weight
    if is_tma:
        part = config.block_m // config.num_parts
        a_ref = TensorDescriptor.from_tensor(x, [part, config.block_k])
        b_ref = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])
    launch(
        _tile_kernel,
        (num_programs,),
        a_ref,
        b_ref,
        out,
        a.scale.contiguous(),
        b.scale.contiguous(),
        None if bias is None else bias.contiguous(),
        *out.shape,
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        IS_TMA=is_tma,
        NUM_PARTS=config.num_parts,
        FLATTEN=config.is_flat,
        **options,
    )


def _run_stream(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None,
    out: Tensor,
    counters: Tensor | None,
    is_dependent: bool,
    config: StreamConfig,
) -> None:
    is_plain = isinstance(a, Tensor)
    x, weight = _rows_contiguous(a if is_plain else a.data), _rows_contiguous(b.data)
    decode = ""
    if is_plain and config.is_decoded_by_bits:
        decode = b.format.name
        weight = weight.view(torch.uint8)
    partials = None
    if counters is not None:
        partials = out.new_empty((config.num_splits, *out.shape), dtype=torch.float32)
    num_tiles = triton.cdiv(out.shape[0], config.block_m) * triton.cdiv(
        out.shape[1], config.block_n
    )
    options = _options(None if is_plain else a.granularity, b.granularity, bias, config)
    is_tma = _fits_tma(x, weight, config) and options["WIDTH"] % config.block_k == 0
    a_ref, b_ref = x, weight
    if is_tma:
        a_ref = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k])
        b_ref = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])
    launch(
        _stream_kernel,
        (num_tiles, config.num_splits),
        a_ref,
        b_ref,
        out,
        partials,
        counters,
        None if is_plain else a.scale.contiguous(),
        b.scale.contiguous(),
        None if bias is None else bias.contiguous(),
        *out.shape,
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        DECODE=decode,
        NUM_SPLITS=config.num_splits,
        PREFETCH=config.prefetch if weight.is_cuda and not is_tma else 0,
        IS_DEPENDENT=is_dependent,
        IS_TMA=is_tma,
        **options,
        **({"launch_pdl": True} if is_dependent else {}),
    )


def _options(
    a: Granularity | None,
    b: Granularity,
    bias: Tensor | None,
    config: TileConfig | StreamConfig,
) -> dict[str, object]:
    """What both kernels take: kinds of scales, and the tile."""
    return {
        "A_SCALE": "none" if a is None else SCALE_KINDS.get(type(a), "row"),
        "B_SCALE": SCALE_KINDS.get(type(b), "row"),
        "WIDTH": _width(a, b),
        "HEIGHT": b.rows if isinstance(b, PerBlock) else 1,
        "HAS_BIAS": bias is not None,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _width(a: Granularity | None, b: Granularity) -> int:
    """How many columns share a scale where a or b has blocks, else 0."""
    return next((x.columns for x in (a, b) if isinstance(x, PerBlock)), 0)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _fits_tma(x: Tensor, weight: Tensor, config: TileConfig | StreamConfig) -> bool:
    """Whether tiles can be copied in bulk: rows apart that begin at multiples of 16 bytes."""
    has_steps = all(
        y.stride(0) * y.element_size() % 16 == 0
        and y.stride(0) >= y.shape[1]  # not one row for all, as expand() makes
        and y.data_ptr() % 16 == 0
        for y in (x, weight)
    )
    return config.is_tma and has_steps and x.shape[1] > 0
