"""Tiles of q, k and v: what a program covers, how it is read, turned, and scaled.

Tuples travel through these functions. `part`: that of `place`. `tables`: (cos, sin, rows, strides
of both). SHAPE: (HEAD_DIM, PADDED, ALIGN, HAS_BATCH, PER_HEAD, BLOCK_TOKENS, BLOCK_WIDTH); TURN:
(how q and k are turned, ROTARY_DIM, TABLE_ALIGN, HAS_REPEATS). Scales have three more. `given`:
(scales, their stride, partial amax values, counts, 1 / largest value of the format). `ring`:
(values, count of NaN and Inf, slot, length). SCALING: (IS_DYNAMIC, HAS_RINGS, NUM_PARTIALS,
RING_BLOCK, HAS_FMA). Functions read these constants by index: Triton newer than 3.6 makes tensors
of constants that are unpacked.
"""

import triton
import triton.language as tl

from octavo.kernels.primitives import (
    amax_to_scale,
    cast_fp8,
    count_nonfinite,
    divide,
    divisor,
    finite_magnitude,
    pack_fp8,
    pair_places,
    rotate_pair,
)
from octavo.kernels.quantize_qkv.place_primitives import place, place_behind

# How q and k are turned.
NONE = tl.constexpr(0)
HALVES = tl.constexpr(1)
INTERLEAVED = tl.constexpr(2)


@triton.jit
def tile(index, num_heads, UNITS: tl.constexpr, BLOCK: tl.constexpr, PER_HEAD: tl.constexpr):
    """What tile `index` covers: a block of rows, and BLOCK of the UNITS that each head has.

    Returns (row block, scale, head and place of each unit, mask, whether it is the scale's first).
    """
    if PER_HEAD:
        blocks: tl.constexpr = (UNITS + BLOCK - 1) // BLOCK
        row_block = index // (num_heads * blocks)
        column_block = index % (num_heads * blocks)
        scale = column_block // blocks
        unit = column_block % blocks * BLOCK + tl.arange(0, BLOCK)
        is_first = (row_block == 0) & (column_block % blocks == 0)
        return row_block, scale, tl.zeros_like(unit) + scale, unit, unit < UNITS, is_first
    else:
        num_blocks = tl.cdiv(num_heads * UNITS, BLOCK)
        flat = index % num_blocks * BLOCK + tl.arange(0, BLOCK)
        mask = flat < num_heads * UNITS
        return index // num_blocks, 0, flat // UNITS, flat % UNITS, mask, index == 0


