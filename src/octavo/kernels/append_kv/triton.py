"""append_kv kernel: one program turns and writes some KV heads of a token, and their queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.internals import internals
from octavo.kernels.append_kv.config import AppendConfig, choose
from octavo.kernels.device import describe
from octavo.kernels.launch import launch
from octavo.kernels.primitives import (
    amax_to_scale,
    cast_fp8,
    divide,
    divisor,
    finite_magnitude,
    pair_places,
    rotate_pair,
)
from octavo.numerics.formats import E4M3, format_of, is_fp8
from octavo.numerics.rotary import Rotary

with internals("triton"):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _turn(first, second, cos, sin, is_turned, IS_PARTIAL: tl.constexpr):
    """Pairs turned in float32; if IS_PARTIAL, only where is_turned."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    first_turned, second_turned = rotate_pair(first, second, cos, sin)
    if IS_PARTIAL:
        first_turned = tl.where(is_turned, first_turned, first)
        second_turned = tl.where(is_turned, second_turned, second)
    return first_turned, second_turned


# Rows of the tables are as many as tokens: compiled in, batches would have kernels of their own.
@triton.jit(do_not_specialize=["num_rows"])
def _append_kernel(
    key_ptr,
    value_ptr,
    query_ptr,
    out_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    key_pages_ptr,
    value_pages_ptr,
    key_scale_ptr,
    value_scale_ptr,
    q_scale_ptr,
    saturated_ptr,
    factor,
    num_slots,
    key_token,
    key_head,
    value_token,
    value_head,
    query_token,
    query_head,
    key_page,
    key_page_head,
    key_page_token,
    value_page,
    value_page_head,
    value_page_token,
    key_scale_page,
    key_scale_head,
    key_scale_token,
    value_scale_page,
    value_scale_head,
    value_scale_token,
    q_scale_head,
    num_rows,
    cos_row,
    cos_column,
    sin_row,
    sin_column,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_REPEATS: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_FMA: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Program (token, KV heads). A slot that is negative, or beyond the pages, is not written.

    LARGEST: beyond so many scales a value is saturated, and counted; None counts nothing.
    """
    if IS_DEPENDENT:
        # The next kernel may start now and wait for this one; this one waits for the one before.
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_HEADS
    pair = tl.arange(0, BLOCK_PAIRS)
    first_at, second_at = pair_places(pair, ROTARY_DIM, HEAD_DIM, IS_INTERLEAVED)
    is_pair = pair < ROTARY_DIM // 2 + (HEAD_DIM - ROTARY_DIM + 1) // 2
    first_mask = (is_pair & (first_at < HEAD_DIM))[None, :]
    second_mask = (is_pair & (second_at < HEAD_DIM))[None, :]
    first_at, second_at = first_at[None, :], second_at[None, :]

    # A row for each head's key and one for its value: they share every step but the turn.
    is_key = tl.arange(0, 2 * BLOCK_HEADS) % 2 == 0
    head = (first_head + tl.arange(0, 2 * BLOCK_HEADS) // 2).to(tl.int64)
    is_head = head < NUM_KV_HEADS
    slot = tl.load(slots_ptr + token)
    row = tl.where(is_key, key_ptr + token * key_token, value_ptr + token * value_token)
    row = (row + head * tl.where(is_key, key_head, value_head))[:, None]
    first = tl.load(row + first_at, mask=is_head[:, None] & first_mask, other=0.0)
    second = tl.load(row + second_at, mask=is_head[:, None] & second_mask, other=0.0)
    if HAS_QUERY:
        q_head = (first_head * GROUP + tl.arange(0, BLOCK_QUERIES)).to(tl.int64)
        is_query = (tl.arange(0, BLOCK_QUERIES) < BLOCK_HEADS * GROUP) & (
            q_head < NUM_KV_HEADS * GROUP
        )
        row = query_ptr + token * query_token + (q_head * query_head)[:, None]
        q_first_mask = is_query[:, None] & first_mask
        q_second_mask = is_query[:, None] & second_mask
        q_first = tl.load(row + first_at, mask=q_first_mask, other=0.0)
        q_second = tl.load(row + second_at, mask=q_second_mask, other=0.0)
    if ROTARY_DIM > 0:
        table_row = tl.program_id(0) % num_rows if HAS_REPEATS else tl.program_id(0)
        table_row = table_row.to(tl.int64)
        is_turned = pair < ROTARY_DIM // 2
        cos_at = cos_ptr + table_row * cos_row + pair * cos_column
        sin_at = sin_ptr + table_row * sin_row + pair * sin_column
        cos = tl.load(cos_at, mask=is_turned, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(sin_at, mask=is_turned, other=0.0).to(tl.float32)[None, :]
        is_turned = is_turned[None, :]
        first, second = _turn(first, second, cos, sin, is_turned & is_key[:, None], True)
        if HAS_QUERY:
            IS_PARTIAL: tl.constexpr = ROTARY_DIM < HEAD_DIM
            q_first, q_second = _turn(q_first, q_second, cos, sin, is_turned, IS_PARTIAL)
    if HAS_QUERY:
        at = out_ptr + (token * (NUM_KV_HEADS * GROUP) + q_head)[:, None] * HEAD_DIM
        dtype = out_ptr.dtype.element_ty
        if HAS_Q_SCALE:
            q_scale = tl.load(q_scale_ptr + q_head * q_scale_head, mask=is_query, other=1.0)
            by = divisor(q_scale[:, None], HAS_FMA)
            q_first, q_second = divide(q_first, by, HAS_FMA), divide(q_second, by, HAS_FMA)
        tl.store(at + first_at, cast_fp8(q_first, dtype, HAS_FMA), mask=q_first_mask)
        tl.store(at + second_at, cast_fp8(q_second, dtype, HAS_FMA), mask=q_second_mask)

    is_written = is_head & (slot >= 0) & (slot < num_slots)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    if IS_FP8:
        if PER_TOKEN:
            key_scale_ptr += page * key_scale_page + offset * key_scale_token
            value_scale_ptr += page * value_scale_page + offset * value_scale_token
        scale_at = tl.where(is_key, key_scale_ptr, value_scale_ptr)
        scale_at += head * tl.where(is_key, key_scale_head, value_scale_head)
        if PER_TOKEN:
            largest = tl.maximum(finite_magnitude(first), finite_magnitude(second))
            scale = amax_to_scale(tl.max(largest, axis=1), factor, False)
            tl.store(scale_at, scale, mask=is_written)
        else:
            scale = tl.load(scale_at, mask=is_head, other=1.0)
            if LARGEST is not None:
                limit = (scale * LARGEST)[:, None]
                is_first_beyond = tl.abs(first.to(tl.float32)) > limit
                is_second_beyond = tl.abs(second.to(tl.float32)) > limit
                num_beyond = is_first_beyond.to(tl.int32) + is_second_beyond.to(tl.int32)
                num_beyond = tl.sum(num_beyond, axis=1)
                at = saturated_ptr + tl.where(is_key, 0, 1)
                # Hardly any row has some: rows without them touch no memory.
                has_some = is_written & (num_beyond > 0)
                tl.atomic_add(at, num_beyond.to(tl.int64), mask=has_some, sem="relaxed")
        by = divisor(scale[:, None], HAS_FMA)
        first, second = divide(first, by, HAS_FMA), divide(second, by, HAS_FMA)
    row = tl.where(
        is_key,
        key_pages_ptr + page * key_page + offset * key_page_token,
        value_pages_ptr + page * value_page + offset * value_page_token,
    )
    row = (row + head * tl.where(is_key, key_page_head, value_page_head))[:, None]
    dtype = key_pages_ptr.dtype.element_ty
    tl.store(row + first_at, cast_fp8(first, dtype, HAS_FMA), mask=is_written[:, None] & first_mask)
    tl.store(
        row + second_at, cast_fp8(second, dtype, HAS_FMA), mask=is_written[:, None] & second_mask
    )


def append_kv(
    view: PagedView,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    query: Tensor | None = None,
    rotary: Rotary | None = None,
    q_scale: Tensor | None = None,
    saturated: Tensor | None = None,
    config: AppendConfig | None = None,
) -> Tensor | None:
    """Write keys and values into pages, as `octavo.ops.append_kv` promises, in one launch."""
    num_tokens, num_kv_heads, head_dim = key.shape
    group = 1 if query is None else query.shape[1] // num_kv_heads
    out = None
    if query is not None:
        query = _rows(query)
        dtype = query.dtype if q_scale is None else E4M3.dtype
        out = torch.empty(query.shape, dtype=dtype, device=query.device)
    if num_tokens == 0:
        return out
    config = config or choose(describe(key.device), num_tokens, num_kv_heads, group, head_dim)
    if key.dtype != value.dtype:  # the kernel reads both by one pointer
        key, value = key.float(), value.float()
    key, value = _rows(key), _rows(value)
    queries = key if query is None else query
    cos, sin = (key, key) if rotary is None else (rotary.cos, rotary.sin)
    rotary_dim = 0 if rotary is None else rotary.rotary_dim
    scale_strides = (view.key_scale, view.value_scale)
    num_pairs = rotary_dim // 2 + (head_dim - rotary_dim + 1) // 2
    largest = None if saturated is None else _largest(view)
    options = {"launch_pdl": True} if config.is_dependent else {}
    launch(
        _append_kernel,
        (num_tokens, triton.cdiv(num_kv_heads, config.block_heads)),
        key,
        value,
        queries,
        key if out is None else out,
        slots.contiguous(),
        cos,
        sin,
        view.key_pages,
        view.value_pages,
        view.key_scale,
        view.value_scale,
        view.key_scale if q_scale is None else q_scale,
        None if largest is None else saturated,
        1 / format_of(view.dtype).max if view.is_fp8 else 1.0,
        view.num_pages * view.page_size,
        *(stride for x in (key, value, queries) for stride in x.stride()[:2]),
        *(stride for x in (view.key_pages, view.value_pages) for stride in x.stride()[:3]),
        *(stride for scale in scale_strides for stride in _scale_strides(scale)),
        q_scale.stride(0) if q_scale is not None and q_scale.dim() else 0,
        max(1, len(cos)),
        *(stride for table in (cos, sin) for stride in table.stride()[:2]),
        PAGE_SIZE=view.page_size,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        IS_INTERLEAVED=rotary is not None and rotary.is_interleaved,
        HAS_REPEATS=rotary is not None and len(cos) < num_tokens,
        HAS_QUERY=query is not None,
        HAS_Q_SCALE=q_scale is not None,
        PER_TOKEN=view.key_scale.dim() == 3,
        IS_FP8=is_fp8(view.dtype),
        HAS_FMA=key.is_cuda,
        IS_DEPENDENT=config.is_dependent,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_PAIRS=triton.next_power_of_2(num_pairs),
        BLOCK_HEADS=config.block_heads,
        BLOCK_QUERIES=triton.next_power_of_2(config.block_heads * group),
        LARGEST=largest,
        num_warps=config.num_warps,
        # Products of rotary embedding are rounded one by one, as everywhere else.
        enable_fp_fusion=False,
        **options,
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _largest(view: PagedView) -> float | None:
    """How many scales a value must exceed to saturate; None if none can.

    What is less than half a step above the largest number still rounds to it.
    """
    if not view.is_fp8 or view.key_scale.dim() == 3:
        return None
    fmt = format_of(view.dtype)
    return fmt.max * (1 + 2.0 ** -(fmt.mantissa_bits + 2))


def _scale_strides(scale: Tensor) -> tuple[int, int, int]:
    """Strides of page, head and token; 0 where the scale has no such dimension."""
    match scale.dim():
        case 3:
            page, head, token = scale.stride()
            return page, head, token
        case 1:
            return 0, scale.stride(0), 0
    return 0, 0, 0
