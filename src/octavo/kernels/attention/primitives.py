"""Pieces of the attention kernel: tiles of tokens, who sees whom, and online softmax."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The lowest float32: from a finite maximum, logits of −Inf are −Inf away and never NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _load_tile(
    base,
    outer,
    outer_stride,
    inner,
    outer_mask,
    inner_mask,
    HAS_OUTER_MASK: tl.constexpr,
    HAS_INNER_MASK: tl.constexpr,
):
    """[outer, inner], with zeros where a mask says so; a mask that is not needed is not made."""
    pointers = base + outer[:, None] * outer_stride + inner[None, :]
    if HAS_OUTER_MASK and HAS_INNER_MASK:
        return tl.load(pointers, mask=outer_mask[:, None] & inner_mask[None, :], other=0.0)
    if HAS_OUTER_MASK:
        return tl.load(pointers, mask=outer_mask[:, None], other=0.0)
    if HAS_INNER_MASK:
        return tl.load(pointers, mask=inner_mask[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_rows(
    base,
    row,
    num_rows,
    stride,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Dimensions FIRST … FIRST + WIDTH of tokens: [tokens, WIDTH]."""
    dim = FIRST + tl.arange(0, WIDTH)
    is_cut: tl.constexpr = FIRST + WIDTH > HEAD_DIM
    return _load_tile(base, row, stride, dim, row < num_rows, dim < HEAD_DIM, IS_MASKED, is_cut)


