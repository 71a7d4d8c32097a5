"""Paged decode attention at memory speed: pages go straight to registers, q and P stay unquantized.

The problem is transposed, Sᵀ = K·qᵀ and Oᵀ = Vᵀ·Pᵀ, so that the few queries of a KV head are the
eight columns of `mma.sync`. Every warp has its own tiles of keys, its own maximum, sum and
accumulator; nothing but registers is used until the warps merge at the end.
"""

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.internals import internals, require
from octavo.kernels.decode.config import GluonConfig, scale_strides
from octavo.kernels.gluon_primitives import thread_barrier
from octavo.kernels.launch import launch
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.decode_plan import DecodePlan

with internals("triton"):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2

require("triton.experimental.gluon", "triton.experimental.gluon.language")

LOG2_E = gl.constexpr(1.4426950408889634)
# Finite, so that a row that sees nothing subtracts two equal numbers instead of two infinities.
LOWEST = gl.constexpr(-3.4028234663852886e38)

# Two FP8 values of an even and an odd token become the f16 pairs that an operand of V wants.
PAIR_E4M3 = gl.constexpr("""
{
.reg .b32 a, b;
.reg .b16 l0, h0, l1, h1;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $4, $5, 0x7362;
mov.b32 {l0, h0}, a;
mov.b32 {l1, h1}, b;
cvt.rn.f16x2.e4m3x2 $0, l0;
cvt.rn.f16x2.e4m3x2 $1, h0;
cvt.rn.f16x2.e4m3x2 $2, l1;
cvt.rn.f16x2.e4m3x2 $3, h1;
}""")
# The byte of an e5m2 is the upper byte of the same f16.
PAIR_E5M2 = gl.constexpr("""
{
.reg .b32 a, b, zero;
mov.b32 zero, 0;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $4, $5, 0x7362;
prmt.b32 $0, a, zero, 0x1404;
prmt.b32 $1, a, zero, 0x3424;
prmt.b32 $2, b, zero, 0x1404;
prmt.b32 $3, b, zero, 0x3424;
}""")
PAIR_16_BIT = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")
SPLIT_PAIR = gl.constexpr("mov.b32 {$0, $1}, $2;")
TRANSPOSE_8X8 = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@gluon.constexpr_function
def _bases(size, dim, step=1):
    """The basis vectors of one axis of [warp, token, d], from `step` until `size`."""
    vectors = []
    while step < size:
        vectors.append([step if axis == dim else 0 for axis in range(3)])
        step *= 2
    return vectors


@gluon.constexpr_function
def _value_layout(num_warps, num_pairs, head_dim, chunk):
    """V of every second token, [warp, num_pairs, head_dim]: `chunk` neighbours in a thread.

    Threads lie as the operand of Vᵀ wants them: four of tokens by eight of d.
    """
    return gl.DistributedLinearLayout(
        reg_bases=_bases(chunk, 2) + _bases(head_dim, 2, 8 * chunk) + _bases(num_pairs, 1, 4),
        lane_bases=[[0, 1, 0], [0, 2, 0], [0, 0, chunk], [0, 0, 2 * chunk], [0, 0, 4 * chunk]],
        warp_bases=_bases(num_warps, 0),
        block_bases=[],
        shape=[num_warps, num_pairs, head_dim],
    )


@gluon.jit
def _load_pages(table_ptr, position, num_used, PAGE_SIZE: gl.constexpr):
    """The pages of these positions; 0, which is never read from, beyond the sequence's last."""
    index = position // PAGE_SIZE
    return gl.load(table_ptr + index, mask=(index >= 0) & (index < num_used), other=0)


@gluon.jit
def _pair_values(even, odd):
    """[warp, pairs, d] of two tokens' values as 32-bit words (even, odd) of 16-bit floats."""
    dtype: gl.constexpr = even.dtype
    if dtype == gl.float8e4nv:
        return gl.inline_asm_elementwise(
            PAIR_E4M3, "=r,=r,=r,=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=4
        )
    elif dtype == gl.float8e5:
        return gl.inline_asm_elementwise(
            PAIR_E5M2, "=r,=r,=r,=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            PAIR_16_BIT, "=r,=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=2
        )


