"""quantize_qkv kernels: one cast of q, k and v with static scales; amax, then the cast, otherwise.

A tile has some tokens and a range of the values of all heads, side by side, so that heads of 72
values waste no lanes; with scales per head it stays within one head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import launch
from octavo.kernels.quantize_qkv.config import (
    MAX_RING_LENGTH,
    QuantizeQkvConfig,
    default,
)
from octavo.kernels.quantize_qkv.launch import (
    Problem,
    Three,
    amax_arguments,
    as_parts,
    by_part,
    cast_arguments,
    num_scales,
    problem_of,
    tensors_of,
)
from octavo.kernels.quantize_qkv.norm_primitives import amax_part, cast_part
from octavo.kernels.quantize_qkv.primitives import (
    amax_rows,
    cast_rows,
    cast_transposed,
    count_pass,
)
from octavo.numerics.amax import AmaxRing
from octavo.numerics.formats import Fp8Format
from octavo.numerics.granularity import Granularity, PerHead, PerTensor
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QkvScales, QuantizedQkv, empty_aligned
from octavo.numerics.rotary import Rotary
from octavo.numerics.value_layout import ValueLayout, num_columns

Rings = tuple[AmaxRing, AmaxRing, AmaxRing]
Tensors = dict[str, Any]


# Sizes are not compiled in: whether 16 divides them would make kernels of their own.
_SIZES = [
    *("num_q_tokens", "num_k_tokens", "q_length", "k_length", "num_rows"),
    *("num_q_programs", "num_k_programs", "num_sequences", "num_groups", "num_first"),
]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["num_tokens_ptr"])
def _amax_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    partial_ptr,
    count_ptr,
    slot_ptr,
    q_passes_ptr,
    k_passes_ptr,
    v_passes_ptr,
    num_tokens_ptr,
    q_ring_length,
    k_ring_length,
    v_ring_length,
    num_q_tokens,
    num_k_tokens,
    q_length,
    k_length,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    q_first_ptr,
    k_first_ptr,
    v_first_ptr,
    q_first_batch_stride,
    q_first_token_stride,
    q_first_head_stride,
    k_first_batch_stride,
    k_first_token_stride,
    k_first_head_stride,
    v_first_batch_stride,
    v_first_token_stride,
    v_first_head_stride,
    eps,
    num_first,
    num_rows,
    cos_row,
    cos_column,
    sin_row,
    sin_column,
    HAS_PADDING: tl.constexpr,
    HAS_RINGS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
    HAS_BATCH: tl.constexpr,
    HAS_REPEATS: tl.constexpr,
    NUM_NORMS: tl.constexpr,
    NORM_TOKENS: tl.constexpr,
    NORM_HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Partial amax values of every scale: program (chunk, scale of q, then of k, then of v)."""
    SHAPE: tl.constexpr = (
        HEAD_DIM,
        PADDED,
        ALIGN,
        HAS_BATCH,
        PER_HEAD,
        BLOCK_TOKENS,
        BLOCK_WIDTH,
    )
    TURN: tl.constexpr = (ROTARY, ROTARY_DIM, TABLE_ALIGN, HAS_REPEATS)
    NO_TURN: tl.constexpr = (0, 0, 1, False)
    NORM: tl.constexpr = (NUM_NORMS, NORM_TOKENS, NORM_HEADS)
    chunk, scale = tl.program_id(0), tl.program_id(1)
    if HAS_PADDING:
        num_tokens = tl.load(num_tokens_ptr)
        num_q_tokens = tl.minimum(num_q_tokens, num_tokens)
        num_k_tokens = tl.minimum(num_k_tokens, num_tokens)
    q_first = (q_first_ptr, q_first_batch_stride, q_first_token_stride, q_first_head_stride)
    k_first = (k_first_ptr, k_first_batch_stride, k_first_token_stride, k_first_head_stride)
    v_first = (v_first_ptr, v_first_batch_stride, v_first_token_stride, v_first_head_stride)
    q_memory = (q_ptr, q_batch_stride, q_token_stride, q_head_stride, q_first, num_first)
    k_memory = (k_ptr, k_batch_stride, k_token_stride, k_head_stride, k_first, num_first)
    v_memory = (v_ptr, v_batch_stride, v_token_stride, v_head_stride, v_first, num_first)
    q = (q_memory, num_q_tokens, NUM_HEADS, q_length)
    k = (k_memory, num_k_tokens, NUM_KV_HEADS, k_length)
    v = (v_memory, num_k_tokens, NUM_KV_HEADS, k_length)
    q_norm, k_norm = (q_norm_ptr, eps, num_first), (k_norm_ptr, eps, num_first)
    tables = (cos_ptr, sin_ptr, num_rows, cos_row, cos_column, sin_row, sin_column)
    q_scales = NUM_HEADS if PER_HEAD else 1
    k_scales = NUM_KV_HEADS if PER_HEAD else 1
    k_place, v_place = q_scales * NUM_PARTIALS, (q_scales + k_scales) * NUM_PARTIALS
    if scale < q_scales:
        amax_part(
            chunk,
            scale,
            q,
            q_norm,
            tables,
            partial_ptr,
            count_ptr,
            HAS_RINGS,
            NUM_PARTIALS,
            SHAPE,
            TURN,
            NORM,
        )
    elif scale < q_scales + k_scales:
        amax_part(
            chunk,
            scale - q_scales,
            k,
            k_norm,
            tables,
            partial_ptr + k_place,
            count_ptr + k_place,
            HAS_RINGS,
            NUM_PARTIALS,
            SHAPE,
            TURN,
            NORM,
        )
    else:
        amax_rows(
            chunk,
            scale - q_scales - k_scales,
            v,
            tables,
            partial_ptr + v_place,
            count_ptr + v_place,
            HAS_RINGS,
            NUM_PARTIALS,
            SHAPE,
            NO_TURN,
        )
    # The cast needs the slot of this pass; here no program but this one touches the counters.
    if HAS_RINGS and chunk == 0 and scale == 0:
        count_pass(q_passes_ptr, slot_ptr, q_ring_length)
        count_pass(k_passes_ptr, slot_ptr + 1, k_ring_length)
        count_pass(v_passes_ptr, slot_ptr + 2, v_ring_length)


