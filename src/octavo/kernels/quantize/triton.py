"""Quantize kernels: rows and blocks in one launch; tensors and heads by amax, then the cast."""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.internals import internals
from octavo.kernels.device import describe
from octavo.kernels.launch import launch
from octavo.kernels.primitives import amax_to_scale, cast_fp8, finite_magnitude, to_fp8
from octavo.kernels.quantize.config import MAX_PARTIALS, QuantizeConfig, choose, default
from octavo.numerics.formats import Fp8Format, format_of
from octavo.numerics.granularity import Granularity, PerBlock, PerHead, PerTensor, PerToken
from octavo.numerics.quantize import Quantized

with internals("triton"):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Between these scales every step of `cast_rows` is exact or rounds a normal number.
MIN_FAST_SCALE = tl.constexpr(2.0**-80)
MAX_FAST_SCALE = tl.constexpr(2.0**80)


@triton.jit
def cast_rows(x, scale, dtype: tl.constexpr, MAX: tl.constexpr, HAS_FMA: tl.constexpr):
    """x / scale in FP8, one scale for each row, with the bits of a division rounded once.

    A division costs some 20 instructions. Here each row has one, for the inverse of its scale; two
    steps of Newton's method with exact remainders then round each quotient as a division does
    (Markstein's theorem). Written so that zeros keep their sign; Inf and NaN come through.
    """
    numerator = x.to(tl.float32)
    is_fast = (tl.min(scale, axis=0) >= MIN_FAST_SCALE) & (tl.max(scale, axis=0) <= MAX_FAST_SCALE)
    if HAS_FMA and is_fast:
        inverse = -tl.div_rn(1.0, scale)[:, None]
        product = numerator * -inverse
        quotient = tl.fma(tl.fma(product, scale[:, None], -numerator), inverse, product)
        quotient = tl.fma(tl.fma(quotient, scale[:, None], -numerator), inverse, quotient)
        # Inf has no remainder: it saturates as the product, like everything beyond the format.
        quotient = tl.where(tl.abs(product) < 2 * MAX, quotient, product)
    else:
        quotient = tl.div_rn(numerator, scale[:, None])
    return cast_fp8(quotient, dtype, HAS_FMA)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    given_ptr,
    num_rows,
    num_columns,
    row_stride,
    margin_over_max,
    MAX: tl.constexpr,
    IS_STATIC: tl.constexpr,
    IS_SHARED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_FMA: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Some rows with one scale each; IS_SHARED: all get the given one, and it is written for each.

    Rows of NUM_CHUNKS tiles stay in registers; with 0 they are read twice, from the cache at last.
    HAS_TAIL: the last tile is not full.
    """
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offset = tl.arange(0, BLOCK_COLUMNS)
    row_mask = row < num_rows
    x_rows = x_ptr + row[:, None] * row_stride
    data_rows = data_ptr + row[:, None] * num_columns
    dtype: tl.constexpr = data_ptr.dtype.element_ty
    if IS_STATIC:
        if IS_SHARED:
            scale = tl.load(given_ptr + row * 0, mask=row_mask, other=1.0)
            tl.store(scale_ptr + row, scale, mask=row_mask)
        else:
            scale = tl.load(scale_ptr + row, mask=row_mask, other=1.0)
    elif NUM_CHUNKS > 0:
        chunks = ()
        amax = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for index in tl.static_range(NUM_CHUNKS):
            at = index * BLOCK_COLUMNS + offset
            is_value = row_mask[:, None]
            if HAS_TAIL:
                is_value = is_value & (at < num_columns)[None, :]
            x = tl.load(x_rows + at[None, :], mask=is_value, other=0.0)
            amax = tl.maximum(amax, finite_magnitude(x))
            chunks = chunks + (x,)
        scale = amax_to_scale(tl.max(amax, axis=1), margin_over_max, POWER_OF_TWO)
        tl.store(scale_ptr + row, scale, mask=row_mask)
        for index in tl.static_range(NUM_CHUNKS):
            at = index * BLOCK_COLUMNS + offset
            is_value = row_mask[:, None]
            if HAS_TAIL:
                is_value = is_value & (at < num_columns)[None, :]
            data = cast_rows(chunks[index], scale, dtype, MAX, HAS_FMA)
            tl.store(data_rows + at[None, :], data, mask=is_value)
        return
    else:
        amax = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, num_columns, BLOCK_COLUMNS):
            column = start + offset
            mask = row_mask[:, None] & (column < num_columns)[None, :]
            x = tl.load(x_rows + column[None, :], mask=mask, other=0.0)
            amax = tl.maximum(amax, finite_magnitude(x))
        scale = amax_to_scale(tl.max(amax, axis=1), margin_over_max, POWER_OF_TWO)
        tl.store(scale_ptr + row, scale, mask=row_mask)
    for start in range(0, num_columns, BLOCK_COLUMNS):
        column = start + offset
        mask = row_mask[:, None] & (column < num_columns)[None, :]
        x = tl.load(x_rows + column[None, :], mask=mask, other=0.0)
        data = cast_rows(x, scale, dtype, MAX, HAS_FMA)
        tl.store(data_rows + column[None, :], data, mask=mask)


@triton.jit
def _quantize_blocks_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    num_rows,
    num_columns,
    matrix_stride,
    row_stride,
    group_columns,
    margin_over_max,
    IS_STATIC: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HAS_ASM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Several blocks of 1 × group_columns, or one block of GROUP_ROWS × group_columns."""
    ROWS: tl.constexpr = BLOCK_ROWS if GROUP_ROWS == 1 else GROUP_ROWS
    num_row_groups, num_column_groups = tl.num_programs(0), tl.num_programs(1)
    row_block = tl.program_id(0).to(tl.int64)
    column_group = tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    x_ptr += matrix * matrix_stride
    data_ptr += matrix * num_rows * num_columns
    in_row = tl.arange(0, BLOCK_ROWS)
    in_column = tl.arange(0, BLOCK_COLUMNS)
    row = row_block * ROWS + in_row
    column = column_group * group_columns + in_column
    row_mask = (in_row < ROWS) & (row < num_rows)
    mask = row_mask[:, None] & ((in_column < group_columns) & (column < num_columns))[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0)
    if GROUP_ROWS == 1:
        place = scale_ptr + (matrix * num_rows + row) * num_column_groups + column_group
        if IS_STATIC:
            scale = tl.load(place, mask=row_mask, other=1.0)
        else:
            amax = tl.max(finite_magnitude(x), axis=1)
            scale = amax_to_scale(amax, margin_over_max, POWER_OF_TWO)
            tl.store(place, scale, mask=row_mask)
        data = to_fp8(x, scale[:, None], data_ptr.dtype.element_ty, HAS_ASM)
    else:
        place = scale_ptr + (matrix * num_row_groups + row_block) * num_column_groups + column_group
        if IS_STATIC:
            scale = tl.load(place)
        else:
            amax = tl.max(tl.max(finite_magnitude(x), axis=1), axis=0)
            scale = amax_to_scale(amax, margin_over_max, POWER_OF_TWO)
            tl.store(place, scale)
        data = to_fp8(x, scale, data_ptr.dtype.element_ty, HAS_ASM)
    tl.store(data_ptr + row[:, None] * num_columns + column[None, :], data, mask=mask)