@triton.jit
def _load_values(
    base,
    key,
    kv_len,
    stride,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """[keys, WIDTH] of either layout; transposed ones in the order of their columns."""
    if not IS_TRANSPOSED:
        return load_rows(base, key, kv_len, stride, FIRST, WIDTH, HEAD_DIM, IS_MASKED)
    dim = FIRST + tl.arange(0, WIDTH)
    is_column = key < (kv_len + 15) // 16 * 16
    is_cut: tl.constexpr = FIRST + WIDTH > HEAD_DIM
    tile = _load_tile(base, dim, stride, key, dim < HEAD_DIM, is_column, is_cut, IS_MASKED)
    return tl.trans(tile)


@triton.jit
def _in_value_order(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """P with its keys in the order of transposed values (octavo.numerics.value_layout)."""
    split = p.reshape(BLOCK_M, BLOCK_N // 16, 2, 4, 2)
    return split.permute(0, 1, 3, 2, 4).reshape(BLOCK_M, BLOCK_N)


@triton.jit
def _is_visible(
    position,
    key,
    kv_len,
    window,
    mask_ptr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):
    """[queries, keys]: which keys the queries at these positions see."""
    distance = position[:, None] - key[None, :]
    visible = (key < kv_len)[None, :] & (distance == distance)
    if IS_CAUSAL:
        visible = visible & (distance >= 0)
    if HAS_WINDOW:
        visible = visible & (tl.abs(distance) < window)
    if HAS_KEY_MASK:
        is_key = tl.load(mask_ptr + key, mask=key < kv_len, other=0)
        visible = visible & (is_key != 0)[None, :]
    return visible


@triton.jit
def attend(
    state,
    q,
    q_rest,
    k_base,
    v_base,
    k_scale_base,
    v_scale_base,
    mask_base,
    position,
    first,
    last,
    kv_len,
    window,
    logit_scale,
    softcap,
    k_stride,
    v_stride,
    token_scale_stride,
    IS_MASKED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    K_PER_TOKEN: tl.constexpr,
    V_PER_TOKEN: tl.constexpr,
    PROMOTE_EVERY: tl.constexpr,
    WEIGHT_BITS: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN_QK: tl.constexpr,
    REST_QK: tl.constexpr,
    MAIN_PV: tl.constexpr,
    REST_PV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax over the keys first … last, a tile of BLOCK_N at a time.

    state: row_max in powers of two, row_sum, the largest value scale so far, the sums of P·V (main
    and rest of head_dim), and what the tensor core still holds of them between promotions.
    """
    row_max, row_sum, v_top, acc, acc_rest, held, held_rest, num_tiles = state
    for start in tl.range(first, last, BLOCK_N):
        in_tile = tl.arange(0, BLOCK_N)
        key = start + in_tile
        k_tile = k_base + tl.cast(start, tl.int64) * k_stride
        left = kv_len - start
        k = load_rows(k_tile, in_tile, left, k_stride, 0, MAIN_QK, HEAD_DIM, IS_MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if REST_QK > 0:
            k_rest = load_rows(
                k_tile, in_tile, left, k_stride, MAIN_QK, REST_QK, HEAD_DIM, IS_MASKED
            )
            s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision=PRECISION)
        if K_PER_TOKEN:
            place = k_scale_base + tl.cast(start, tl.int64) * token_scale_stride
            k_scale = tl.load(place + in_tile * token_scale_stride, mask=key < kv_len, other=0.0)
            s = s * k_scale[None, :]
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1); from here on logits are powers of two.
            capped = 1.0 - 2.0 / (tl.exp2(s * (logit_scale * 2.0 / softcap)) + 1.0)
            s = capped * (softcap * LOG2_E)
            factor = 1.0
        else:
            factor = logit_scale
        if IS_MASKED:
            visible = _is_visible(
                position, key, kv_len, window, mask_base, IS_CAUSAL, HAS_WINDOW, HAS_KEY_MASK
            )
            s = tl.where(visible, s, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - (new_max - WEIGHT_BITS)[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        row_max = new_max
        if V_PER_TOKEN:
            # P takes on the values' scales, relative to the largest so far.
            place = v_scale_base + tl.cast(start, tl.int64) * token_scale_stride
            v_scale = tl.load(place + in_tile * token_scale_stride, mask=key < kv_len, other=0.0)
            new_top = tl.maximum(v_top, tl.max(v_scale, 0))
            p = p * (v_scale / new_top)[None, :]
            shrink = shrink * (v_top / new_top)
            v_top = new_top
        weights = p.to(WEIGHT_DTYPE)
        if IS_TRANSPOSED:
            weights = _in_value_order(weights, BLOCK_M, BLOCK_N)
            v_tile = v_base + start
        else:
            v_tile = v_base + tl.cast(start, tl.int64) * v_stride
        v = _load_values(
            v_tile, in_tile, left, v_stride, 0, MAIN_PV, HEAD_DIM, IS_TRANSPOSED, IS_MASKED
        )
        if REST_PV > 0:
            v_rest = _load_values(
                v_tile,
                in_tile,
                left,
                v_stride,
                MAIN_PV,
                REST_PV,
                HEAD_DIM,
                IS_TRANSPOSED,
                IS_MASKED,
            )
        if PROMOTE_EVERY == 1:
            acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision=PRECISION)
            if REST_PV > 0:
                pv = tl.dot(weights, v_rest, input_precision=PRECISION)
                acc_rest = acc_rest * shrink[:, None] + pv
        elif PROMOTE_EVERY == 0:
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision=PRECISION)
            if REST_PV > 0:
                shrunk = acc_rest * shrink[:, None]
                acc_rest = tl.dot(weights, v_rest, shrunk, input_precision=PRECISION)
        else:
            num_tiles += 1
            is_due = (num_tiles % PROMOTE_EVERY) == 0
            held = tl.dot(weights, v, held * shrink[:, None])
            acc = acc * shrink[:, None] + tl.where(is_due, held, 0.0)
            held = tl.where(is_due, 0.0, held)
            if REST_PV > 0:
                held_rest = tl.dot(weights, v_rest, held_rest * shrink[:, None])
                acc_rest = acc_rest * shrink[:, None] + tl.where(is_due, held_rest, 0.0)
                held_rest = tl.where(is_due, 0.0, held_rest)
    return row_max, row_sum, v_top, acc, acc_rest, held, held_rest, num_tiles
