"""FP8 attention on Hopper: a warp copies tiles of keys and values, warpgroups attend to them.

gluon_tiles has the tiles and their copies, gluon_schedule the order of the work, gluon_softmax what
makes P of logits, gluon_results what becomes of sums, and gluon_roles what each warp does; here is
the launch.
"""

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo.internals import internals, require
from octavo.kernels.attention.config import (
    GluonConfig,
    default_gluon,
    is_valid_gluon,
    split_head_dim,
    takes_codes,
)
from octavo.kernels.attention.gluon_results import Results
from octavo.kernels.attention.gluon_roles import consume, produce
from octavo.kernels.attention.gluon_schedule import Work, zero_padding
from octavo.kernels.attention.gluon_tiles import (
    ROWS,
    Descriptors,
    Shared,
    Tiles,
    begin_barriers,
    store_ones,
)
from octavo.kernels.device import describe
from octavo.kernels.launch import launch
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.qkv import QkvScales
from octavo.numerics.value_layout import ValueLayout

with internals("triton"):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

require(
    "triton.experimental.gluon",
    "triton.experimental.gluon.language",
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier",
    "triton.experimental.gluon.nvidia.hopper.TensorDescriptor",
)

# Registers of a thread as launched, by the number of warpgroups that attend: an SM has 65536. They
# take over what the copying warp leaves.
MAX_REGISTERS = {2: 168, 3: 128}
PRODUCER_REGISTERS = gl.constexpr(24)

# Sizes are not compiled in: one that is 1 would be no tensor.
_SIZES = [
    *("q_scale_stride", "k_scale_stride", "v_scale_stride", "num_jobs", "num_row_tiles"),
    *("num_sequences", "num_heads", "group", "num_tokens", "q_len", "kv_len", "window"),
]