@triton.jit
def _amax_kernel(
    x_ptr,
    partial_ptr,
    num_rows,
    num_columns,
    row_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The amax of every num_programs(0)-th tile of one head; rows are [token, head]."""
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    num_tokens = num_rows // num_heads
    amax = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_ROWS), tl.num_programs(0)):
        token = (block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        row = token * num_heads + head
        for start in range(0, num_columns, BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS)
            mask = (token < num_tokens)[:, None] & (column < num_columns)[None, :]
            x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0)
            amax = tl.maximum(amax, finite_magnitude(x))
    largest = tl.max(tl.max(amax, axis=1), axis=0)
    tl.store(partial_ptr + head * tl.num_programs(0) + tl.program_id(0), largest)


@triton.jit
def _cast_heads_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    partial_ptr,
    num_rows,
    num_columns,
    row_stride,
    margin_over_max,
    NUM_PARTIALS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HAS_ASM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A tile of one head with the head's scale: given, or from NUM_PARTIALS amax values."""
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    num_tokens = num_rows // num_heads
    if NUM_PARTIALS == 0:
        scale = tl.load(scale_ptr + head)
    else:
        index = tl.arange(0, triton.next_power_of_2(NUM_PARTIALS))
        partial_mask = index < NUM_PARTIALS
        partials = tl.load(partial_ptr + head * NUM_PARTIALS + index, mask=partial_mask, other=0.0)
        scale = amax_to_scale(tl.max(partials, axis=0), margin_over_max, POWER_OF_TWO)
        if tl.program_id(0) == 0 and tl.program_id(2) == 0:
            tl.store(scale_ptr + head, scale)
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = token * num_heads + head
    column = tl.program_id(2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (token < num_tokens)[:, None] & (column < num_columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=mask, other=0.0)
    data = to_fp8(x, scale, data_ptr.dtype.element_ty, HAS_ASM)
    tl.store(data_ptr + row[:, None] * num_columns + column[None, :], data, mask=mask)


def quantize(
    x: Tensor,
    granularity: Granularity,
    fmt: Fp8Format,
    *,
    scale: Tensor | None,
    margin: float,
    power_of_two: bool,
    config: QuantizeConfig | None = None,
) -> Quantized:
    """x in FP8, as `octavo.numerics.quantize.quantize` defines it; the result is contiguous."""
    is_static = scale is not None
    if x.dim() == 0 or x.stride(-1) != 1:
        x = x.contiguous()
    data = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    if scale is None:
        shape = granularity.scale_shape(tuple(x.shape))
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if x.numel():
        match granularity:
            case PerTensor() | PerHead():
                run = _run_heads
            case PerBlock():
                run = _run_blocks
            case _:
                run = _run_rows
        factor = margin / fmt.max
        run(x, data, scale, granularity, factor, is_static, power_of_two, config)
    elif not is_static:
        scale.fill_(1.0)
    return Quantized(data, scale, granularity)


def quantize_rows(x: Tensor, given: Tensor, fmt: Fp8Format) -> Quantized:
    """x with one scale for all of it, [], which the result has once for each row."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    data = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    granularity = PerToken()
    scale = torch.empty(granularity.scale_shape(tuple(x.shape)), device=x.device)
    if x.numel():
        _run_rows(x, data, scale, granularity, 1.0, True, False, None, given)
    return Quantized(data, scale, granularity)


def _run_rows(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    granularity: Granularity,
    factor: float,
    is_static: bool,
    power_of_two: bool,
    config: QuantizeConfig | None,
    given: Tensor | None = None,
) -> None:
    rows = x.reshape(-1, x.shape[-1])
    device = describe(x.device)
    config = config or choose(tuple(rows.shape), granularity, device)
    fixed = _row_arguments(
        (*rows.shape, rows.stride(0)),
        factor,
        format_of(data.dtype).max,
        is_static,
        given is not None,
        power_of_two,
        x.is_cuda,
        device.has_dependents,
        config,
    )
    grid = (triton.cdiv(rows.shape[0], config.block_rows),)
    given = scale if given is None else given
    launch(_quantize_rows_kernel, grid, rows, data, scale, given, **fixed)


@lru_cache(maxsize=1024)  # more than models have layers of different sizes
def _row_arguments(
    sizes: tuple[int, int, int],
    factor: float,
    largest: float,
    is_static: bool,
    is_shared: bool,
    power_of_two: bool,
    is_cuda: bool,
    is_dependent: bool,
    config: QuantizeConfig,
) -> dict[str, Any]:
    """What the kernel takes beside tensors; sizes: rows, columns, and the stride of rows."""
    num_rows, num_columns, row_stride = sizes
    arguments = {
        "num_rows": num_rows,
        "num_columns": num_columns,
        "row_stride": row_stride,
        "margin_over_max": factor,
        "MAX": largest,
        "IS_STATIC": is_static,
        "IS_SHARED": is_shared,
        "POWER_OF_TWO": power_of_two,
        "NUM_CHUNKS": _num_chunks(num_columns, config),
        "HAS_TAIL": num_columns % config.block_columns != 0,
        "HAS_FMA": is_cuda,  # the interpreter rounds twice
        "IS_DEPENDENT": is_dependent,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_COLUMNS": config.block_columns,
        "num_warps": config.num_warps,
    }
    return arguments | ({"launch_pdl": True} if is_dependent else {})


def _num_chunks(num_columns: int, config: QuantizeConfig) -> int:
    """Tiles kept in registers: those of the settings, if they hold a whole row."""
    is_whole = num_columns <= config.num_chunks * config.block_columns
    return config.num_chunks if is_whole else 0


def _run_blocks(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    granularity: PerBlock,
    factor: float,
    is_static: bool,
    power_of_two: bool,
    config: QuantizeConfig | None,
) -> None:
    group_rows, group_columns = granularity.rows, granularity.columns
    # Blocks of several rows end with each matrix; single rows know no matrices.
    num_rows = x.shape[-2] if group_rows > 1 else x.numel() // x.shape[-1]
    matrices = x.reshape(-1, num_rows, x.shape[-1])
    num_columns = x.shape[-1]
    config = config or default((num_rows, num_columns), granularity)
    block = config.block_rows if group_rows == 1 else group_rows
    grid = (
        triton.cdiv(num_rows, block),
        triton.cdiv(num_columns, group_columns),
        len(matrices),
    )
    launch(
        _quantize_blocks_kernel,
        grid,
        matrices,
        data,
        scale,
        num_rows,
        num_columns,
        matrices.stride(0),
        matrices.stride(1),
        group_columns,
        factor,
        IS_STATIC=is_static,
        POWER_OF_TWO=power_of_two,
        GROUP_ROWS=group_rows,
        HAS_ASM=x.is_cuda,
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLUMNS=config.block_columns,
        num_warps=config.num_warps,
    )


def _run_heads(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    granularity: Granularity,
    factor: float,
    is_static: bool,
    power_of_two: bool,
    config: QuantizeConfig | None,
) -> None:
    rows, num_heads = _rows_of_heads(x, granularity)  # last dimension contiguous
    num_rows, num_columns = rows.shape
    config = config or default((num_rows, num_columns), granularity)
    num_tiles = triton.cdiv(num_rows // num_heads, config.block_rows)
    block = {"BLOCK_ROWS": config.block_rows, "BLOCK_COLUMNS": config.block_columns}
    num_partials = 0 if is_static else min(num_tiles, max(1, MAX_PARTIALS // num_heads))
    partials = torch.empty(num_heads * num_partials, dtype=torch.float32, device=x.device)
    if not is_static:
        launch(
            _amax_kernel,
            (num_partials, num_heads),
            rows,
            partials,
            num_rows,
            num_columns,
            rows.stride(0),
            **block,
            num_warps=config.num_warps,
        )
    grid = (num_tiles, num_heads, triton.cdiv(num_columns, config.block_columns))
    launch(
        _cast_heads_kernel,
        grid,
        rows,
        data,
        scale,
        partials,
        num_rows,
        num_columns,
        rows.stride(0),
        factor,
        NUM_PARTIALS=num_partials,
        POWER_OF_TWO=power_of_two,
        HAS_ASM=x.is_cuda,
        **block,
        num_warps=config.num_warps,
    )


def _rows_of_heads(x: Tensor, granularity: Granularity) -> tuple[Tensor, int]:
    """x as [tokens × heads, columns] and its number of heads: 1 for a scale per tensor."""
    if isinstance(granularity, PerHead):
        return x.reshape(-1, x.shape[-1]), x.shape[-2]
    if x.is_contiguous():
        # Rows of a length that fills the tile, whatever the tensor's own are.
        return x.view(-1, math.gcd(x.numel(), 1024)), 1
    return x.reshape(-1, x.shape[-1]), 1
