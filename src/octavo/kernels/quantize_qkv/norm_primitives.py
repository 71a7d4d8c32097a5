"""Tiles of q and k that are normalized: some tokens, and one of their heads after the other.

Tables and weights are read once for all heads of a tile. Tuples are those of `primitives`, and
`norm`: (weights, eps, tokens of the first stream); NORM: (how many norms, tokens and heads of a
tile).
"""

import triton
import triton.language as tl

from octavo.kernels.primitives import cast_fp8, count_nonfinite, finite_magnitude, pair_places
from octavo.kernels.quantize_qkv.place_primitives import place
from octavo.kernels.quantize_qkv.primitives import (
    HALVES,
    NONE,
    amax_rows,
    cast_rows,
    find_scale,
    load_tables,
    turn,
)


@triton.jit
def pairs(SHAPE: tl.constexpr, TURN: tl.constexpr):
    """Where both values of each pair of a head lie."""
    HEAD_DIM: tl.constexpr = SHAPE[0]
    ROTARY: tl.constexpr = TURN[0]
    ROTARY_DIM: tl.constexpr = TURN[1]
    pair = tl.arange(0, HEAD_DIM // 2)
    if ROTARY == HALVES:
        first_at, second_at = pair_places(pair, ROTARY_DIM, HEAD_DIM, False)
        return pair, first_at, second_at
    else:
        return pair, pair * 2, pair * 2 + 1


@triton.jit
def norm_weights(places, is_first, norm, HEAD_DIM: tl.constexpr, NUM_NORMS: tl.constexpr):
    """The weights of these places of a head, [tokens or 1, places]: each stream has its own."""
    weight_ptr, _, _ = norm
    weight = tl.load(weight_ptr + places).to(tl.float32)[None, :]
    if NUM_NORMS == 2:
        other = tl.load(weight_ptr + HEAD_DIM + places).to(tl.float32)[None, :]
        weight = tl.where(is_first[:, None], weight, other)
    return weight


@triton.jit
def load_shared(
    row_block,
    part,
    norm,
    tables,
    SHAPE: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    """What all heads of some tokens share: tokens and their mask, cos and sin, both weights."""
    _, num_tokens, _, length = part
    _, _, num_first = norm
    HEAD_DIM: tl.constexpr = SHAPE[0]
    ROTARY: tl.constexpr = TURN[0]
    NUM_NORMS: tl.constexpr = NORM[0]
    NUM_TOKENS: tl.constexpr = NORM[1]
    token = row_block * NUM_TOKENS + tl.arange(0, NUM_TOKENS)
    token_mask = token < num_tokens
    pair, first_at, second_at = pairs(SHAPE, TURN)
    is_first = token % length < num_first
    first_weight = norm_weights(first_at, is_first, norm, HEAD_DIM, NUM_NORMS)
    second_weight = norm_weights(second_at, is_first, norm, HEAD_DIM, NUM_NORMS)
    cos, sin = first_weight, first_weight
    if ROTARY != NONE:
        cos, sin = load_tables(pair, token, token_mask, tables, TURN)
    return token, token_mask, cos, sin, first_weight, second_weight


@triton.jit
def load_head(
    head,
    factor,
    part,
    norm,
    shared,
    SHAPE: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    """Both values of each pair of a head, normalized, turned, times a factor, in float32."""
    token, token_mask, cos, sin, first_weight, second_weight = shared
    _, eps, _ = norm
    HEAD_DIM: tl.constexpr = SHAPE[0]
    ROTARY: tl.constexpr = TURN[0]
    ROTARY_DIM: tl.constexpr = TURN[1]
    NUM_TOKENS: tl.constexpr = NORM[1]
    pair, first_at, second_at = pairs(SHAPE, TURN)
    mask = token_mask[:, None]
    if ROTARY == HALVES:
        heads = tl.zeros_like(pair) + head
        first = tl.load(place(part, token, heads, first_at, SHAPE), mask=mask, other=0.0)
        second = tl.load(place(part, token, heads, second_at, SHAPE), mask=mask, other=0.0)
        first, second = first.to(tl.float32), second.to(tl.float32)
    else:
        unit = tl.arange(0, HEAD_DIM)
        at = place(part, token, tl.zeros_like(unit) + head, unit, SHAPE)
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [NUM_TOKENS, HEAD_DIM // 2, 2]))
    mean = tl.sum(first * first + second * second, axis=1) / HEAD_DIM
    root = (tl.rsqrt(mean + eps) * factor)[:, None]
    first, second = first * root * first_weight, second * root * second_weight
    if ROTARY != NONE:
        first, second = turn(first, second, pair, cos, sin, ROTARY_DIM, ROTARY_DIM < HEAD_DIM)
    return first, second


@triton.jit
def amax_heads(
    chunk,
    scale,
    part,
    norm,
    tables,
    partial_ptr,
    count_ptr,
    HAS_RINGS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    SHAPE: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    """The amax of every NUM_PARTIALS-th tile of one scale, and its count of NaN and Inf."""
    _, num_tokens, num_heads, _ = part
    HEAD_DIM: tl.constexpr = SHAPE[0]
    PER_HEAD: tl.constexpr = SHAPE[4]
    NUM_TOKENS: tl.constexpr = NORM[1]
    NUM_TILE_HEADS: tl.constexpr = NORM[2]
    num_groups = 1 if PER_HEAD else tl.cdiv(num_heads, NUM_TILE_HEADS)
    largest = tl.zeros([NUM_TOKENS, HEAD_DIM // 2], tl.float32)
    count = 0
    for tile in range(chunk, tl.cdiv(num_tokens, NUM_TOKENS) * num_groups, NUM_PARTIALS):
        shared = load_shared(tile // num_groups, part, norm, tables, SHAPE, TURN, NORM)
        start = scale if PER_HEAD else tile % num_groups * NUM_TILE_HEADS
        end = scale + 1 if PER_HEAD else tl.minimum(start + NUM_TILE_HEADS, num_heads)
        for head in range(start, end):
            first, second = load_head(head, 1.0, part, norm, shared, SHAPE, TURN, NORM)
            largest = tl.maximum(largest, finite_magnitude(first))
            largest = tl.maximum(largest, finite_magnitude(second))
            if HAS_RINGS:
                strange = count_nonfinite(first) + count_nonfinite(second)
                count += tl.sum(tl.sum(strange, axis=1), axis=0)
    at = scale * NUM_PARTIALS + chunk
    tl.store(partial_ptr + at, tl.max(tl.max(largest, axis=1), axis=0))
    if HAS_RINGS:
        tl.store(count_ptr + at, count)


@triton.jit
def cast_heads(
    index,
    part,
    norm,
    tables,
    data_ptr,
    given,
    ring,
    SCALING: tl.constexpr,
    SHAPE: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    """Tile `index` of q or k as FP8 rows.

    The inverse of the scale is part of the norm's factor: no value is divided. That may move a
    value by a rounding of float32, as the order of the sums of squares does.
    """
    _, _, num_heads, _ = part
    HEAD_DIM: tl.constexpr = SHAPE[0]
    PER_HEAD: tl.constexpr = SHAPE[4]
    ROTARY: tl.constexpr = TURN[0]
    HAS_FMA: tl.constexpr = SCALING[4]
    NUM_TOKENS: tl.constexpr = NORM[1]
    NUM_TILE_HEADS: tl.constexpr = NORM[2]
    dtype = data_ptr.dtype.element_ty
    num_groups = tl.cdiv(num_heads, NUM_TILE_HEADS)
    row_block, start = index // num_groups, index % num_groups * NUM_TILE_HEADS
    shared = load_shared(row_block, part, norm, tables, SHAPE, TURN, NORM)
    token, token_mask, _, _, _, _ = shared
    _, first_at, second_at = pairs(SHAPE, TURN)
    scale = 1.0
    if not PER_HEAD:
        scale = find_scale(0, index == 0, 1, given, ring, SCALING)
    for head in range(start, tl.minimum(start + NUM_TILE_HEADS, num_heads)):
        if PER_HEAD:
            scale = find_scale(head, row_block == 0, num_heads, given, ring, SCALING)
        factor = tl.div_rn(1.0, scale)
        first, second = load_head(head, factor, part, norm, shared, SHAPE, TURN, NORM)
        row = (token.to(tl.int64) * num_heads + head) * HEAD_DIM
        at, mask = data_ptr + row[:, None], token_mask[:, None]
        if ROTARY == HALVES:
            tl.store(at + first_at[None, :], cast_fp8(first, dtype, HAS_FMA), mask=mask)
            tl.store(at + second_at[None, :], cast_fp8(second, dtype, HAS_FMA), mask=mask)
        else:
            data = tl.reshape(tl.join(first, second), [NUM_TOKENS, HEAD_DIM])
            unit = tl.arange(0, HEAD_DIM)
            tl.store(at + unit[None, :], cast_fp8(data, dtype, HAS_FMA), mask=mask)


@triton.jit
def amax_part(
    chunk,
    scale,
    part,
    norm,
    tables,
    partial_ptr,
    count_ptr,
    HAS_RINGS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    SHAPE: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    """The partial amax of q or k, normalized or not."""
    if NORM[0] > 0:
        amax_heads(
            chunk,
            scale,
            part,
            norm,
            tables,
            partial_ptr,
            count_ptr,
            HAS_RINGS,
            NUM_PARTIALS,
            SHAPE,
            TURN,
            NORM,
        )
    else:
        amax_rows(
            chunk, scale, part, tables, partial_ptr, count_ptr, HAS_RINGS, NUM_PARTIALS, SHAPE, TURN
        )


@triton.jit
def cast_part(
    index,
    part,
    norm,
    tables,
    data_ptr,
    given,
    ring,
    SCALING: tl.constexpr,
    SHAPE: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    """Tile `index` of q or k, normalized or not."""
    if NORM[0] > 0:
        cast_heads(index, part, norm, tables, data_ptr, given, ring, SCALING, SHAPE, TURN, NORM)
    else:
        cast_rows(index, part, tables, data_ptr, given, ring, SCALING, SHAPE, TURN)
