"""Pieces of the scaled_mm kernels: tiles, chunks of K, scales, FP8 bytes."""

import triton
import triton.language as tl


@triton.jit
def decode(bits, IS_E5M2: tl.constexpr, dtype: tl.constexpr):
    """FP8 bytes as numbers, exact, for GPUs without the type: the bits move to float16's places."""
    bits = bits.to(tl.int16)
    if IS_E5M2:
        x = (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        magnitude = bits & 0x7F
        x = ((bits & 0x80) << 8 | magnitude << 7).to(tl.float16, bitcast=True).to(tl.float32)
        # float16 has a bias of 15, e4m3 of 7, subnormals included; the largest code is NaN.
        x = tl.where(magnitude == 0x7F, float("nan"), x * 256.0)
    return x.to(dtype)


@triton.jit
def load_tile(
    ref,
    first_row,
    first_column,
    last_column,
    num_rows,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_TMA: tl.constexpr,
):
    """A tile of an operand, zero outside of it; ref is a tensor descriptor or a pointer."""
    if IS_TMA:
        tile = ref.load([first_row, first_column])
    else:
        row = first_row + tl.arange(0, ROWS).to(tl.int64)
        column = first_column + tl.arange(0, COLUMNS)
        mask = (row < num_rows)[:, None] & (column < last_column)[None, :]
        tile = tl.load(ref + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def prefetch_rows(ptr, first_row, first_column, last_column, num_rows, stride, ROWS: tl.constexpr):
    """Rows of bytes on their way to the L2 cache, in lines of 128, before anyone waits for them."""
    row = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    for first in range(first_column, last_column, 256):
        column = tl.minimum(first + 128 * tl.arange(0, 2), last_column - 1)
        address = (ptr + row[:, None] * stride + column[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def tile_of(index, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP):
    """The place of the index-th tile: GROUP rows of tiles at a time share columns in the L2."""
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    num_in_group = GROUP * tl.cdiv(num_columns, COLUMNS)
    first = index // num_in_group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    row = first + index % num_in_group % height
    return row * ROWS, index % num_in_group // height * COLUMNS


@triton.jit
def columns_of(chunk, depth, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where a chunk of K begins and where its data ends: no chunk crosses a block of scales."""
    if WIDTH % BLOCK_K == 0:  # also without blocks, where WIDTH is 0
        first = chunk * BLOCK_K
        last = depth
    else:
        CHUNKS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
        block = chunk // CHUNKS
        first = block * WIDTH + chunk % CHUNKS * BLOCK_K
        last = tl.minimum(depth, (block + 1) * WIDTH)
    return first, last


@triton.jit
def num_chunks_of(depth, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """How many chunks K has."""
    if WIDTH % BLOCK_K == 0:
        num_chunks = tl.cdiv(depth, BLOCK_K)
    else:
        num_chunks = tl.cdiv(depth, WIDTH) * ((WIDTH + BLOCK_K - 1) // BLOCK_K)
    return num_chunks


@triton.jit
def load_scale(
    scale_ptr,
    first_row,
    first_column,
    num_rows,
    depth,
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The scales of ROWS rows of an operand at this column: a vector, or one for all."""
    row = first_row + tl.arange(0, ROWS).to(tl.int64)
    if KIND == "tensor":
        scale = tl.load(scale_ptr)
    elif KIND == "row":
        scale = tl.load(scale_ptr + row, mask=row < num_rows, other=1.0)
    else:
        scale_ptr += first_column // WIDTH
        num_blocks = tl.cdiv(depth, WIDTH)
        if HEIGHT % ROWS == 0:
            scale = tl.load(scale_ptr + first_row // HEIGHT * num_blocks)
        else:
            place = scale_ptr + row // HEIGHT * num_blocks
            scale = tl.load(place, mask=row < num_rows, other=1.0)
    return scale


@triton.jit
def scaled(x, scale, AXIS: tl.constexpr):
    """x times its scales, which run along AXIS unless there is one for all."""
    return x * scale if len(scale.shape) == 0 else x * tl.expand_dims(scale, 1 - AXIS)
