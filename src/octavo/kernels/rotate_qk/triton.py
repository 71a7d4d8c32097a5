"""rotate_qk kernel: queries and keys of a joint projection turned and written side by side.

Tiles are those of quantize_qkv: some tokens, and a range of the values of all heads.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import launch
from octavo.kernels.quantize_qkv.launch import as_dense
from octavo.kernels.quantize_qkv.primitives import HALVES, INTERLEAVED, load_tile
from octavo.kernels.rotate_qk.config import RotateQkConfig, default
from octavo.numerics.rotary import Rotary

# Sizes are not compiled in: whether 16 divides them would make kernels of their own.
_SIZES = ["num_q_tokens", "num_k_tokens", "q_length", "k_length", "num_rows", "num_q_programs"]


@triton.jit
def _turn_rows(index, part, tables, out_ptr, SHAPE: tl.constexpr, TURN: tl.constexpr):
    """Tile `index` of q or k, turned in float32 and rounded once."""
    first, second, first_at, second_at, inside, _, _ = load_tile(index, part, tables, SHAPE, TURN)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + first_at, first.to(dtype), mask=inside)
    if TURN[0] == HALVES:
        tl.store(out_ptr + second_at, second.to(dtype), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _rotate_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    num_q_programs,
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
    num_rows,
    cos_row,
    cos_column,
    sin_row,
    sin_column,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
    HAS_BATCH: tl.constexpr,
    HAS_REPEATS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Tiles of q, then of k."""
    # No room between heads, and no scale that a tile would have to stay within a head for.
    SHAPE: tl.constexpr = (HEAD_DIM, HEAD_DIM, ALIGN, HAS_BATCH, False, BLOCK_TOKENS, BLOCK_WIDTH)
    TURN: tl.constexpr = (ROTARY, ROTARY_DIM, TABLE_ALIGN, HAS_REPEATS)
    q_memory = (q_ptr, q_batch_stride, q_token_stride, q_head_stride, (None,), 0)
    k_memory = (k_ptr, k_batch_stride, k_token_stride, k_head_stride, (None,), 0)
    q = (q_memory, num_q_tokens, NUM_HEADS, q_length)
    k = (k_memory, num_k_tokens, NUM_KV_HEADS, k_length)
    tables = (cos_ptr, sin_ptr, num_rows, cos_row, cos_column, sin_row, sin_column)
    index = tl.program_id(0)
    if index < num_q_programs:
        _turn_rows(index, q, tables, q_out_ptr, SHAPE, TURN)
    else:
        _turn_rows(index - num_q_programs, k, tables, k_out_ptr, SHAPE, TURN)


def rotate_qk(
    q: Tensor, k: Tensor, rotary: Rotary, *, config: RotateQkConfig | None = None
) -> tuple[Tensor, Tensor]:
    """q and k turned, contiguous, as `octavo.ops.rotate_qk` promises: one launch."""
    config = config or default()
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    parts = [as_dense(x) for x in (q, k)]
    num_programs = [_num_tiles(x, config) for x in parts]
    if sum(num_programs) == 0:
        return q_out, k_out
    launch(
        _rotate_kernel,
        (sum(num_programs),),
        **_strides(parts),
        **_tables(rotary, parts),
        q_ptr=parts[0],
        k_ptr=parts[1],
        q_out_ptr=q_out,
        k_out_ptr=k_out,
        num_q_programs=num_programs[0],
        num_q_tokens=len(parts[0]) * parts[0].shape[1],
        num_k_tokens=len(parts[1]) * parts[1].shape[1],
        q_length=max(1, parts[0].shape[1]),
        k_length=max(1, parts[1].shape[1]),
        NUM_HEADS=max(1, parts[0].shape[2]),
        NUM_KV_HEADS=max(1, parts[1].shape[2]),
        HEAD_DIM=parts[0].shape[3],
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_WIDTH=config.block_width,
        num_warps=config.num_warps,
        # Products of rotary embedding are rounded one by one, as everywhere else.
        enable_fp_fusion=False,
    )
    return q_out, k_out


def _num_tiles(x: Tensor, config: RotateQkConfig) -> int:
    rows = triton.cdiv(len(x) * x.shape[1], config.block_tokens)
    return int(rows * triton.cdiv(x.shape[2] * x.shape[3], config.block_width))


def _strides(parts: list[Tensor]) -> dict[str, Any]:
    """Strides of batch, token and head, in units of ALIGN values; of single ones they are 0."""
    strides = [[x.stride(i) if x.shape[i] > 1 else 0 for i in range(3)] for x in parts]
    align = math.gcd(8, *(stride for each in strides for stride in each))
    named = {
        f"{part}_{name}_stride": stride // align
        for part, each in zip("qk", strides, strict=True)
        for name, stride in zip(("batch", "token", "head"), each, strict=True)
    }
    has_batch = any(
        len(x) > 1 and batch != x.shape[1] * token
        for x, (batch, token, _) in zip(parts, strides, strict=True)
    )
    return {**named, "ALIGN": align, "HAS_BATCH": has_batch}


def _tables(rotary: Rotary, parts: list[Tensor]) -> dict[str, Any]:
    (cos_row, cos_column), (sin_row, sin_column) = rotary.cos.stride(), rotary.sin.stride()
    align = math.gcd(8, cos_row, sin_row)
    num_rows = len(rotary.cos)
    return {
        "cos_ptr": rotary.cos,
        "sin_ptr": rotary.sin,
        "num_rows": max(1, num_rows),
        "cos_row": cos_row // align,
        "cos_column": cos_column,
        "sin_row": sin_row // align,
        "sin_column": sin_column,
        "TABLE_ALIGN": align,
        "ROTARY": (INTERLEAVED if rotary.is_interleaved else HALVES).value,
        "ROTARY_DIM": rotary.rotary_dim,
        "HAS_REPEATS": num_rows < max(len(x) * x.shape[1] for x in parts),
    }