@gluon.jit(do_not_specialize=_SIZES)
def _attention_kernel(
    q_desc,
    q2_desc,
    k_desc,
    k2_desc,
    v_desc,
    v2_desc,
    out_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sink_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_scale_stride,
    k_scale_stride,
    v_scale_stride,
    num_jobs,
    num_row_tiles,
    num_sequences,
    num_heads,
    group,
    num_tokens,
    q_len,
    kv_len,
    window,
    softmax_scale,
    softcap,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    D1: gl.constexpr,
    D2: gl.constexpr,
    E1: gl.constexpr,
    E2: gl.constexpr,
    E2_COPIED: gl.constexpr,
    IS_PACKED: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_CODES: gl.constexpr,
    IS_ONE_LEVEL: gl.constexpr,
    HAS_ONES: gl.constexpr,
    HAS_ONE_LOOP: gl.constexpr,
    IS_PERSISTENT: gl.constexpr,
    IS_LONGEST_FIRST: gl.constexpr,
    PART_WIDTH: gl.constexpr,
):
    """One tile of queries, or one after the other where IS_PERSISTENT."""
    tiles = Tiles(
        (BLOCK_N, NUM_STAGES, NUM_CONSUMERS, HEAD_DIM, PART_WIDTH),
        (D1, D2, E1, E2, E2_COPIED),
        (IS_PACKED, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_CODES, IS_ONE_LEVEL),
        (HAS_ONES, HAS_ONE_LOOP, IS_PERSISTENT, IS_LONGEST_FIRST),
    )
    if IS_PACKED:
        first_row = gl.load(cu_seqlens_q_ptr + num_sequences) * num_heads
        zero_padding(out_ptr, lse_ptr, first_row, num_tokens * num_heads, HEAD_DIM)
    # A head_dim in one part has no descriptors of a rest: to make one costs the host time.
    q_rest, k_rest, v_rest = q_desc, k_desc, v_desc
    if D2 > 0:
        q_rest, k_rest = q2_desc, k2_desc
    if E2 > 0:
        v_rest = v2_desc
    descriptors = Descriptors(q_desc, q_rest, k_desc, k_rest, v_desc, v_rest)
    # Shared memory is allocated here, since no function can return it.
    FP8: gl.constexpr = k_desc.dtype
    SLOTS: gl.constexpr = NUM_CONSUMERS * (2 if IS_PERSISTENT else 1)
    q = gl.allocate_shared_memory(FP8, [SLOTS, 1, 1, ROWS, D1], q_desc.layout)
    k = gl.allocate_shared_memory(FP8, [NUM_STAGES, 1, 1, BLOCK_N, D1], k_desc.layout)
    v = gl.allocate_shared_memory(FP8, [NUM_STAGES, 1, 1, E1, BLOCK_N], v_desc.layout)
    q2, k2, v2, ones = q, k, v, v
    if D2 > 0:
        q2 = gl.allocate_shared_memory(FP8, [SLOTS, 1, 1, ROWS, D2], q2_desc.layout)
        k2 = gl.allocate_shared_memory(FP8, [NUM_STAGES, 1, 1, BLOCK_N, D2], k2_desc.layout)
    if E2 > 0:
        v2 = gl.allocate_shared_memory(FP8, [NUM_STAGES, 1, 1, E2, BLOCK_N], v2_desc.layout)
    if tiles.HAS_OWN_ONES:
        ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, BLOCK_N], FP8)
        ones = gl.allocate_shared_memory(FP8, [8, BLOCK_N], ones_layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    has_q = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier)
    begin_barriers(has_q, q_free, full, empty, tiles)
    store_ones(ones, v2, tiles)
    fence_async_shared()
    shared = Shared((q, q2), (k, k2), (v, v2), ones, (has_q, q_free, full, empty))
    work = Work(
        (num_jobs, num_row_tiles, num_sequences),
        (num_heads, group),
        (q_len, kv_len, window),
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr),
    )
    results = Results(
        (out_ptr, lse_ptr, sink_ptr),
        (q_scale_ptr, k_scale_ptr, v_scale_ptr),
        (q_scale_stride, k_scale_stride, v_scale_stride),
        (softmax_scale, softcap),
        (num_heads, num_tokens),
    )
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    if NUM_CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consume, (tiles, shared, work, results, FIRST)),
                (consume, (tiles, shared, work, results, SECOND)),
                (consume, (tiles, shared, work, results, THIRD)),
                (produce, (tiles, shared, work, descriptors)),
            ],
            [4, 4, 1],
            [160, 160, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (tiles, shared, work, results, FIRST)),
                (consume, (tiles, shared, work, results, SECOND)),
                (produce, (tiles, shared, work, descriptors)),
            ],
            [4, 1],
            [240, PRODUCER_REGISTERS],
        )


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
    config: GluonConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as `octavo.reference.attention` defines them; values transposed, no key mask."""
    assert key_mask is None and value_layout == "transposed"
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    num_packed = None if packing is None else packing.cu_seqlens_q.shape[0] - 1
    kv_len = k.shape[-3] // max(1, num_packed or 1)
    config = config or default_gluon(q.shape[-1], spec, kv_len)
    num_programs, fixed = _arguments(
        (q.shape[-4] if packing is None else 1, *q.shape[-3:]),
        k.shape[-3:-1],
        num_packed,
        tuple(x.stride(0) if x.dim() else 0 for x in (scales.q, scales.k, scales.v)),
        spec,
        sinks is not None,
        config,
        describe(q.device).num_sms,
    )
    if num_programs == 0:
        return out.zero_(), lse.zero_()
    if packing is not None:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    if k.shape[1] == 0:  # the copy engine wants something to describe, and never reads it
        k = k.new_zeros((k.shape[0], 16, *k.shape[2:]))
        v = v.new_zeros((*v.shape[:3], 16))
    queries, keys = (_aligned(x).permute(0, 2, 1, 3) for x in (q, k))
    values, block_n = _aligned(v), fixed["BLOCK_N"]
    tensors = {
        "q_desc": _tiled(queries, 64, fixed["D1"]),
        "q2_desc": _tiled(queries, 64, fixed["D2"]),
        "k_desc": _tiled(keys, block_n, fixed["D1"]),
        "k2_desc": _tiled(keys, block_n, fixed["D2"]),
        "v_desc": _tiled(values, fixed["E1"], block_n),
        "v2_desc": _tiled(values, fixed["E2_COPIED"], block_n),
        "out_ptr": out,
        "lse_ptr": lse,
        "q_scale_ptr": scales.q,
        "k_scale_ptr": scales.k,
        "v_scale_ptr": scales.v,
        "sink_ptr": lse if sinks is None else sinks,  # what there is none of is not read
        "cu_seqlens_q_ptr": lse if packing is None else packing.cu_seqlens_q,
        "cu_seqlens_k_ptr": lse if packing is None else packing.cu_seqlens_k,
    }
    launch(_attention_kernel, (num_programs,), **tensors, **fixed)
    return out, lse


@lru_cache(maxsize=1024)  # more than models have layers of different sizes
def _arguments(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, int],
    num_packed: int | None,
    scale_strides: tuple[int, int, int],
    spec: AttentionSpec,
    has_sinks: bool,
    config: GluonConfig,
    num_sms: int,
) -> tuple[int, dict[str, Any]]:
    """The number of programs, and what the kernel takes beside tensors.

    q_shape: batch, tokens, heads and head_dim; kv_shape: tokens and heads. num_packed: sequences of
    a packed batch.
    """
    num_sequences, num_tokens, num_heads, head_dim = q_shape
    kv_len, num_kv_heads = kv_shape
    assert is_valid_gluon(config, head_dim, spec)
    block_m = config.num_consumers * ROWS.value
    num_row_tiles = -(-num_tokens // block_m)
    num_jobs = num_row_tiles * num_sequences * num_heads
    if num_packed is not None:
        num_sequences = num_packed
        num_jobs = (num_tokens // block_m + num_sequences) * num_heads
    if num_tokens * num_heads * head_dim * num_sequences == 0:
        num_jobs = 0
    (d1, d2), (e1, e2) = split_head_dim(head_dim, is_fp8_operand=True)
    if head_dim > 192:  # in parts: a rest of 128 columns has no registers beside their sums
        e1, e2 = 256, 0
    # Where the rest's tile has rows to spare, they are the ones that add up P.
    has_codes, is_one_level = takes_codes(head_dim, spec), spec.promote_every is None
    # Codes are added up as they are, which only the tensor core does.
    has_ones = config.has_ones or has_codes
    is_spare = has_ones and e2 > 0 and head_dim - e1 == 8 and not is_one_level
    arguments = {
        "q_scale_stride": scale_strides[0],
        "k_scale_stride": scale_strides[1],
        "v_scale_stride": scale_strides[2],
        "num_jobs": num_jobs,
        "num_row_tiles": num_row_tiles,
        "num_sequences": num_sequences,
        "num_heads": num_heads,
        "group": num_heads // max(1, num_kv_heads),
        "num_tokens": num_tokens,
        "q_len": num_tokens,
        "kv_len": kv_len,
        "window": spec.window or 0,
        "softmax_scale": spec.scale_for(head_dim),
        "softcap": spec.softcap or 1.0,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
        "NUM_CONSUMERS": config.num_consumers,
        "HEAD_DIM": head_dim,
        "D1": d1,
        "D2": d2,
        "E1": e1,
        "E2": e2,
        "E2_COPIED": 8 if is_spare else e2,
        "IS_PACKED": num_packed is not None,
        "IS_CAUSAL": spec.causal,
        "HAS_WINDOW": spec.window is not None,
        "HAS_SOFTCAP": spec.softcap is not None,
        "HAS_SINKS": has_sinks,
        "HAS_CODES": has_codes,
        "IS_ONE_LEVEL": is_one_level,
        "HAS_ONES": has_ones,
        "HAS_ONE_LOOP": config.has_one_loop,
        "IS_PERSISTENT": config.is_persistent,
        "IS_LONGEST_FIRST": spec.causal and config.is_longest_first,
        "PART_WIDTH": config.part_width,
        "num_warps": 4,
        "maxnreg": MAX_REGISTERS[config.num_consumers],
    }
    num_programs = min(num_jobs, num_sms) if config.is_persistent else num_jobs
    return num_programs, arguments


def _tiled(x: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """A tensor [batch, heads, …, …] that TMA copies in tiles [1, 1, rows, columns], if any."""
    if rows * columns == 0:
        return None
    return TensorDescriptor.from_tensor(x, [1, 1, rows, columns], _layout(rows, columns))


@cache
def _layout(rows: int, columns: int) -> gl.NVMMASharedLayout:
    """How tiles lie in shared memory; kept, since to find it takes longer than to launch."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], gl.float8e4nv)


def _aligned(x: Tensor) -> Tensor:
    """x with rows that begin at multiples of 16 bytes, as the copy engine wants them."""
    is_aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    if is_aligned and all(stride % 16 == 0 for stride in x.stride()[:-1]):
        return x
    width = -(-x.shape[-1] // 16) * 16
    return x.new_empty((*x.shape[:-1], width))[..., : x.shape[-1]].copy_(x)