@triton.jit
def load_tables(pair, token, token_mask, tables, TURN: tl.constexpr):
    """cos and sin [tokens, pairs] in float32; zeros beyond the tables."""
    cos_ptr, sin_ptr, num_rows, cos_row, cos_column, sin_row, sin_column = tables
    ROTARY_DIM: tl.constexpr = TURN[1]
    TABLE_ALIGN: tl.constexpr = TURN[2]
    HAS_REPEATS: tl.constexpr = TURN[3]
    row = token % num_rows if HAS_REPEATS else token
    row = row.to(tl.int64) * TABLE_ALIGN
    mask = token_mask[:, None] & (pair < ROTARY_DIM // 2)[None, :]
    cos_at = (row * cos_row)[:, None] + (pair * cos_column)[None, :]
    sin_at = (row * sin_row)[:, None] + (pair * sin_column)[None, :]
    cos = tl.load(cos_ptr + cos_at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + sin_at, mask=mask, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def turn(first, second, pair, cos, sin, ROTARY_DIM: tl.constexpr, IS_PARTIAL: tl.constexpr):
    """Pairs of each token turned by its row of the tables; those beyond the tables stay."""
    first_turned, second_turned = rotate_pair(first, second, cos, sin)
    if IS_PARTIAL:
        is_turned = pair < ROTARY_DIM // 2
        first_turned = tl.where(is_turned[None, :], first_turned, first)
        second_turned = tl.where(is_turned[None, :], second_turned, second)
    return first_turned, second_turned


@triton.jit
def load_tile(index, part, tables, SHAPE: tl.constexpr, TURN: tl.constexpr):
    """Tile `index` of rows, turned, in float32.

    Returns (values, second values, where both go, mask, scale, whether it is the scale's first).
    TURN of HALVES has the two values of each pair apart; otherwise there are no second ones.
    """
    _, num_tokens, num_heads, _ = part
    HEAD_DIM: tl.constexpr = SHAPE[0]
    PADDED: tl.constexpr = SHAPE[1]
    PER_HEAD: tl.constexpr = SHAPE[4]
    BLOCK_TOKENS: tl.constexpr = SHAPE[5]
    BLOCK_WIDTH: tl.constexpr = SHAPE[6]
    ROTARY: tl.constexpr = TURN[0]
    ROTARY_DIM: tl.constexpr = TURN[1]
    IS_PARTIAL: tl.constexpr = ROTARY_DIM < HEAD_DIM
    SPLIT: tl.constexpr = 2 if ROTARY == HALVES else 1
    UNITS: tl.constexpr = PADDED // SPLIT
    WIDTH: tl.constexpr = BLOCK_WIDTH // SPLIT
    row_block, scale, heads, unit, mask, is_first = tile(index, num_heads, UNITS, WIDTH, PER_HEAD)
    token = row_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_mask = token < num_tokens
    first_at, second_at = unit, unit
    if ROTARY == HALVES:
        first_at, second_at = pair_places(unit, ROTARY_DIM, PADDED, False)
    inside = token_mask[:, None] & (mask & (first_at < HEAD_DIM))[None, :]
    first = tl.load(place(part, token, heads, first_at, SHAPE), mask=inside, other=0.0)
    first = first.to(tl.float32)
    second = first
    if ROTARY == HALVES:
        inside = token_mask[:, None] & (mask & (second_at < HEAD_DIM))[None, :]
        second = tl.load(place(part, token, heads, second_at, SHAPE), mask=inside, other=0.0)
        cos, sin = load_tables(unit, token, token_mask, tables, TURN)
        first, second = turn(first, second.to(tl.float32), unit, cos, sin, ROTARY_DIM, IS_PARTIAL)
    if ROTARY == INTERLEAVED:
        _, _, _, pair, _, _ = tile(index, num_heads, UNITS // 2, WIDTH // 2, PER_HEAD)
        even, odd = tl.split(tl.reshape(first, [BLOCK_TOKENS, WIDTH // 2, 2]))
        cos, sin = load_tables(pair, token, token_mask, tables, TURN)
        even, odd = turn(even, odd, pair, cos, sin, ROTARY_DIM, IS_PARTIAL)
        first = tl.reshape(tl.join(even, odd), [BLOCK_TOKENS, WIDTH])
        second = first
    at = token.to(tl.int64)[:, None] * (num_heads * PADDED) + (heads * PADDED)[None, :]
    inside = token_mask[:, None] & mask[None, :]
    first_at, second_at = at + first_at[None, :], at + second_at[None, :]
    return first, second, first_at, second_at, inside, scale, is_first


@triton.jit
def amax_rows(
    chunk,
    scale,
    part,
    tables,
    partial_ptr,
    count_ptr,
    HAS_RINGS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    SHAPE: tl.constexpr,
    TURN: tl.constexpr,
):
    """The amax of every NUM_PARTIALS-th tile of one scale, and its count of NaN and Inf.

    Almost always there are none: only if the maximum itself is NaN or Inf are values told apart, in
    a second look at the same tiles.
    """
    _, num_tokens, num_heads, _ = part
    PADDED: tl.constexpr = SHAPE[1]
    PER_HEAD: tl.constexpr = SHAPE[4]
    BLOCK_TOKENS: tl.constexpr = SHAPE[5]
    BLOCK_WIDTH: tl.constexpr = SHAPE[6]
    ROTARY: tl.constexpr = TURN[0]
    SPLIT: tl.constexpr = 2 if ROTARY == HALVES else 1
    WIDTH: tl.constexpr = BLOCK_WIDTH // SPLIT
    if PER_HEAD:
        blocks = (PADDED // SPLIT + WIDTH - 1) // WIDTH
    else:
        blocks = tl.cdiv(num_heads * (PADDED // SPLIT), WIDTH)
    num_tiles = tl.cdiv(num_tokens, BLOCK_TOKENS) * blocks
    largest = tl.zeros([BLOCK_TOKENS, WIDTH], tl.float32)
    for tile in range(chunk, num_tiles, NUM_PARTIALS):
        index = tile
        if PER_HEAD:
            index = tile // blocks * (num_heads * blocks) + scale * blocks + tile % blocks
        loaded = load_tile(index, part, tables, SHAPE, TURN)
        largest = tl.maximum(largest, tl.abs(loaded[0]), propagate_nan=tl.PropagateNan.ALL)
        if ROTARY == HALVES:
            largest = tl.maximum(largest, tl.abs(loaded[1]), propagate_nan=tl.PropagateNan.ALL)
    has_strange = tl.where(largest < float("inf"), 0, 1)
    amax = tl.max(tl.max(largest, axis=1), axis=0)
    count = tl.max(tl.max(has_strange, axis=1), axis=0)
    if count > 0:
        largest = tl.zeros([BLOCK_TOKENS, WIDTH], tl.float32)
        count = 0  # added up tile by tile: registers for more would slow down the usual case
        for tile in range(chunk, num_tiles, NUM_PARTIALS):
            index = tile
            if PER_HEAD:
                index = tile // blocks * (num_heads * blocks) + scale * blocks + tile % blocks
            loaded = load_tile(index, part, tables, SHAPE, TURN)
            largest = tl.maximum(largest, finite_magnitude(loaded[0]))
            count += tl.sum(tl.sum(count_nonfinite(loaded[0]), axis=1), axis=0)
            if ROTARY == HALVES:
                largest = tl.maximum(largest, finite_magnitude(loaded[1]))
                count += tl.sum(tl.sum(count_nonfinite(loaded[1]), axis=1), axis=0)
        amax = tl.max(tl.max(largest, axis=1), axis=0)
    place = scale * NUM_PARTIALS + chunk
    tl.store(partial_ptr + place, amax)
    if HAS_RINGS:
        tl.store(count_ptr + place, count)


@triton.jit
def find_scale(scale, is_first, num_scales, given, ring, SCALING: tl.constexpr):
    """A tile's scale: the given one, or what partial amax values and the ring ask for.

    The first tile of a dynamic scale writes it down. It also writes the ring's slot of this pass
    and the count of NaN and Inf, which no other reads.
    """
    scale_ptr, scale_stride, partial_ptr, count_ptr, factor = given
    IS_DYNAMIC: tl.constexpr = SCALING[0]
    HAS_RINGS: tl.constexpr = SCALING[1]
    NUM_PARTIALS: tl.constexpr = SCALING[2]
    RING_BLOCK: tl.constexpr = SCALING[3]
    if IS_DYNAMIC:
        ring_ptr, nonfinite_ptr, slot_ptr, ring_length = ring
        chunk = tl.arange(0, NUM_PARTIALS)
        amax = tl.max(tl.load(partial_ptr + scale * NUM_PARTIALS + chunk), axis=0)
        largest = amax
        if HAS_RINGS:
            slot = tl.load(slot_ptr)
            place = tl.arange(0, RING_BLOCK)
            # All of the ring at once: to wait for the slot first would take as long again.
            past = tl.load(
                ring_ptr + place * num_scales + scale, mask=place < ring_length, other=0.0
            )
            largest = tl.maximum(amax, tl.max(tl.where(place == slot, 0.0, past), axis=0))
        value = amax_to_scale(largest, factor, False)
        if is_first:
            tl.store(scale_ptr + scale, value)
            if HAS_RINGS:
                tl.store(ring_ptr + slot * num_scales + scale, amax)
                if scale == 0:
                    count = tl.zeros([NUM_PARTIALS], tl.int64)
                    for i in range(num_scales):
                        count += tl.load(count_ptr + i * NUM_PARTIALS + chunk)
                    total = tl.load(nonfinite_ptr) + tl.sum(count, axis=0)
                    tl.store(nonfinite_ptr, total)
        return value
    else:
        return tl.load(scale_ptr + scale * scale_stride)


@triton.jit
def find_keys(group, num_tokens, cu_seqlens_ptr, num_sequences):
    """For columns 16·group … of packed values: the token of the first, and the sequence's end."""
    # The last sequence that starts at or before the group: sequence i starts at group
    # cu_seqlens[i] // 16 + i.
    low, high = tl.zeros_like(group), tl.zeros_like(group) + num_sequences
    width = num_sequences + 0
    while width > 0:
        middle = (low + high) // 2
        start = tl.load(cu_seqlens_ptr + middle, mask=middle < high, other=0) // 16 + middle
        is_right = (start <= group) & (middle < high)
        low = tl.where(is_right, middle + 1, low)
        high = tl.where(is_right, high, middle)
        width = width // 2
    is_found = low > 0
    sequence = low - 1
    start = tl.load(cu_seqlens_ptr + sequence, mask=is_found, other=0)
    end = tl.load(cu_seqlens_ptr + low, mask=is_found, other=0)
    return start + (group - start // 16 - sequence) * 16, tl.minimum(end, num_tokens)


@triton.jit
def cast_rows(
    index,
    part,
    tables,
    data_ptr,
    given,
    ring,
    SCALING: tl.constexpr,
    SHAPE: tl.constexpr,
    TURN: tl.constexpr,
):
    """Tile `index` of q, k or v as FP8 rows; what lies between heads becomes zero."""
    _, _, num_heads, _ = part
    PER_HEAD: tl.constexpr = SHAPE[4]
    HAS_FMA: tl.constexpr = SCALING[4]
    first, second, first_at, second_at, inside, which, is_first = load_tile(
        index, part, tables, SHAPE, TURN
    )
    num_scales = num_heads if PER_HEAD else 1
    by = divisor(find_scale(which, is_first, num_scales, given, ring, SCALING), HAS_FMA)
    dtype = data_ptr.dtype.element_ty
    quotient = divide(first, by, HAS_FMA)
    tl.store(data_ptr + first_at, cast_fp8(quotient, dtype, HAS_FMA), mask=inside)
    if TURN[0] == HALVES:
        quotient = divide(second, by, HAS_FMA)
        tl.store(data_ptr + second_at, cast_fp8(quotient, dtype, HAS_FMA), mask=inside)


@triton.jit
def cast_transposed(
    index,
    part,
    words_ptr,
    dtype: tl.constexpr,
    packing,
    given,
    ring,
    IS_PACKED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    SCALING: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Tile `index` of vᵀ. Four columns are one word: keys 2t, 2t + 1, 2t + 8 and 2t + 9 of 16.

    A word's four rows are read by the same lanes, so that only whole words change places.
    """
    memory, num_tokens, num_heads, length = part
    _, _, token_stride, _, _, _ = memory
    cu_seqlens_ptr, num_sequences, num_groups = packing
    HEAD_DIM: tl.constexpr = SHAPE[0]
    ALIGN: tl.constexpr = SHAPE[2]
    PER_HEAD: tl.constexpr = SHAPE[4]
    HAS_FMA: tl.constexpr = SCALING[4]
    BLOCK: tl.constexpr = BLOCK_KEYS // 4
    row_block, which, heads, unit, mask, is_first = tile(
        index, num_heads, HEAD_DIM, BLOCK_VALUES, PER_HEAD
    )
    num_words = num_groups * 4
    if IS_PACKED:
        batch = 0
        word = row_block * BLOCK + tl.arange(0, BLOCK)
        token, end = find_keys(word // 4, num_tokens, cu_seqlens_ptr, num_sequences)
    else:
        blocks = tl.maximum(tl.cdiv(num_words, BLOCK), 1)
        batch = row_block // blocks
        word = row_block % blocks * BLOCK + tl.arange(0, BLOCK)
        token = batch * length + word // 4 * 16
        end = tl.zeros_like(token) + (batch + 1) * length
    token += word % 4 * 2
    end = tl.where(word < num_words, end, 0)[:, None]
    at = place(part, token, heads, unit, SHAPE)
    step = token_stride * ALIGN
    of = (part, token, heads, unit)
    token = token[:, None]
    columns = mask[None, :]
    x0 = tl.load(at, mask=columns & (token < end), other=0.0)
    x1 = tl.load(place_behind(at, step, of, SHAPE, 1), mask=columns & (token + 1 < end), other=0.0)
    x2 = tl.load(place_behind(at, step, of, SHAPE, 8), mask=columns & (token + 8 < end), other=0.0)
    x3 = tl.load(place_behind(at, step, of, SHAPE, 9), mask=columns & (token + 9 < end), other=0.0)
    num_scales = num_heads if PER_HEAD else 1
    by = divisor(find_scale(which, is_first, num_scales, given, ring, SCALING), HAS_FMA)
    words = pack_fp8(
        divide(x0, by, HAS_FMA),
        divide(x1, by, HAS_FMA),
        divide(x2, by, HAS_FMA),
        divide(x3, by, HAS_FMA),
        dtype,
        HAS_FMA,
    )
    row = (batch * num_heads + heads).to(tl.int64) * HEAD_DIM + unit
    out_at = row[:, None] * num_words + word[None, :]
    inside = mask[:, None] & (word < num_words)[None, :]
    tl.store(words_ptr + out_at, tl.trans(words), mask=inside)


@triton.jit
def count_pass(num_passes_ptr, slot_ptr, ring_length):
    """Count one more pass, and keep the slot of the ring that it has: num_passes % ring_length."""
    num_passes = tl.load(num_passes_ptr)
    # In 32 bits, of which lengths below 65536 need no more: 64 would call a subroutine.
    low = (num_passes & 0xFFFF).to(tl.uint32)
    middle = ((num_passes >> 16) & 0xFFFF).to(tl.uint32)
    high = ((num_passes >> 32) & 0xFFFFFFFF).to(tl.uint32)
    length = (ring_length + num_passes * 0).to(tl.uint32)
    slot = ((high % length) * 65536 + middle) % length
    slot = (slot * 65536 + low) % length
    tl.store(slot_ptr, slot.to(tl.int32))
    tl.store(num_passes_ptr, num_passes + 1)