@gluon.jit
def _value_operand(even, odd, COMPUTE: gl.constexpr, CHUNK: gl.constexpr, layout: gl.constexpr):
    """Vᵀ [warp, d, token] as the tensor core takes it, its d axis permuted (see `_unpermute`)."""
    W: gl.constexpr = even.shape[0]
    PAIRS: gl.constexpr = even.shape[1]
    D: gl.constexpr = even.shape[2]
    words = _pair_values(even, odd)
    low, high = gl.inline_asm_elementwise(
        SPLIT_PAIR, "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    v = gl.join(low, high).reshape([W, PAIRS, D // (8 * CHUNK), 8, CHUNK, 2])
    v = v.permute([0, 2, 4, 3, 1, 5]).reshape([W, D, 2 * PAIRS])
    v = gl.convert_layout(v, layout, assert_trivial=True)
    return v.to(COMPUTE, bitcast=True)


@gluon.jit
def _unpermute(acc, CHUNK: gl.constexpr):
    """[d, query] with d as `_value_operand` leaves it, to [query, d] in order."""
    D: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    out = acc.reshape([D // (8 * CHUNK), CHUNK, 8, N]).permute([3, 0, 2, 1])
    return out.reshape([N, D])


@gluon.jit
def _weight_operand(p, COMPUTE: gl.constexpr, layout: gl.constexpr):
    """Pᵀ [warp, token, query] from the accumulator's layout to the operand's, in registers."""
    W: gl.constexpr = p.shape[0]
    T: gl.constexpr = p.shape[1]
    N: gl.constexpr = p.shape[2]
    p = gl.inline_asm_elementwise(
        TRANSPOSE_8X8,
        "=r,r",
        [p.to(COMPUTE).to(gl.int16, bitcast=True)],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )
    p = p.reshape([W, T // 8, 8, N // 8, 8]).permute([0, 1, 4, 3, 2]).reshape([W, T, N])
    p = gl.convert_layout(p, layout, assert_trivial=True)
    return p.to(COMPUTE, bitcast=True)


@gluon.jit
def _softcap(s, inv_cap, cap):
    """cap · tanh(s · inv_cap), by way of exp2, whose argument inv_cap is scaled for."""
    return cap - 2.0 * cap / (1.0 + gl.exp2(s * inv_cap))


@gluon.jit
def _fit_float16(q):
    """(q, its power): [warp, d, query] divided by the power of two that makes each query fit."""
    q = q.to(gl.float32)
    largest = gl.max(gl.abs(q), 1)
    # A bf16 below 2^16 is a float16; NaN and Inf stay what they are.
    excess = gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) - (127 + 15), 0)
    inverse = ((127 - excess) << 23).to(gl.float32, bitcast=True)
    power = ((127 + excess) << 23).to(gl.float32, bitcast=True)
    return (q * inverse[:, None, :]).to(gl.float16), power


# Room for a sequence is not compiled in: every size of page table would have its kernel.
@gluon.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    item_ptr,
    counter_ptr,
    sink_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    softmax_scale,
    softcap,
    window,
    q_sequence_stride,
    q_token_stride,
    q_head_stride,
    key_page_stride,
    key_head_stride,
    value_page_stride,
    value_head_stride,
    key_scale_page_stride,
    key_scale_head_stride,
    key_scale_token_stride,
    value_scale_page_stride,
    value_scale_head_stride,
    value_scale_token_stride,
    table_stride,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    Q_LEN: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    KEY_TOKEN_STRIDE: gl.constexpr,
    VALUE_TOKEN_STRIDE: gl.constexpr,
    TILE: gl.constexpr,
    COLUMNS: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr,
    COMBINE_SPLITS: gl.constexpr,
    GRANULARITY: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """One item of the plan for one KV head: its partial result, or the whole one.

    The program that finishes the last piece of a sequence adds up all of them.
    """
    W: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = key_ptr.dtype.element_ty.primitive_bitwidth // 8
    VECTOR: gl.constexpr = 16 // BYTES
    CHUNK: gl.constexpr = min(VECTOR, HEAD_DIM // 8)
    COMPUTE: gl.constexpr = gl.float16 if BYTES == 1 else key_ptr.dtype.element_ty
    ROWS: gl.constexpr = GROUP * Q_LEN
    ROW_BLOCKS: gl.constexpr = (ROWS + COLUMNS - 1) // COLUMNS
    PROGRAMS: gl.constexpr = NUM_KV_HEADS * ROW_BLOCKS
    IS_PER_TOKEN: gl.constexpr = GRANULARITY == "token"
    IS_ONE_PAGE: gl.constexpr = PAGE_SIZE >= TILE

    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8]
    )
    K_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, mma, VECTOR)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, mma, VECTOR)
    VT_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    V_LAYOUT: gl.constexpr = _value_layout(W, TILE // 2, HEAD_DIM, CHUNK)

    if USE_PDL:  # whatever ran before may have written the plan, the queries and the pages
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    pid = gl.program_id(0)
    item = pid // PROGRAMS
    program = pid % PROGRAMS
    kv_head = program // ROW_BLOCKS
    row_start = (program % ROW_BLOCKS) * COLUMNS
    sequence = gl.load(item_ptr + item * 6)
    first_block = gl.load(item_ptr + item * 6 + 1)
    end_block = gl.load(item_ptr + item * 6 + 2)
    split = gl.load(item_ptr + item * 6 + 3)
    num_splits = gl.load(item_ptr + item * 6 + 4)
    length = gl.load(item_ptr + item * 6 + 5)
    if sequence < 0:
        return

    logit_scale = softmax_scale * LOG2_E
    out_scale = 1.0
    if GRANULARITY == "tensor" or GRANULARITY == "head":
        logit_scale *= gl.load(key_scale_ptr + kv_head * key_scale_head_stride)
        out_scale = gl.load(value_scale_ptr + kv_head * value_scale_head_stride)

    # Which keys this program may read at all.
    oldest = 0
    if HAS_WINDOW:
        oldest = gl.maximum(length - Q_LEN - window + 1, 0)
    num_used = (length + PAGE_SIZE - 1) // PAGE_SIZE
    table_ptr += sequence.to(gl.int64) * table_stride
    key_ptr += kv_head.to(gl.int64) * key_head_stride
    value_ptr += kv_head.to(gl.int64) * value_head_stride

    k_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, K_LAYOUT)))[:, None, None] * TILE
    k_token = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, K_LAYOUT)))[None, :, None]
    k_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, K_LAYOUT)))[None, None, :]
    v_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, V_LAYOUT)))[:, None, None] * TILE
    v_token = gl.arange(0, TILE // 2, gl.SliceLayout(0, gl.SliceLayout(2, V_LAYOUT)))
    v_token = v_token[None, :, None] * 2
    v_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, V_LAYOUT)))[None, None, :]
    s_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None] * TILE
    s_token = s_warp + gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    s_row = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]

    # A query's position is `length - Q_LEN + its index`; rows are queries by heads of the group.
    position = length - Q_LEN + (row_start + s_row) // GROUP
    newest_seen = position if IS_CAUSAL else s_row * 0 + length - 1
    oldest_seen = position - window + 1
    # Blocks from here on, and below `oldest_full`, hide keys from some query.
    newest_full = length - Q_LEN if IS_CAUSAL else length - 1
    oldest_full = length - window
    if HAS_WINDOW:
        newest_seen = gl.minimum(newest_seen, position + window - 1)
        newest_full = gl.minimum(newest_full, length - Q_LEN + window - 1)

    # Pages of the tile after the current one are on their way while it is computed.
    k_first = k_warp if IS_ONE_PAGE else k_warp + k_token
    v_first = v_warp if IS_ONE_PAGE else v_warp + v_token
    k_page = _load_pages(table_ptr, first_block * (W * TILE) + k_first, num_used, PAGE_SIZE)
    v_page = _load_pages(table_ptr, first_block * (W * TILE) + v_first, num_used, PAGE_SIZE)

    q_row = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, Q_LAYOUT)))[None, None, :]
    q_row += row_start
    q_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(2, Q_LAYOUT)))[None, :, None]
    q_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, Q_LAYOUT)))[:, None, None]
    q_offset = (q_row // GROUP) * q_token_stride + (kv_head * GROUP + q_row % GROUP) * q_head_stride
    q_ptr += sequence.to(gl.int64) * q_sequence_stride
    q_mask = (q_row < ROWS) & (q_warp >= 0)
    q = gl.load(q_ptr + q_offset + q_dim + q_warp * 0, mask=q_mask, other=0.0)
    # Scales of logits: max_scale [warp, query] of maxima, s_scale of all of them.
    max_scale = gl.full([W, COLUMNS], 1.0, gl.float32, gl.SliceLayout(1, mma)) * logit_scale
    if q.dtype != COMPUTE:  # bf16 beside pages that are computed in float16
        q, power = _fit_float16(q)
        max_scale *= gl.convert_layout(power, gl.SliceLayout(1, mma))
    q = q.to(COMPUTE)
    s_scale = max_scale[:, None, :]
    # tanh(x) = 1 - 2 / (1 + exp2(2x · log2(e)))
    cap = softcap * LOG2_E
    inv_cap = 2.0 * s_scale / softcap
    if HAS_SOFTCAP:
        max_scale, s_scale = 1.0, 1.0

    row_max = gl.full([W, COLUMNS], LOWEST, gl.float32, gl.SliceLayout(1, mma))
    row_sum = gl.full([W, COLUMNS], 0.0, gl.float32, gl.SliceLayout(1, mma))
    acc = gl.zeros([W, HEAD_DIM, COLUMNS], gl.float32, mma)

    for block in range(first_block, end_block):
        start = block * (W * TILE)
        k_position = start + k_warp + k_token
        v_position = start + v_warp + v_token
        # Slots that no token owns may hold NaN, which a weight of 0 does not take away.
        k_mask = k_position < length
        even_mask = v_position < length
        odd_mask = v_position + 1 < length
        if HAS_WINDOW:
            k_mask = k_mask & (k_position >= oldest)
            even_mask = even_mask & (v_position >= oldest)
            odd_mask = odd_mask & (v_position + 1 >= oldest)
        k_slot = (start + k_warp) % PAGE_SIZE + k_token if IS_ONE_PAGE else k_token % PAGE_SIZE
        v_slot = (start + v_warp) % PAGE_SIZE + v_token if IS_ONE_PAGE else v_token % PAGE_SIZE
        k_base = k_page.to(gl.int64) * key_page_stride
        v_base = v_page.to(gl.int64) * value_page_stride
        k = gl.load(key_ptr + k_base + (k_slot * KEY_TOKEN_STRIDE + k_dim), mask=k_mask, other=0.0)
        v_offset = v_slot * VALUE_TOKEN_STRIDE + v_dim
        even = gl.load(value_ptr + v_base + v_offset, mask=even_mask, other=0.0)
        odd = gl.load(
            value_ptr + v_base + (v_offset + VALUE_TOKEN_STRIDE), mask=odd_mask, other=0.0
        )
        next_start = start + W * TILE
        k_page = _load_pages(table_ptr, next_start + k_first, num_used, PAGE_SIZE)
        v_page = _load_pages(table_ptr, next_start + v_first, num_used, PAGE_SIZE)

        s = mma_v2(k.to(COMPUTE), q, gl.zeros([W, TILE, COLUMNS], gl.float32, mma))
        if IS_PER_TOKEN:
            s_position = start + s_token
            s_page = _load_pages(table_ptr, s_position, num_used, PAGE_SIZE).to(gl.int64)
            s_slot = s_position % PAGE_SIZE
            is_owned = (s_position < length) & (s_position >= oldest)
            k_scale = gl.load(
                key_scale_ptr
                + s_page * key_scale_page_stride
                + (kv_head * key_scale_head_stride + s_slot * key_scale_token_stride),
                mask=is_owned,
                other=0.0,
            )
            v_scale = gl.load(
                value_scale_ptr
                + s_page * value_scale_page_stride
                + (kv_head * value_scale_head_stride + s_slot * value_scale_token_stride),
                mask=is_owned,
                other=1.0,
            )
            s = s * k_scale
        if HAS_SOFTCAP:
            s = _softcap(s, inv_cap, cap)
        has_hidden = start + W * TILE > newest_full + 1
        if HAS_WINDOW:
            has_hidden = has_hidden | (start < oldest_full)
        if has_hidden:
            is_seen = start + s_token <= newest_seen
            if HAS_WINDOW:
                is_seen = is_seen & (start + s_token >= oldest_seen)
            s = gl.where(is_seen, s, float("-inf"))
        if IS_PER_TOKEN:
            # The maximum of what P·V adds up, so that weights with their scale stay below 1.
            new_max = gl.maximum(row_max, gl.max(s * s_scale + gl.log2(v_scale), 1))
        else:
            new_max = gl.maximum(row_max, gl.max(s, 1) * max_scale)
        p = gl.exp2(s * s_scale - new_max[:, None, :])
        shrink = gl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + gl.sum(p, 1)
        acc = acc * shrink[:, None, :]
        row_max = new_max
        if IS_PER_TOKEN:
            p = p * v_scale
        v = _value_operand(even, odd, COMPUTE, CHUNK, VT_LAYOUT)
        acc = mma_v2(v, _weight_operand(p, COMPUTE, P_LAYOUT), acc)

    if USE_PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    top = gl.max(row_max, 0)
    share = gl.exp2(row_max - gl.expand_dims(top, 0))
    total = gl.sum(row_sum * share, 0)
    acc = gl.sum(acc * share[:, None, :], 0)

    ROW_THREADS: gl.constexpr = min(32, HEAD_DIM // 4)
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // ROW_THREADS, ROW_THREADS], [W, 1], [1, 0]
    )
    out = gl.convert_layout(_unpermute(acc, CHUNK), OUT_LAYOUT)
    total = gl.convert_layout(total, gl.SliceLayout(1, OUT_LAYOUT))
    top = gl.convert_layout(top, gl.SliceLayout(1, OUT_LAYOUT))
    out = gl.where((total == 0.0)[:, None], 0.0, out * (out_scale / total)[:, None])
    lse = top + gl.log2(total)
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, OUT_LAYOUT))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUT_LAYOUT))[None, :]
    out_ptr += sequence.to(gl.int64) * (Q_LEN * NUM_KV_HEADS * GROUP * HEAD_DIM)
    if num_splits == 1:
        global_row = row_start + row
        is_row = global_row < ROWS
        head = kv_head * GROUP + global_row % GROUP
        if HAS_SINKS:
            sink = gl.load(sink_ptr + head, mask=is_row, other=0.0).to(gl.float32) * LOG2_E
            out = out / (1.0 + gl.exp2(sink - gl.maximum(lse, LOWEST)))[:, None]
        out_row = ((global_row // GROUP) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        gl.store(
            out_ptr + (out_row[:, None] + dim),
            out.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (dim >= 0),
        )
        return

    partial_row = (item * PROGRAMS + program) * PARTIAL_ROWS + row
    is_kept = row < PARTIAL_ROWS
    gl.store(
        partial_ptr + (partial_row.to(gl.int64)[:, None] * HEAD_DIM + dim),
        out,
        mask=is_kept[:, None] & (dim >= 0),
    )
    gl.store(lse_ptr + partial_row, lse, mask=is_kept)
    thread_barrier()
    counter_ptr += sequence * PROGRAMS + program
    num_done = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if num_done == num_splits - 1:
        gl.store(counter_ptr, 0)
        _combine(
            partial_ptr,
            lse_ptr,
            sink_ptr,
            out_ptr,
            (item - split) * PROGRAMS + program,
            num_splits,
            kv_head,
            row_start,
            NUM_KV_HEADS,
            GROUP,
            ROWS,
            HEAD_DIM,
            PROGRAMS,
            PARTIAL_ROWS,
            COMBINE_SPLITS,
            HAS_SINKS,
        )


@gluon.jit
def _combine(
    partial_ptr,
    lse_ptr,
    sink_ptr,
    out_ptr,
    first,
    num_splits,
    kv_head,
    row_start,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PROGRAMS: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """The pieces of one sequence and KV head weighed by their log-sum-exp, in their own order."""
    W: gl.constexpr = gl.num_warps()
    ROW_THREADS: gl.constexpr = min(32, HEAD_DIM // 4)
    ROW_WARPS: gl.constexpr = min(W, PARTIAL_ROWS)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 32 // ROW_THREADS, ROW_THREADS], [W // ROW_WARPS, ROW_WARPS, 1], [2, 1, 0]
    )
    FLAT: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    RESULT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    row = gl.arange(0, PARTIAL_ROWS, gl.SliceLayout(0, FLAT))
    piece = gl.arange(0, SPLITS, gl.SliceLayout(1, FLAT))[:, None]
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    top = gl.full([PARTIAL_ROWS], LOWEST, gl.float32, gl.SliceLayout(0, FLAT))
    total = gl.full([PARTIAL_ROWS], 0.0, gl.float32, gl.SliceLayout(0, FLAT))
    if HAS_SINKS:
        head = kv_head * GROUP + (row_start + row) % GROUP
        sink = gl.load(sink_ptr + head).to(gl.float32) * LOG2_E
        top = gl.maximum(sink, LOWEST)
        total = gl.exp2(sink - top)
    acc = gl.zeros([PARTIAL_ROWS, HEAD_DIM], gl.float32, RESULT)
    for start in range(0, num_splits, SPLITS):
        is_piece = (start + piece < num_splits) & (row >= 0)[None, :]
        index = (first + (start + piece) * PROGRAMS) * PARTIAL_ROWS + row[None, :]
        lse = gl.load(lse_ptr + index, mask=is_piece, other=float("-inf"), cache_modifier=".cg")
        out = gl.load(
            partial_ptr + (index.to(gl.int64)[:, :, None] * HEAD_DIM + dim),
            mask=is_piece[:, :, None] & (dim >= 0),
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = gl.maximum(top, gl.max(lse, 0))
        shrink = gl.exp2(top - new_top)
        weight = gl.exp2(lse - new_top[None, :])
        total = total * shrink + gl.sum(weight, 0)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))
        acc = acc * shrink[:, None] + gl.sum(out * weight[:, :, None], 0)
        top = new_top
    total = gl.convert_layout(total, gl.SliceLayout(1, RESULT))
    acc = acc * gl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    out_row = row_start + gl.arange(0, PARTIAL_ROWS, gl.SliceLayout(1, RESULT))
    out_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, RESULT))[None, :]
    head = kv_head * GROUP + out_row % GROUP
    offset = ((out_row // GROUP) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    gl.store(
        out_ptr + (offset[:, None] + out_dim),
        acc.to(out_ptr.dtype.element_ty),
        mask=(out_row < ROWS)[:, None] & (out_dim >= 0),
    )


def decode(
    q: Tensor,
    view: PagedView,
    spec: AttentionSpec,
    plan: DecodePlan,
    config: GluonConfig,
    *,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Attention of q [num_sequences, q_len, num_heads, head_dim] over the view's pages."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    num_sequences, q_len, num_heads, head_dim = q.shape
    if out.numel() == 0:
        return out
    group = num_heads // view.num_kv_heads
    rows = min(group * q_len, config.columns)
    partial_rows = 1 << (rows - 1).bit_length()
    num_programs = plan.settings.programs_per_item
    num_partials = plan.capacity * num_programs * partial_rows
    partial = torch.empty(num_partials * head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_partials, dtype=torch.float32, device=q.device)
    granularity = str(view.scale_granularity) if view.is_fp8 else "none"
    launch(
        _decode_kernel,
        (plan.capacity * num_programs,),
        q,
        view.key_pages,
        view.value_pages,
        view.key_scale,
        view.value_scale,
        view.page_table,
        plan.items,
        plan.counters,
        lse if sinks is None else sinks,
        partial,
        lse,
        out,
        spec.scale_for(head_dim),
        spec.softcap or 1.0,
        spec.window or 0,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        view.key_pages.stride(0),
        view.key_pages.stride(1),
        view.value_pages.stride(0),
        view.value_pages.stride(1),
        *scale_strides(view.key_scale),
        *scale_strides(view.value_scale),
        view.page_table.stride(0),
        NUM_KV_HEADS=view.num_kv_heads,
        GROUP=group,
        Q_LEN=q_len,
        HEAD_DIM=head_dim,
        PAGE_SIZE=view.page_size,
        KEY_TOKEN_STRIDE=view.key_pages.stride(2),
        VALUE_TOKEN_STRIDE=view.value_pages.stride(2),
        TILE=config.tile_tokens,
        COLUMNS=config.columns,
        PARTIAL_ROWS=partial_rows,
        COMBINE_SPLITS=config.combine_splits,
        GRANULARITY=granularity,
        IS_CAUSAL=spec.causal,
        HAS_WINDOW=spec.window is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=sinks is not None,
        USE_PDL=config.use_pdl,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=config.use_pdl,
    )
    return out
