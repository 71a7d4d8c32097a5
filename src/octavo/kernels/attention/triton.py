"""Attention in Triton: dense and packed, FP8 or 16 bit, one program for each tile of queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.attention.config import AttentionConfig, AttentionShape, choose, split_head_dim
from octavo.kernels.attention.primitives import LN_2, LOG2_E, LOWEST, attend, load_rows
from octavo.kernels.device import describe
from octavo.kernels.launch import launch
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import is_fp8
from octavo.numerics.qkv import QkvScales
from octavo.numerics.value_layout import ValueLayout


@triton.jit
def _zero_padding(
    out_ptr,
    lse_ptr,
    first,
    num_tokens,
    head,
    num_heads,
    num_tiles,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zeros for the tokens after the last sequence, from `first` on in steps of all tiles."""
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    for start in range(first, num_tokens, num_tiles * BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        is_token = token < num_tokens
        row = token * num_heads + head
        place = out_ptr + row[:, None] * HEAD_DIM + dim[None, :]
        zeros = tl.zeros([BLOCK, dim.shape[0]], out_ptr.dtype.element_ty)
        tl.store(place, zeros, mask=is_token[:, None] & (dim < HEAD_DIM)[None, :])
        tl.store(lse_ptr + row, tl.zeros([BLOCK], tl.float32), mask=is_token)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "q_len", "kv_len", "window"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sink_ptr,
    key_mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_inner_stride,
    v_head_stride,
    num_tiles,
    num_sequences,
    num_heads,
    group,
    q_len,
    kv_len,
    window,
    softmax_scale,
    softcap,
    IS_PACKED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    Q_PER_HEAD: tl.constexpr,
    K_GRANULARITY: tl.constexpr,
    V_GRANULARITY: tl.constexpr,
    PROMOTE_EVERY: tl.constexpr,
    WEIGHT_BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN_QK: tl.constexpr,
    REST_QK: tl.constexpr,
    MAIN_PV: tl.constexpr,
    REST_PV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of queries of one head over all keys that it sees.

    q_len and kv_len are those of a dense batch; of a packed call q_len is the number of tokens.
    Of a causal call the tiles with most keys come first, so that the last ones to run are short.
    IS_WIDE: the rows of transposed values lie further apart than 32 bits count.
    K_GRANULARITY and V_GRANULARITY: "tensor", "head" or "token" (a scale per token and KV head).
    """
    # One axis: the others end at 65535, which heads of many short sequences exceed.
    tile = tl.program_id(0) % num_tiles
    if IS_CAUSAL:
        tile = num_tiles - 1 - tile
    sequence = tl.program_id(0) // num_tiles // num_heads
    head = tl.program_id(0) // num_tiles % num_heads
    if IS_WIDE:
        v_inner_stride = tl.cast(v_inner_stride, tl.int64)
    kv_head = head // group
    num_kv_heads = num_heads // group
    # Where the sequence's queries and keys start, in tokens of the whole tensor.
    if IS_PACKED:
        if sequence == num_sequences:
            first_padding = tl.load(cu_seqlens_q_ptr + num_sequences) + tile * BLOCK_M
            _zero_padding(
                out_ptr,
                lse_ptr,
                first_padding,
                q_len,
                head,
                num_heads,
                num_tiles,
                HEAD_DIM,
                BLOCK_M,
            )
            return
        q_first = tl.load(cu_seqlens_q_ptr + sequence)
        k_first = tl.load(cu_seqlens_k_ptr + sequence)
        q_len = tl.load(cu_seqlens_q_ptr + sequence + 1) - q_first
        kv_len = tl.load(cu_seqlens_k_ptr + sequence + 1) - k_first
        q_token = q_first.to(tl.int64)
        k_token = k_first.to(tl.int64)
        column = (k_token + 16 * sequence) // 16 * 16
        batch = tl.cast(0, tl.int64)
    else:
        batch = sequence.to(tl.int64)
        q_token = tl.cast(0, tl.int64)
        k_token = tl.cast(0, tl.int64)
        column = tl.cast(0, tl.int64)
    first_row = tile * BLOCK_M
    if first_row >= q_len:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    q_base = q_ptr + batch * q_batch_stride + head.to(tl.int64) * q_head_stride
    q_base += (q_token + first_row) * q_token_stride
    k_base = k_ptr + batch * k_batch_stride + kv_head.to(tl.int64) * k_head_stride
    k_base += k_token * k_token_stride
    v_base = v_ptr + batch * v_batch_stride + kv_head.to(tl.int64) * v_head_stride
    if IS_TRANSPOSED:
        v_base += column
    else:
        v_base += k_token * v_inner_stride
    in_tile = tl.arange(0, BLOCK_M)
    num_rows = q_len - first_row
    q = load_rows(q_base, in_tile, num_rows, q_token_stride, 0, MAIN_QK, HEAD_DIM, True)
    q_rest = q
    if REST_QK > 0:
        q_rest = load_rows(
            q_base, in_tile, num_rows, q_token_stride, MAIN_QK, REST_QK, HEAD_DIM, True
        )

    logit_scale = softmax_scale * LOG2_E
    logit_scale *= tl.load(q_scale_ptr + head if Q_PER_HEAD else q_scale_ptr)
    k_scale_base = k_scale_ptr
    if K_GRANULARITY == "token":
        k_scale_base += (batch * kv_len + k_token) * num_kv_heads + kv_head
    else:
        logit_scale *= tl.load(k_scale_ptr + kv_head if K_GRANULARITY == "head" else k_scale_ptr)
    v_scale_base = v_scale_ptr
    if V_GRANULARITY == "token":
        v_scale_base += (batch * kv_len + k_token) * num_kv_heads + kv_head
    mask_base = key_mask_ptr
    if HAS_KEY_MASK:
        mask_base += batch * kv_len

    # Keys that some query of the tile sees, and of those the ones that every query sees.
    first_position = kv_len - q_len
    position = first_position + row
    lowest = first_position + first_row
    highest = first_position + tl.minimum(first_row + BLOCK_M, q_len) - 1
    first = 0
    last = kv_len
    full_first = 0
    full_last = kv_len
    if IS_CAUSAL:
        last = tl.minimum(last, highest + 1)
        full_last = tl.minimum(full_last, lowest + 1)
    if HAS_WINDOW:
        first = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
        last = tl.minimum(last, highest + window)
        full_first = tl.maximum(highest - window + 1, 0)
        full_last = tl.minimum(full_last, lowest + window)
    if HAS_KEY_MASK:
        full_last = 0
    full_first = (full_first + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_last = tl.maximum(tl.maximum(full_last, 0) // BLOCK_N * BLOCK_N, full_first)

    state = (
        tl.full([BLOCK_M], LOWEST, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.cast(0.0, tl.float32),
        tl.zeros([BLOCK_M, MAIN_PV], tl.float32),
        tl.zeros([BLOCK_M, REST_PV if REST_PV > 0 else 16], tl.float32),
        tl.zeros([BLOCK_M, MAIN_PV], tl.float32),
        tl.zeros([BLOCK_M, REST_PV if REST_PV > 0 else 16], tl.float32),
        tl.cast(0, tl.int32),
    )
    for zone in tl.static_range(3):
        if zone == 0:
            zone_first = first
            zone_last = tl.minimum(full_first, last)
        elif zone == 1:
            zone_first = full_first
            zone_last = tl.minimum(full_last, last)
        else:
            zone_first = tl.maximum(full_last, first)
            zone_last = last
        if (zone != 0 or HAS_WINDOW) and not (zone == 1 and HAS_KEY_MASK):
            state = attend(
                state,
                q,
                q_rest,
                k_base,
                v_base,
                k_scale_base,
                v_scale_base,
                mask_base,
                position,
                zone_first,
                zone_last,
                kv_len,
                window,
                logit_scale,
                softcap,
                k_token_stride,
                v_inner_stride,
                num_kv_heads,
                zone != 1,
                IS_CAUSAL,
                HAS_WINDOW,
                HAS_SOFTCAP,
                HAS_KEY_MASK,
                IS_TRANSPOSED,
                K_GRANULARITY == "token",
                V_GRANULARITY == "token",
                PROMOTE_EVERY,
                WEIGHT_BITS,
                _weight_dtype(q.dtype, WEIGHT_BITS),
                PRECISION,
                HEAD_DIM,
                MAIN_QK,
                REST_QK,
                MAIN_PV,
                REST_PV,
                BLOCK_M,
                BLOCK_N,
            )
    row_max, row_sum, v_scale, acc, acc_rest, held, held_rest, _ = state
    if PROMOTE_EVERY > 1:
        acc += held
        acc_rest += held_rest
    if V_GRANULARITY != "token":
        v_scale = tl.load(v_scale_ptr + kv_head if V_GRANULARITY == "head" else v_scale_ptr)
    top = row_max
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2_E
        top = tl.maximum(row_max, sink)
    shrink = tl.exp2(row_max - top)
    denominator = row_sum * shrink
    if HAS_SINKS:
        denominator += tl.exp2(sink - top + WEIGHT_BITS)
    # A query that sees no key gives zeros, whatever the values are.
    is_blind = (denominator == 0)[:, None]
    share = shrink / denominator * v_scale
    out_row = (batch * q_len + q_token + row) * num_heads + head
    row_mask = (row < q_len)[:, None]
    dim = tl.arange(0, MAIN_PV)
    out = tl.where(is_blind, 0.0, acc * share[:, None])
    place = out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :]
    mask = row_mask & (dim < HEAD_DIM)[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)
    if REST_PV > 0:
        dim = MAIN_PV + tl.arange(0, REST_PV)
        out = tl.where(is_blind, 0.0, acc_rest * share[:, None])
        place = out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :]
        mask = row_mask & (dim < HEAD_DIM)[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)
    lse = (tl.log2(denominator) - WEIGHT_BITS + top) * LN_2
    tl.store(lse_ptr + out_row, lse, mask=row < q_len)


@triton.constexpr_function
def _weight_dtype(q_dtype, weight_bits):
    """The dtype of P: e4m3 beside FP8 operands of either kind, otherwise the operands' own."""
    return tl.float8e4nv if weight_bits else q_dtype


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    scales: QkvScales,
    *,
    packing: Packing | None,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    out_dtype: torch.dtype,
    value_layout: ValueLayout,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as `octavo.reference.attention` defines them."""
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    q_len, num_heads, head_dim = q.shape[-3:]
    max_q_len = q_len if packing is None else max(1, packing.max_seqlen_q)
    has_token_scales = max(scales.k.dim(), scales.v.dim()) == 2
    shape = AttentionShape(q.dtype, head_dim, max_q_len, spec.promote_every, has_token_scales)
    config = config or choose(shape, describe(q.device))
    num_sequences = num_parts = q.shape[0]
    num_tiles = triton.cdiv(max_q_len, config.block_m)
    if packing is not None:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        num_sequences = len(packing.cu_seqlens_q) - 1
        num_parts = num_sequences + 1  # one more for what is padding
    if out.numel() == 0:
        return out, lse
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    is_transposed = value_layout == "transposed"
    fp8 = is_fp8(q.dtype)
    (main_qk, rest_qk), (main_pv, rest_pv) = split_head_dim(head_dim, fp8)
    cu_seqlens_q, cu_seqlens_k = q, k  # not read
    if packing is not None:
        cu_seqlens_q, cu_seqlens_k = packing.cu_seqlens_q, packing.cu_seqlens_k
    launch(
        _attention_kernel,
        (num_tiles * num_parts * num_heads,),
        q,
        k,
        v,
        out,
        lse,
        scales.q,
        scales.k.contiguous(),
        scales.v.contiguous(),
        sinks,
        None if key_mask is None else key_mask.contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        v.stride(0),
        v.stride(2) if is_transposed else v.stride(1),
        v.stride(1) if is_transposed else v.stride(2),
        num_tiles,
        num_sequences,
        num_heads,
        num_heads // k.shape[-2],
        q_len,
        k.shape[-3],
        spec.window or 0,
        spec.scale_for(head_dim),
        spec.softcap or 0.0,
        IS_PACKED=packing is not None,
        IS_CAUSAL=spec.causal,
        HAS_WINDOW=spec.window is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_KEY_MASK=key_mask is not None,
        IS_TRANSPOSED=is_transposed,
        IS_WIDE=is_transposed and head_dim * v.stride(2) >= 2**31,
        Q_PER_HEAD=scales.q.dim() == 1,
        K_GRANULARITY=_granularity(scales.k),
        V_GRANULARITY=_granularity(scales.v),
        # Other operands are added up in true float32: one level is enough.
        PROMOTE_EVERY=(spec.promote_every or 0) if fp8 else 0,
        WEIGHT_BITS=8 if fp8 else 0,
        PRECISION="ieee" if q.dtype == torch.float32 else None,
        HEAD_DIM=head_dim,
        MAIN_QK=main_qk,
        REST_QK=rest_qk,
        MAIN_PV=main_pv,
        REST_PV=rest_pv,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out, lse


def _granularity(scale: Tensor) -> str:
    return ("tensor", "head")[scale.dim()] if scale.dim() < 2 else "token"
