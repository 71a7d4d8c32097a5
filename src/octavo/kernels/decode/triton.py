"""Decode kernels: the plan of a step in one launch, and split-KV attention on any CUDA GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.kernels.decode.config import TritonConfig, is_fp8_native, scale_strides
from octavo.kernels.device import describe
from octavo.kernels.launch import launch
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.decode_plan import (
    COMBINE_BLOCKS,
    COMBINED_AT_ONCE,
    ITEM_BLOCKS,
    ITEM_FIELDS,
    NUM_MODES,
    SLOT_UNITS,
    DecodePlan,
    PlanSettings,
    max_deadline,
)

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, so that a row that sees nothing subtracts two equal numbers instead of two infinities.
LOWEST = tl.constexpr(-3.4028234663852886e38)
ITEM_COST = tl.constexpr(ITEM_BLOCKS)
ITEM_SIZE = tl.constexpr(len(ITEM_FIELDS))
UNITS = tl.constexpr(SLOT_UNITS)
AT_ONCE = tl.constexpr(COMBINED_AT_ONCE)
COMBINE_COST = tl.constexpr(COMBINE_BLOCKS)


@triton.jit
def _divide(a, b):
    """⌊a / b⌋ for 0 ≤ a < 2^22 and b > 0: a rounded quotient put right, faster than integers."""
    quotient = (a.to(tl.float32) / b.to(tl.float32)).to(tl.int32)
    rest = a - quotient * b
    return quotient + (rest >= b).to(tl.int32) - (rest < 0).to(tl.int32)


@triton.jit
def _ceil_div(a, b):
    return _divide(a + b - 1, b)


@triton.jit
def _blocks(length, q_len, window, BLOCK_TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """(first block, number of blocks) that a sequence's queries see."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - q_len - window + 1, 0) // BLOCK_TOKENS
    return first, (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS - first


@triton.jit
def _num_splits(num_blocks, chunk, is_sequence):
    return tl.where(is_sequence, tl.maximum(_ceil_div(num_blocks, chunk), 1), 0)


@triton.jit
def _chunk(deadline, mode):
    return tl.maximum(_divide(deadline, tl.maximum(mode, 1)) - ITEM_COST, 1)


@triton.jit
def _is_feasible(num_blocks, is_sequence, longest, deadline, mode, slot_units, capacity):
    """Whether all items end by their mode's deadline: see `make_items`."""
    chunk = _chunk(deadline, mode)
    num_splits = _num_splits(num_blocks[None, :], chunk[:, None], is_sequence[None, :])
    cost = _ceil_div(num_blocks[None, :], tl.maximum(num_splits, 1)) + ITEM_COST
    in_slot = tl.maximum(_divide(deadline[:, None], cost), 1)
    units = tl.sum(num_splits * _divide(in_slot * 0 + UNITS, in_slot), axis=1)
    has_room = tl.sum(num_splits, axis=1) <= capacity
    is_combined = (mode > 0) | (_ceil_div(longest, chunk) <= AT_ONCE)
    return has_room & is_combined & (units <= slot_units)


# Sizes are not compiled in: every batch would have a kernel of its own.
@triton.jit(
    do_not_specialize=[
        *("num_sequences", "num_counters", "q_len", "window", "num_slots", "slot_units"),
        *("programs_per_item", "capacity", "num_bisections"),
    ]
)
def _plan_kernel(
    length_ptr,
    item_ptr,
    counter_ptr,
    num_sequences,
    num_counters,
    q_len,
    window,
    num_slots,
    slot_units,
    programs_per_item,
    capacity,
    num_bisections,
    HAS_WINDOW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MODES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    OTHERS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The whole plan, by one program: what `octavo.numerics.decode_plan.make_items` says."""
    offset = tl.arange(0, CHUNK)
    for start in range(0, num_counters, CHUNK):
        tl.store(counter_ptr + start + offset, 0, mask=start + offset < num_counters)

    sequence = tl.arange(0, SEQUENCES)
    is_sequence = sequence < num_sequences
    length = tl.load(length_ptr + sequence, mask=is_sequence, other=0)
    first, num_blocks = _blocks(length, q_len, window, BLOCK_TOKENS, HAS_WINDOW)
    longest = tl.max(num_blocks, axis=0)
    work = tl.sum(num_blocks.to(tl.int64), axis=0) + ITEM_COST * num_sequences
    work = work * programs_per_item
    mode = tl.arange(0, MODES)
    low = tl.maximum((work - 1) // num_slots, ITEM_COST).to(tl.int32) + mode * 0
    high = tl.maximum((2 * work + num_slots - 1) // num_slots, longest + ITEM_COST)
    high = high.to(tl.int32) + mode * 0
    is_possible = _is_feasible(num_blocks, is_sequence, longest, high, mode, slot_units, capacity)
    impossible = 2 * high
    for _bisection in range(num_bisections):
        middle = (low + high) // 2
        is_feasible = _is_feasible(
            num_blocks, is_sequence, longest, middle, mode, slot_units, capacity
        )
        is_open = high - low > 1
        high = tl.where(is_open & is_feasible, middle, high)
        low = tl.where(is_open & (is_feasible == 0), middle, low)
    deadline = tl.where(is_possible, high, impossible)
    chunk = _chunk(deadline, mode)
    cost = deadline + tl.where(_ceil_div(longest, chunk) > AT_ONCE, COMBINE_COST, 0)
    best = tl.argmin(cost, axis=0, tie_break_left=True)
    chunk = tl.max(tl.where(mode == best, chunk, 0), axis=0)

    # The longest items first: a sequence's come after all of those that are longer.
    num_splits = _num_splits(num_blocks, chunk, is_sequence)
    divisor = tl.maximum(num_splits, 1)
    size = _ceil_div(num_blocks, divisor)
    item = sequence * 0
    for start in range(0, num_sequences, OTHERS):
        other = start + tl.arange(0, OTHERS)
        is_other = other < num_sequences
        other_length = tl.load(length_ptr + other, mask=is_other, other=0)
        other_first, other_blocks = _blocks(other_length, q_len, window, BLOCK_TOKENS, HAS_WINDOW)
        other_splits = _num_splits(other_blocks, chunk, is_other)
        other_size = _ceil_div(other_blocks, tl.maximum(other_splits, 1))
        is_tie = other_size[None, :] == size[:, None]
        is_before = is_tie & (other[None, :] < sequence[:, None])
        is_before = is_before | (other_size[None, :] > size[:, None])
        item += tl.sum(tl.where(is_before, other_splits[None, :], 0), axis=1)
    for start in range(0, tl.max(num_splits, axis=0), SPLITS):
        split = (start + tl.arange(0, SPLITS))[:, None]
        has_split = split < num_splits[None, :]
        begin = split * num_blocks[None, :] // divisor[None, :]
        end = (split + 1) * num_blocks[None, :] // divisor[None, :]
        row_ptr = item_ptr + (item[None, :] + split) * ITEM_SIZE
        tl.store(row_ptr, sequence[None, :] + split * 0, mask=has_split)
        tl.store(row_ptr + 1, first[None, :] + begin, mask=has_split)
        tl.store(row_ptr + 2, first[None, :] + end, mask=has_split)
        tl.store(row_ptr + 3, split + sequence[None, :] * 0, mask=has_split)
        tl.store(row_ptr + 4, num_splits[None, :] + split * 0, mask=has_split)
        tl.store(row_ptr + 5, length[None, :] + split * 0, mask=has_split)
    num_used = tl.sum(num_splits, axis=0) * ITEM_SIZE
    for start in range(0, capacity * ITEM_SIZE, CHUNK):
        is_unused = (start + offset >= num_used) & (start + offset < capacity * ITEM_SIZE)
        tl.store(item_ptr + start + offset, -1, mask=is_unused)


@triton.jit
def _widen(x, dtype: tl.constexpr, BYTES_OF: tl.constexpr):
    """x as `dtype`; bytes are decoded as e4m3 or e5m2, exactly, where the GPU has no such type."""
    if BYTES_OF == "e5m2":  # the upper byte of the same float16
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif BYTES_OF == "e4m3":  # a float16 whose exponent is 8 lower, and no infinities
        bits = x.to(tl.uint16)
        magnitude = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = magnitude.to(tl.float16, bitcast=True) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return x.to(dtype)


@triton.jit
def _fit_float16(q):
    """(q, its power): [query, d] divided by the power of two that makes each query fit."""
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), axis=1)
    # A bf16 below 2^16 is a float16; NaN and Inf stay what they are.
    excess = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - (127 + 15), 0)
    inverse = ((127 - excess) << 23).to(tl.float32, bitcast=True)
    power = ((127 + excess) << 23).to(tl.float32, bitcast=True)
    return (q * inverse[:, None]).to(tl.float16), power


# Room for a sequence is not compiled in: every size of page table would have its kernel.
@triton.jit(do_not_specialize=["table_stride"])
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
    key_token_stride,
    value_page_stride,
    value_head_stride,
    value_token_stride,
    key_scale_page_stride,
    key_scale_head_stride,
    key_scale_token_stride,
    value_scale_page_stride,
    value_scale_head_stride,
    value_scale_token_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    COMBINE_SPLITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BYTES_OF: tl.constexpr,
    GRANULARITY: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One item of the plan for one KV head: its partial result, or the whole one.

    The program that finishes the last piece of a sequence adds up all of them.
    """
    ROWS: tl.constexpr = GROUP * Q_LEN
    ROW_BLOCKS: tl.constexpr = (ROWS + COLUMNS - 1) // COLUMNS
    PROGRAMS: tl.constexpr = NUM_KV_HEADS * ROW_BLOCKS
    pid = tl.program_id(0)
    item = pid // PROGRAMS
    program = pid % PROGRAMS
    kv_head = program // ROW_BLOCKS
    row_start = (program % ROW_BLOCKS) * COLUMNS
    item_ptr += item * ITEM_SIZE
    sequence = tl.load(item_ptr)
    first_block = tl.load(item_ptr + 1)
    end_block = tl.load(item_ptr + 2)
    split = tl.load(item_ptr + 3)
    num_splits = tl.load(item_ptr + 4)
    length = tl.load(item_ptr + 5)
    if sequence < 0:
        return

    logit_scale = softmax_scale * LOG2_E
    out_scale = 1.0
    if GRANULARITY == "tensor" or GRANULARITY == "head":
        logit_scale *= tl.load(key_scale_ptr + kv_head * key_scale_head_stride)
        out_scale = tl.load(value_scale_ptr + kv_head * value_scale_head_stride)

    row = row_start + tl.arange(0, COLUMNS)
    dim = tl.arange(0, WIDTH)
    is_row = row < ROWS
    is_dim = dim < HEAD_DIM
    head = kv_head * GROUP + row % GROUP
    position = length - Q_LEN + row // GROUP
    q_offset = (row // GROUP) * q_token_stride + head * q_head_stride
    q = tl.load(
        q_ptr + sequence.to(tl.int64) * q_sequence_stride + q_offset[:, None] + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    if q.dtype.is_bf16() and COMPUTE.is_fp16():
        q, power = _fit_float16(q)
        logit_scale = logit_scale * power[:, None]
    q = q.to(COMPUTE)
    table_ptr += sequence.to(tl.int64) * table_stride
    key_ptr += kv_head.to(tl.int64) * key_head_stride
    value_ptr += kv_head.to(tl.int64) * value_head_stride
    oldest = length * 0
    if HAS_WINDOW:
        oldest = tl.maximum(length - Q_LEN - window + 1, 0)

    row_max = tl.full([COLUMNS], LOWEST, tl.float32)
    row_sum = tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for block in range(first_block, end_block):
        token = block * BLOCK + tl.arange(0, BLOCK)
        # Slots that no token owns may hold NaN, which a weight of 0 does not take away.
        is_token = (token < length) & (token >= oldest)
        page = tl.load(table_ptr + token // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
        slot = token % PAGE_SIZE
        mask = is_token[:, None] & is_dim[None, :]
        k_offset = page * key_page_stride + slot * key_token_stride
        v_offset = page * value_page_stride + slot * value_token_stride
        k = tl.load(key_ptr + k_offset[:, None] + dim[None, :], mask=mask, other=0.0)
        v = tl.load(value_ptr + v_offset[:, None] + dim[None, :], mask=mask, other=0.0)
        k = _widen(k, COMPUTE, BYTES_OF)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if GRANULARITY == "token":
            k_scale_offset = page * key_scale_page_stride + slot * key_scale_token_stride
            v_scale_offset = page * value_scale_page_stride + slot * value_scale_token_stride
            k_scale_offset += kv_head * key_scale_head_stride
            v_scale_offset += kv_head * value_scale_head_stride
            k_scale = tl.load(key_scale_ptr + k_scale_offset, mask=is_token, other=0.0)
            v_scale = tl.load(value_scale_ptr + v_scale_offset, mask=is_token, other=1.0)
            s = s * k_scale[None, :]
        s = s * logit_scale
        if HAS_SOFTCAP:
            cap = softcap * LOG2_E
            s = cap - 2.0 * cap / (1.0 + tl.exp2(s * (2.0 / softcap)))
        is_seen = is_token[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (token[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (tl.abs(token[None, :] - position[:, None]) < window)
        s = tl.where(is_seen, s, float("-inf"))
        if GRANULARITY == "token":
            # The maximum of what P·V adds up, so that weights with their scale stay below 1.
            new_max = tl.maximum(row_max, tl.max(s + tl.log2(v_scale)[None, :], axis=1))
        else:
            new_max = tl.maximum(row_max, tl.max(s, axis=1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        row_max = new_max
        if GRANULARITY == "token":
            p = p * v_scale[None, :]
        v = _widen(v, COMPUTE, BYTES_OF)
        acc = tl.dot(p.to(COMPUTE), v, acc * shrink[:, None], input_precision="ieee")

    out = tl.where((row_sum == 0.0)[:, None], 0.0, acc * (out_scale / row_sum)[:, None])
    lse = row_max + tl.log2(row_sum)
    out_ptr += sequence.to(tl.int64) * (Q_LEN * NUM_KV_HEADS * GROUP * HEAD_DIM)
    if num_splits == 1:
        if HAS_SINKS:
            sink = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            out = out / (1.0 + tl.exp2(sink - tl.maximum(lse, LOWEST)))[:, None]
        out_row = ((row // GROUP) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(
            out_ptr + (out_row[:, None] + dim[None, :]),
            out.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )
        return

    in_block = tl.arange(0, COLUMNS)
    partial_row = (item * PROGRAMS + program).to(tl.int64) * PARTIAL_ROWS + in_block
    is_kept = in_block < PARTIAL_ROWS
    partial = partial_ptr + (partial_row[:, None] * HEAD_DIM + dim[None, :])
    tl.store(partial, out, mask=is_kept[:, None] & is_dim[None, :])
    tl.store(lse_ptr + partial_row, lse, mask=is_kept)
    tl.debug_barrier()  # all of the program's partial result before its count
    counter_ptr += sequence * PROGRAMS + program
    num_done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if num_done == num_splits - 1:
        tl.store(counter_ptr, 0)
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
            WIDTH,
            PROGRAMS,
            PARTIAL_ROWS,
            COMBINE_SPLITS,
            HAS_SINKS,
        )


@triton.jit
def _combine(
    partial_ptr,
    lse_ptr,
    sink_ptr,
    out_ptr,
    first,
    num_splits,
    kv_head,
    row_start,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The pieces of one sequence and KV head weighed by their log-sum-exp, in their own order."""
    in_block = tl.arange(0, PARTIAL_ROWS)
    row = row_start + in_block
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, WIDTH)
    is_dim = dim < HEAD_DIM
    top = tl.full([PARTIAL_ROWS], LOWEST, tl.float32)
    total = tl.zeros([PARTIAL_ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2_E
        top = tl.maximum(sink, LOWEST)
        total = tl.exp2(sink - top)
    acc = tl.zeros([PARTIAL_ROWS, WIDTH], tl.float32)
    for start in range(0, num_splits, SPLITS):
        piece = start + tl.arange(0, SPLITS)
        is_piece = (piece < num_splits)[:, None] & (in_block >= 0)[None, :]
        index = (first + piece * PROGRAMS).to(tl.int64)[:, None] * PARTIAL_ROWS + in_block[None, :]
        lse = tl.load(lse_ptr + index, mask=is_piece, other=float("-inf"), cache_modifier=".cg")
        out = tl.load(
            partial_ptr + (index[:, :, None] * HEAD_DIM + dim[None, None, :]),
            mask=is_piece[:, :, None] & is_dim[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top[None, :])
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(out * weight[:, :, None], axis=0)
        top = new_top
    acc = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    offset = ((row // GROUP) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(
        out_ptr + (offset[:, None] + dim[None, :]),
        acc.to(out_ptr.dtype.element_ty),
        mask=(row < ROWS)[:, None] & is_dim[None, :],
    )


def make_plan(lengths: Tensor, settings: PlanSettings, max_blocks: int) -> tuple[Tensor, Tensor]:
    """(items, counters) of a DecodePlan, made on the device of `lengths` without waiting for it.

    max_blocks: an upper bound of a sequence's blocks.
    """
    num_sequences = len(lengths)
    num_counters = num_sequences * settings.programs_per_item
    size = (settings.capacity, len(ITEM_FIELDS))
    items = torch.empty(size, dtype=torch.int32, device=lengths.device)
    counters = torch.empty(num_counters, dtype=torch.int32, device=lengths.device)
    if num_sequences == 0:
        return items.fill_(-1), counters
    sequences = triton.next_power_of_2(num_sequences)
    launch(
        _plan_kernel,
        (1,),
        lengths,
        items,
        counters,
        num_sequences,
        num_counters,
        settings.q_len,
        settings.window or 0,
        settings.num_slots,
        settings.slot_units,
        settings.programs_per_item,
        settings.capacity,
        max_deadline(num_sequences, max_blocks, settings).bit_length(),
        HAS_WINDOW=settings.window is not None,
        BLOCK_TOKENS=settings.block_tokens,
        MODES=NUM_MODES,
        SEQUENCES=sequences,
        # Beyond 4096 sequences: tiles no larger, and all the warps that a program can have.
        OTHERS=min(32, sequences, max(1, 2**17 // sequences)),
        SPLITS=max(1, 64 // sequences),
        CHUNK=512,
        num_warps=32 if sequences > 4096 else min(8, max(1, sequences // 32)),
    )
    return items, counters


def decode(
    q: Tensor,
    view: PagedView,
    spec: AttentionSpec,
    plan: DecodePlan,
    config: TritonConfig,
    *,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Attention of q [num_sequences, q_len, num_heads, head_dim] over the view's pages."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    if out.numel() == 0:
        return out
    num_sequences, q_len, num_heads, head_dim = q.shape
    group = num_heads // view.num_kv_heads
    partial_rows = triton.next_power_of_2(min(group * q_len, config.columns))
    num_programs = plan.settings.programs_per_item
    num_partials = plan.capacity * num_programs * partial_rows
    partial = torch.empty(num_partials * head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_partials, dtype=torch.float32, device=q.device)
    key, value, bytes_of = view.key_pages, view.value_pages, ""
    if view.is_fp8 and not is_fp8_native(describe(q.device)):
        key, value = key.view(torch.uint8), value.view(torch.uint8)
        bytes_of = "e4m3" if view.dtype == torch.float8_e4m3fn else "e5m2"
    launch(
        _decode_kernel,
        (plan.capacity * num_programs,),
        q,
        key,
        value,
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
        *q.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *scale_strides(view.key_scale),
        *scale_strides(view.value_scale),
        view.page_table.stride(0),
        NUM_KV_HEADS=view.num_kv_heads,
        GROUP=group,
        Q_LEN=q_len,
        HEAD_DIM=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        PAGE_SIZE=view.page_size,
        BLOCK=config.block_tokens,
        COLUMNS=config.columns,
        PARTIAL_ROWS=partial_rows,
        COMBINE_SPLITS=config.combine_splits,
        COMPUTE=_compute_dtype(q.dtype, view.dtype),
        BYTES_OF=bytes_of,
        GRANULARITY=str(view.scale_granularity) if view.is_fp8 else "none",
        IS_CAUSAL=spec.causal,
        HAS_WINDOW=spec.window is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _compute_dtype(q_dtype: torch.dtype, page_dtype: torch.dtype) -> tl.dtype:
    """The dtype of both products' operands: one that loses nothing of q and of the pages."""
    dtypes = {q_dtype, page_dtype}
    if torch.float32 in dtypes or dtypes == {torch.float16, torch.bfloat16}:
        is_exact = page_dtype == torch.float16 and q_dtype == torch.bfloat16
        return tl.float16 if is_exact else tl.float32
    return tl.bfloat16 if page_dtype == torch.bfloat16 else tl.float16