@triton.jit(do_not_specialize=_SIZES)
def _cast_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_data_ptr,
    k_data_ptr,
    v_data_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    cu_seqlens_ptr,
    partial_ptr,
    count_ptr,
    slot_ptr,
    q_ring_ptr,
    k_ring_ptr,
    v_ring_ptr,
    q_nonfinite_ptr,
    k_nonfinite_ptr,
    v_nonfinite_ptr,
    factor,
    num_q_programs,
    num_k_programs,
    num_sequences,
    num_groups,
    q_scale_stride,
    k_scale_stride,
    v_scale_stride,
    q_ring_length,
    k_ring_length,
    v_ring_length,
    num_q_tokens,
    num_k_tokens,
    q_length,
    k_length,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    q_first_ptr,
    k_first_ptr,
    v_first_ptr,
    q_first_batch_stride,
    q_first_token_stride,
    q_first_head_stride,
    k_first_batch_stride,
    k_first_token_stride,
    k_first_head_stride,
    v_first_batch_stride,
    v_first_token_stride,
    v_first_head_stride,
    eps,
    num_first,
    num_rows,
    cos_row,
    cos_column,
    sin_row,
    sin_column,
    IS_TRANSPOSED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    IS_DYNAMIC: tl.constexpr,
    HAS_RINGS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    HAS_FMA: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
    HAS_BATCH: tl.constexpr,
    HAS_REPEATS: tl.constexpr,
    NUM_NORMS: tl.constexpr,
    NORM_TOKENS: tl.constexpr,
    NORM_HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Tiles of q, then of k, then of v, each with its scale."""
    SHAPE: tl.constexpr = (
        HEAD_DIM,
        PADDED,
        ALIGN,
        HAS_BATCH,
        PER_HEAD,
        BLOCK_TOKENS,
        BLOCK_WIDTH,
    )
    TURN: tl.constexpr = (ROTARY, ROTARY_DIM, TABLE_ALIGN, HAS_REPEATS)
    SCALING: tl.constexpr = (IS_DYNAMIC, HAS_RINGS, NUM_PARTIALS, RING_BLOCK, HAS_FMA)
    NO_TURN: tl.constexpr = (0, 0, 1, False)
    NORM: tl.constexpr = (NUM_NORMS, NORM_TOKENS, NORM_HEADS)
    q_first = (q_first_ptr, q_first_batch_stride, q_first_token_stride, q_first_head_stride)
    k_first = (k_first_ptr, k_first_batch_stride, k_first_token_stride, k_first_head_stride)
    v_first = (v_first_ptr, v_first_batch_stride, v_first_token_stride, v_first_head_stride)
    q_memory = (q_ptr, q_batch_stride, q_token_stride, q_head_stride, q_first, num_first)
    k_memory = (k_ptr, k_batch_stride, k_token_stride, k_head_stride, k_first, num_first)
    v_memory = (v_ptr, v_batch_stride, v_token_stride, v_head_stride, v_first, num_first)
    q = (q_memory, num_q_tokens, NUM_HEADS, q_length)
    k = (k_memory, num_k_tokens, NUM_KV_HEADS, k_length)
    v = (v_memory, num_k_tokens, NUM_KV_HEADS, k_length)
    q_norm, k_norm = (q_norm_ptr, eps, num_first), (k_norm_ptr, eps, num_first)
    tables = (cos_ptr, sin_ptr, num_rows, cos_row, cos_column, sin_row, sin_column)
    k_place = (NUM_HEADS if PER_HEAD else 1) * NUM_PARTIALS
    v_place = k_place + (NUM_KV_HEADS if PER_HEAD else 1) * NUM_PARTIALS
    index = tl.program_id(0)
    if index < num_q_programs:
        given = (q_scale_ptr, q_scale_stride, partial_ptr, count_ptr, factor)
        ring = (q_ring_ptr, q_nonfinite_ptr, slot_ptr, q_ring_length)
        cast_part(index, q, q_norm, tables, q_data_ptr, given, ring, SCALING, SHAPE, TURN, NORM)
    elif index < num_q_programs + num_k_programs:
        given = (k_scale_ptr, k_scale_stride, partial_ptr + k_place, count_ptr + k_place, factor)
        ring = (k_ring_ptr, k_nonfinite_ptr, slot_ptr + 1, k_ring_length)
        index -= num_q_programs
        cast_part(index, k, k_norm, tables, k_data_ptr, given, ring, SCALING, SHAPE, TURN, NORM)
    else:
        given = (v_scale_ptr, v_scale_stride, partial_ptr + v_place, count_ptr + v_place, factor)
        ring = (v_ring_ptr, v_nonfinite_ptr, slot_ptr + 2, v_ring_length)
        index -= num_q_programs + num_k_programs
        if IS_TRANSPOSED:
            cast_transposed(
                index,
                v,
                v_data_ptr,
                q_data_ptr.dtype.element_ty,
                (cu_seqlens_ptr, num_sequences, num_groups),
                given,
                ring,
                IS_PACKED,
                BLOCK_KEYS,
                BLOCK_VALUES,
                SCALING,
                SHAPE,
            )
        else:
            cast_rows(index, v, tables, v_data_ptr, given, ring, SCALING, SHAPE, NO_TURN)


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fmt: Fp8Format,
    *,
    scales: QkvScales | None = None,
    rings: Rings | None = None,
    granularity: Granularity = PerTensor(),
    norm: QkNorm | None = None,
    rotary: Rotary | None = None,
    value_layout: ValueLayout = "rows",
    cu_seqlens: Tensor | None = None,
    num_tokens: Tensor | None = None,
    first: Three | None = None,
    config: QuantizeQkvConfig | None = None,
) -> QuantizedQkv:
    """q, k and v in FP8, as `octavo.ops.quantize_qkv` promises: one launch, or two if dynamic."""
    if scales is None:
        per_head = isinstance(granularity, PerHead)
    else:
        per_head = any(scale.dim() for scale in (scales.q, scales.k, scales.v))
    num_first = 0 if first is None else first[0].shape[1]
    parts = as_parts((q, k, v), first)
    config = config or default(parts[0].form.num_tokens, q.shape[-2] if per_head else 1)
    problem = problem_of(parts, norm, rotary, per_head, config)
    tensors = tensors_of(parts, norm, rotary)
    scratch = None
    if scales is None:
        shapes = (granularity.scale_shape(tuple(x.shape)) for x in (q, k, v))
        scales = QkvScales(*(q.new_empty(shape, dtype=torch.float32) for shape in shapes))
        scratch = _run_amax(problem, tensors, rings, num_tokens)
    q_shape, k_shape = ((*x.shape[:-3], x.shape[-3] + num_first, *x.shape[-2:]) for x in (q, k))
    q8, k8 = empty_aligned(q_shape, fmt.dtype, q), empty_aligned(k_shape, fmt.dtype, k)
    if value_layout == "rows":
        v8 = empty_aligned(k_shape, fmt.dtype, v)
    else:
        columns = num_columns(k_shape[-3], None if cu_seqlens is None else len(cu_seqlens) - 1)
        v8 = v.new_empty((*k_shape[:-3], *k_shape[-2:], columns), dtype=fmt.dtype)
    result = QuantizedQkv(q8, k8, v8, scales, value_layout)
    _run_cast(problem, tensors, scratch, result, rings, 1 / fmt.max, cu_seqlens)
    return result


def _run_amax(
    problem: Problem, tensors: Tensors, rings: Rings | None, num_tokens: Tensor | None
) -> Tensors:
    """Partial amax values, counts of NaN and Inf, and the slots of this pass in the rings."""
    like, size = tensors["q_ptr"], num_scales(problem) * problem.config.num_partials
    scratch = {
        "partial_ptr": like.new_empty(size, dtype=torch.float32),
        "count_ptr": like.new_empty(size if rings else 1, dtype=torch.int32),
        "slot_ptr": like.new_empty(3, dtype=torch.int32),
    }
    unused = scratch["slot_ptr"]
    passes = [ring.num_passes for ring in rings] if rings else [unused] * 3
    given = {
        **tensors,
        **scratch,
        **by_part("passes_ptr", passes),
        "num_tokens_ptr": unused if num_tokens is None else num_tokens,
    }
    grid, fixed = amax_arguments(problem, _ring_lengths(rings), num_tokens is not None)
    launch(_amax_kernel, grid, **given, **fixed)
    return scratch


def _run_cast(
    problem: Problem,
    tensors: Tensors,
    scratch: Tensors | None,
    result: QuantizedQkv,
    rings: Rings | None,
    factor: float,
    cu_seqlens: Tensor | None,
) -> None:
    is_transposed = result.value_layout == "transposed"
    words = result.v.flatten().view(torch.int32) if is_transposed else result.v
    scales = (result.scales.q, result.scales.k, result.scales.v)
    unused = scales[0]
    given = {
        **tensors,
        **(scratch or {name: unused for name in ("partial_ptr", "count_ptr", "slot_ptr")}),
        **by_part("data_ptr", [result.q, result.k, words]),
        **by_part("scale_ptr", scales),
        **by_part("ring_ptr", [ring.values for ring in rings] if rings else [unused] * 3),
        **by_part(
            "nonfinite_ptr", [ring.num_nonfinite for ring in rings] if rings else [unused] * 3
        ),
        "cu_seqlens_ptr": unused if cu_seqlens is None else cu_seqlens.contiguous(),
    }
    grid, fixed = cast_arguments(
        problem,
        factor,
        tuple(scale.stride(0) if scale.dim() else 0 for scale in scales),
        _ring_lengths(rings),
        result.v.shape[-1] if is_transposed else None,
        None if cu_seqlens is None else len(cu_seqlens) - 1,
        is_dynamic=scratch is not None,
        has_fma=result.q.is_cuda,
    )
    launch(_cast_kernel, grid, **given, **fixed)


def _ring_lengths(rings: Rings | None) -> tuple[int, ...] | None:
    if rings is None:
        return None
    lengths = tuple(ring.values.shape[0] for ring in rings)
    assert max(lengths) <= MAX_RING_LENGTH  # which `count_pass` counts on
    return lengths
