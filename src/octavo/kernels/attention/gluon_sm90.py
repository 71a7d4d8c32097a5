"""FP8 attention on Hopper: a warp copies tiles of keys and values, two warpgroups attend to them.

Each warpgroup has 64 queries. The tensor core works on P·V of one tile while the row maxima of the
next are found, and on q·kᵀ of the one after while its exponentials are taken; the two warpgroups do
so by turns. The sums of one tile start from zero and are added up in float32: two-level
accumulation, which costs no more than the rescaling it replaces.
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
)
from octavo.kernels.device import describe
from octavo.kernels.gluon_primitives import load_tile, thread_barrier
from octavo.kernels.launch import launch
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.qkv import QkvScales
from octavo.numerics.value_layout import ValueLayout

with internals("triton"):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.core import _aggregate as aggregate

require(
    "triton.experimental.gluon",
    "triton.experimental.gluon.language",
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier",
    "triton.experimental.gluon.nvidia.hopper.TensorDescriptor",
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Warpgroups that attend, and queries of each.
NUM_CONSUMERS, ROWS = gl.constexpr(2), gl.constexpr(64)
# Of a thread: as launched, then of those that attend and of those that copy. An SM has 65536.
MAX_REGISTERS = 168
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
# P ≤ 1 is multiplied by 2^8 before it is rounded, to use more of e4m3's range.
WEIGHT_BITS = gl.constexpr(8.0)

EXP2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")
PACK = gl.constexpr("""
{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}""")
# The operand P is its words as they are.
UNPACK = gl.constexpr("mov.b32 $0, $1;")
# Barrier 8 + W lets warpgroup W have its turn; the first ones are the compiler's own.
TAKE_FIRST, TAKE_SECOND = (gl.constexpr(f"bar.sync {8 + w}, 256; mov.b32 $0, $1;") for w in (0, 1))
PASS_FIRST, PASS_SECOND = (
    gl.constexpr(f"bar.arrive {8 + w}, 256; mov.b32 $0, $1;") for w in (0, 1)
)


@aggregate
class Tiles:
    """Sizes of the tiles, what the call uses, and where the registers of sums lie.

    HAS_ONES: the tensor core adds up the rows of P as well. HAS_ONE_LOOP: for tiles that hide keys
    and those that do not.
    """

    BLOCK_N: gl.constexpr
    NUM_STAGES: gl.constexpr
    HEAD_DIM: gl.constexpr
    D1: gl.constexpr  # q·kᵀ: main and rest of head_dim; 0 is no rest
    D2: gl.constexpr
    E1: gl.constexpr  # P·V: main and rest
    E2: gl.constexpr
    E2_COPIED: gl.constexpr  # rows of the rest that come from memory
    IS_PACKED: gl.constexpr
    IS_CAUSAL: gl.constexpr
    HAS_WINDOW: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    HAS_SINKS: gl.constexpr
    HAS_ONES: gl.constexpr
    HAS_OWN_ONES: gl.constexpr  # not in the rows of the rest that are left
    HAS_ONE_LOOP: gl.constexpr
    IS_PERSISTENT: gl.constexpr
    s_layout: gl.constexpr
    o_layout: gl.constexpr
    o2_layout: gl.constexpr
    sum_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        BLOCK_N,
        NUM_STAGES,
        HEAD_DIM,
        D1,
        D2,
        E1,
        E2,
        E2_COPIED,
        IS_PACKED,
        IS_CAUSAL,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HAS_SINKS,
        HAS_ONES,
        HAS_ONE_LOOP,
        IS_PERSISTENT,
    ):
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.NUM_STAGES = gl.constexpr(NUM_STAGES)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.D1 = gl.constexpr(D1)
        self.D2 = gl.constexpr(D2)
        self.E1 = gl.constexpr(E1)
        self.E2 = gl.constexpr(E2)
        self.E2_COPIED = gl.constexpr(E2_COPIED)
        self.IS_PACKED = gl.constexpr(IS_PACKED)
        self.IS_CAUSAL = gl.constexpr(IS_CAUSAL)
        self.HAS_WINDOW = gl.constexpr(HAS_WINDOW)
        self.HAS_SOFTCAP = gl.constexpr(HAS_SOFTCAP)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.HAS_ONES = gl.constexpr(HAS_ONES)
        self.HAS_OWN_ONES = gl.constexpr(HAS_ONES and E2_COPIED == E2)
        # A window hides keys at both ends, and a cap spills where nothing interrupts the loop.
        self.HAS_ONE_LOOP = gl.constexpr(HAS_ONE_LOOP or HAS_WINDOW or HAS_SOFTCAP)
        self.IS_PERSISTENT = gl.constexpr(IS_PERSISTENT)
        self.s_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32]))
        self.o_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E1, 32]))
        self.o2_layout = gl.constexpr(
            gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E2 if E2 else 8, 32])
        )
        self.sum_layout = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))


@aggregate
class Shared:
    """Shared memory: queries of two jobs, and a ring of stages.

    Stage j has the keys of tile j and the values of tile j − 1, which are used together.
    """

    q: gl.shared_memory_descriptor
    q2: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k2: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    v2: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor
    has_q: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q2, k, k2, v, v2, ones, has_q, q_free, full, empty):
        self.q = q
        self.q2 = q2
        self.k = k
        self.k2 = k2
        self.v = v
        self.v2 = v2
        self.ones = ones
        self.has_q = has_q
        self.q_free = q_free
        self.full = full
        self.empty = empty


@aggregate
class Job:
    """One tile of queries: where it lies, and the tiles of keys that it sees."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    q_token: gl.tensor  # first token of the tile, counted from the batch's start
    k_token: gl.tensor  # first key of the sequence
    column: gl.tensor  # first column of the sequence's values
    first_row: gl.tensor  # of the tile, counted in the sequence
    q_len: gl.tensor
    kv_len: gl.tensor
    first_tile: gl.tensor
    num_tiles: gl.tensor
    window: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        batch,
        head,
        kv_head,
        q_token,
        k_token,
        column,
        first_row,
        q_len,
        kv_len,
        first_tile,
        num_tiles,
        window,
    ):
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.q_token = q_token
        self.k_token = k_token
        self.column = column
        self.first_row = first_row
        self.q_len = q_len
        self.kv_len = kv_len
        self.first_tile = first_tile
        self.num_tiles = num_tiles
        self.window = window

    @gluon.jit
    def tile(self, j):
        """The j-th tile of keys: from the last one, which hides keys, back to the first."""
        return self.first_tile + self.num_tiles - 1 - j


@gluon.constexpr_function
def _weight_layout(block_n):
    """Where the operand P of a product in FP8 lies: [64, block_n / 4, 4], four keys in a word."""
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    word = 4
    while word < block_n // 4:
        registers.append([0, word, 0])
        word *= 2
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, block_n // 4, 4])


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(EXP2, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _take_turn(some, W: gl.constexpr):
    """Wait until the other warpgroup passes the turn; `some` is any number."""
    TAKE: gl.constexpr = TAKE_FIRST if W == 0 else TAKE_SECOND
    gl.inline_asm_elementwise(TAKE, "=r,r", [some], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(some, W: gl.constexpr):
    """Let the other warpgroup have its turn."""
    PASS: gl.constexpr = PASS_SECOND if W == 0 else PASS_FIRST
    gl.inline_asm_elementwise(PASS, "=r,r", [some], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pack(p, BLOCK_N: gl.constexpr):
    """P as words of four e4m3, in the order of transposed values: no thread needs another's."""
    split = p.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    even, odd = split.reshape([ROWS, BLOCK_N // 4, 2, 2]).split()
    even0, even1 = even.split()
    odd0, odd1 = odd.split()
    words = gl.inline_asm_elementwise(
        PACK, "=r,f,f,f,f", [even0, odd0, even1, odd1], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.convert_layout(words, gl.SliceLayout(2, _weight_layout(BLOCK_N)))


@gluon.jit
def _unpack(words, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """The operand P from words."""
    words = gl.expand_dims(words, 2).broadcast_to([ROWS, BLOCK_N // 4, 4])
    p = gl.inline_asm_elementwise(
        UNPACK,
        "=r,r,r,r,r",
        [words],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=4,
    )
    return gl.convert_layout(p.reshape([ROWS, BLOCK_N]), gl.DotOperandLayout(0, layout, 4))


@gluon.jit
def _row_max(s, BLOCK_N: gl.constexpr):
    """Largest logit of each row, by short chains in registers and then two shuffles."""
    GROUPS: gl.constexpr = BLOCK_N // 8
    most = gl.max(s.reshape([ROWS, GROUPS, 4, 2]), 3)
    most = gl.max(most.reshape([ROWS, 4, GROUPS // 4, 4]), 1)
    return gl.max(gl.max(most, 1), 1)


@gluon.jit
def _thread_sums(p, BLOCK_N: gl.constexpr):
    """Sums of each row's values in each of its four threads: [64, 4], without a shuffle."""
    GROUPS: gl.constexpr = BLOCK_N // 8
    total = gl.sum(p.reshape([ROWS, GROUPS, 4, 2]), 3)
    return gl.sum(gl.sum(total.reshape([ROWS, 4, GROUPS // 4, 4]), 1), 1)


@gluon.jit
def _stage(j, NUM_STAGES: gl.constexpr):
    """Place in the ring and parity of its turn; NUM_STAGES is a power of two."""
    return j % NUM_STAGES, (j // NUM_STAGES) & 1


@gluon.jit
def _copy_keys(desc, desc2, shared, tiles, job, j, stage):
    bar = shared.full.index(stage)
    row = job.k_token + job.tile(j) * tiles.BLOCK_N
    load_tile(desc, [job.batch, job.kv_head, row, 0], bar, shared.k.index(stage))
    if tiles.D2 > 0:
        load_tile(desc2, [job.batch, job.kv_head, row, tiles.D1], bar, shared.k2.index(stage))


@gluon.jit
def _copy_values(desc, desc2, shared, tiles, job, j, stage):
    bar = shared.full.index(stage)
    column = job.column + job.tile(j) * tiles.BLOCK_N
    load_tile(desc, [job.batch, job.kv_head, 0, column], bar, shared.v.index(stage))
    if tiles.E2 > 0:
        rest = shared.v2.index(stage)
        if tiles.E2_COPIED < tiles.E2:
            rest = rest.slice(0, tiles.E2_COPIED, dim=2)
        load_tile(desc2, [job.batch, job.kv_head, tiles.E1, column], bar, rest)


@gluon.jit
def _produce(tiles, shared, work, copies):
    """One warp copies queries, keys and values of job after job, as fast as there is room."""
    num_jobs = work[0]
    base = num_jobs * 0  # stages used by the jobs before
    count = num_jobs * 0  # of those jobs
    if tiles.IS_PERSISTENT:
        for first in range(0, num_jobs, gl.num_programs(0)):
            index = _job_after(first)
            if index < num_jobs:
                job = _make_job(index, work, tiles)
                if job.num_tiles > 0:
                    _copy_job(tiles, shared, job, base, count, copies)
                    base += job.num_tiles + 1
                    count += 1
    else:
        job = _make_job(gl.program_id(0), work, tiles)
        if job.num_tiles > 0:
            _copy_job(tiles, shared, job, 0, 0, copies)


@gluon.jit
def _copy_job(tiles, shared, job, base, count, copies):
    """Queries, then keys and values in the order in which they are used."""
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc = copies
    KEY_BYTES: gl.constexpr = tiles.BLOCK_N * (tiles.D1 + tiles.D2)
    VALUE_BYTES: gl.constexpr = tiles.BLOCK_N * (tiles.E1 + tiles.E2_COPIED)
    num_tiles = job.num_tiles
    place, turn = _stage(count, 2)
    bar = shared.has_q.index(place)
    mbarrier.wait(shared.q_free.index(place), turn ^ 1)
    mbarrier.expect(bar, NUM_CONSUMERS * ROWS * (tiles.D1 + tiles.D2))
    for w in gl.static_range(NUM_CONSUMERS):
        row = job.q_token + w * ROWS
        slot = place * NUM_CONSUMERS + w
        load_tile(q_desc, [job.batch, job.head, row, 0], bar, shared.q.index(slot))
        if tiles.D2 > 0:
            load_tile(q2_desc, [job.batch, job.head, row, tiles.D1], bar, shared.q2.index(slot))
    stage, turn = _stage(base, tiles.NUM_STAGES)
    mbarrier.wait(shared.empty.index(stage), turn ^ 1)
    mbarrier.expect(shared.full.index(stage), KEY_BYTES)
    _copy_keys(k_desc, k2_desc, shared, tiles, job, 0, stage)
    for j in range(1, num_tiles):
        stage, turn = _stage(base + j, tiles.NUM_STAGES)
        mbarrier.wait(shared.empty.index(stage), turn ^ 1)
        mbarrier.expect(shared.full.index(stage), KEY_BYTES + VALUE_BYTES)
        _copy_keys(k_desc, k2_desc, shared, tiles, job, j, stage)
        _copy_values(v_desc, v2_desc, shared, tiles, job, j - 1, stage)
    stage, turn = _stage(base + num_tiles, tiles.NUM_STAGES)
    mbarrier.wait(shared.empty.index(stage), turn ^ 1)
    mbarrier.expect(shared.full.index(stage), VALUE_BYTES)
    _copy_values(v_desc, v2_desc, shared, tiles, job, num_tiles - 1, stage)


@gluon.jit
def _flat(ref, rows: gl.constexpr, columns: gl.constexpr):
    """A tile [1, 1, rows, columns] of shared memory as a matrix."""
    return ref.reshape([rows, columns])


@gluon.jit
def _cap(s, inv_cap, cap, tiles):
    """Logits capped: tanh(x) = 1 − 2 / (e^2x + 1), and then in powers of two."""
    if tiles.HAS_SOFTCAP:
        s = cap - 2.0 * cap / (_exp2(s * inv_cap) + 1.0)
    return s


@gluon.jit
def _hide(s, tiles, job, tile, row):
    """Logits with −inf where a query does not see a key; most tiles have no such place."""
    BLOCK_N: gl.constexpr = tiles.BLOCK_N
    first_key = tile * BLOCK_N
    lowest = job.kv_len - job.q_len + row
    highest = lowest + ROWS - 1
    is_cut = first_key + BLOCK_N > job.kv_len
    if tiles.IS_CAUSAL:
        is_cut = is_cut | (first_key + BLOCK_N - 1 > lowest)
    if tiles.HAS_WINDOW:
        is_cut = is_cut | (first_key <= highest - job.window)
        is_cut = is_cut | (first_key + BLOCK_N - 1 >= lowest + job.window)
    if is_cut:
        layout: gl.constexpr = tiles.s_layout
        key = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))[None, :]
        position = lowest + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        visible = (key < job.kv_len) & (position >= lowest)
        if tiles.IS_CAUSAL:
            visible = visible & (key <= position)
        if tiles.HAS_WINDOW:
            visible = visible & (key > position - job.window) & (key < position + job.window)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _rise(s, row_max, factor, tiles):
    """New row maxima, what they make of each logit's exponent, and by how much sums shrink."""
    found = gl.convert_layout(_row_max(s, tiles.BLOCK_N), gl.SliceLayout(1, tiles.s_layout))
    new_max = gl.maximum(row_max, found)
    highest = gl.where(new_max == float("-inf"), 0.0, new_max)
    # Exactly 1 where the maximum stays: a product's rounding would add up over the tiles.
    shrink = _exp2((row_max - highest) * factor)
    return new_max, WEIGHT_BITS - highest * factor, shrink


@gluon.jit
def _add_rows(sums, p, shrink, tiles):
    """Running sums of P's rows, unless the tensor core adds them up."""
    if tiles.HAS_ONES:
        return sums
    else:
        part = _thread_sums(p, tiles.BLOCK_N)
        by = gl.convert_layout(shrink, gl.SliceLayout(1, part.type.layout))
        return sums * by[:, None] + part


@gluon.jit
def _attend_values(p, shared, stage, tiles):
    """P·V of one tile from zero, and P·1 if sums come from there; all still under way."""
    pv = _product(p, _flat(shared.v.index(stage), tiles.E1, tiles.BLOCK_N), tiles.o_layout)
    pv2 = gl.zeros([ROWS, 8], gl.float32, tiles.o2_layout)
    total = gl.zeros([ROWS, 8], gl.float32, tiles.sum_layout)
    if tiles.E2 > 0:
        v2 = _flat(shared.v2.index(stage), tiles.E2, tiles.BLOCK_N)
        pv2 = _product(p, v2, tiles.o2_layout)
    if tiles.HAS_OWN_ONES:
        total = _product(p, shared.ones, tiles.sum_layout)
    return pv, pv2, total


@gluon.jit
def _product(p, v, layout: gl.constexpr):
    """P times the transpose of v, from zero, still under way."""
    WIDTH: gl.constexpr = v.shape[0]
    zero = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, layout, 4))
    return warpgroup_mma(p, v.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _wait_for_values(under_way, shrink, tiles):
    """What `_attend_values` began, done, and by how much earlier sums shrink before it is added."""
    pv, pv2, total = under_way
    HAS_REST: gl.constexpr = tiles.E2 > 0
    if HAS_REST and tiles.HAS_OWN_ONES:
        pv, pv2, total = warpgroup_mma_wait(0, deps=(pv, pv2, total))
    elif HAS_REST:
        pv, pv2 = warpgroup_mma_wait(0, deps=(pv, pv2))
    elif tiles.HAS_OWN_ONES:
        pv, total = warpgroup_mma_wait(0, deps=(pv, total))
    else:
        pv = warpgroup_mma_wait(0, deps=(pv,))
    return pv, pv2, total, shrink


@gluon.jit
def _add_values(acc, acc2, sums, arrived, tiles):
    """Add one tile's sums to the running ones.

    What the tensor core holds starts anew each tile: two-level accumulation.
    """
    pv, pv2, total, shrink = arrived
    by = gl.convert_layout(shrink, gl.SliceLayout(1, tiles.o_layout))[:, None]
    acc = acc * by + pv
    if tiles.E2 > 0:
        by = gl.convert_layout(shrink, gl.SliceLayout(1, tiles.o2_layout))
        acc2 = acc2 * by[:, None] + pv2
    if tiles.HAS_OWN_ONES:
        by = gl.convert_layout(shrink, gl.SliceLayout(1, tiles.sum_layout))
        sums = sums * by[:, None] + total
    return acc, acc2, sums


@gluon.jit
def _logits(q, q2, shared, stage, tiles):
    """q·kᵀ of one tile, still under way."""
    zero = gl.zeros([ROWS, tiles.BLOCK_N], gl.float32, tiles.s_layout)
    k = _flat(shared.k.index(stage), tiles.BLOCK_N, tiles.D1)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if tiles.D2 > 0:
        k2 = _flat(shared.k2.index(stage), tiles.BLOCK_N, tiles.D2)
        s = warpgroup_mma(q2, k2.permute((1, 0)), s, use_acc=True, is_async=True)
    return s


@gluon.jit
def _store(out_ptr, out, rows, num_rows, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr):
    """A warpgroup's results [64, width] from dimension FIRST on; rows: their places in memory."""
    layout: gl.constexpr = out.type.layout
    width: gl.constexpr = out.shape[1]
    row = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    dim = FIRST + gl.arange(0, width, gl.SliceLayout(0, layout))
    index = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    mask = (index < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    place = out_ptr + row[:, None] * HEAD_DIM + dim[None, :]
    gl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _store_ones(ref, HEIGHT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows of ones; as bits, since ptxas makes garbage of a constant's conversion to FP8."""
    threads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    one = gl.full([HEIGHT, BLOCK_N], 0x38, gl.int8, threads)
    ref.store(one.to(ref.dtype, bitcast=True))


@gluon.jit
def _clear_strangers(shared, job, stage, tiles):
    """Zeros for what the last tile of values has of the next sequence: 0 times its NaN is NaN.

    Both warpgroups write the same bytes, each before it reads them.
    """
    num_columns = (job.kv_len + 15) // 16 * 16 - job.tile(0) * tiles.BLOCK_N
    if num_columns < tiles.BLOCK_N:
        values = _flat(shared.v.index(stage), tiles.E1, tiles.BLOCK_N)
        _clear_columns(values, num_columns, tiles.BLOCK_N)
        if tiles.E2 > 0:
            values = _flat(shared.v2.index(stage), tiles.E2, tiles.BLOCK_N)
            if tiles.E2_COPIED < tiles.E2:
                values = values.slice(0, tiles.E2_COPIED, dim=0)
            _clear_columns(values, num_columns, tiles.BLOCK_N)
        fence_async_shared()
        thread_barrier()


@gluon.jit
def _clear_columns(ref, num_columns, BLOCK_N: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    values = ref.load(layout)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))[None, :]
    bits = gl.where(column < num_columns, values.to(gl.int8, bitcast=True), 0)
    ref.store(bits.to(values.dtype, bitcast=True))


@gluon.jit
def _consume(tiles, shared, work, results, W: gl.constexpr):
    """A warpgroup with 64 queries of job after job."""
    num_jobs = work[0]
    base = num_jobs * 0  # stages used by the jobs before
    count = num_jobs * 0  # of those jobs
    if tiles.IS_PERSISTENT:
        for first in range(0, num_jobs, gl.num_programs(0)):
            index = _job_after(first)
            if index < num_jobs:
                job = _make_job(index, work, tiles)
                if job.first_row < job.q_len:
                    _attend(tiles, shared, job, base, count, results, W)
                if job.num_tiles > 0:
                    base += job.num_tiles + 1
                    count += 1
    else:
        job = _make_job(gl.program_id(0), work, tiles)
        if job.first_row < job.q_len:
            _attend(tiles, shared, job, 0, 0, results, W)


@gluon.jit
def _attend(tiles, shared, job, base, count, results, W: gl.constexpr):
    """64 queries: logits, exponentials, weighted values, tile after tile."""
    out_ptr, lse_ptr, sink_ptr, scales, softmax, num_heads, num_tokens = results
    factor, inv_cap, cap, v_scale = _factors(job, scales, softmax, tiles)
    BLOCK_N: gl.constexpr = tiles.BLOCK_N
    STAGES: gl.constexpr = tiles.NUM_STAGES
    row_layout: gl.constexpr = gl.SliceLayout(1, tiles.s_layout)
    num_tiles = job.num_tiles
    row = job.first_row + W * ROWS
    row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    if tiles.HAS_ONES:
        sums = gl.zeros([ROWS, 8], gl.float32, tiles.sum_layout)
    else:
        sums = _thread_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, tiles.s_layout), BLOCK_N)
    acc = gl.zeros([ROWS, tiles.E1], gl.float32, tiles.o_layout)
    acc2 = gl.zeros([ROWS, tiles.E2 if tiles.E2 > 0 else 8], gl.float32, tiles.o2_layout)
    if num_tiles > 0:
        place, turn = _stage(count, 2)
        slot = place * NUM_CONSUMERS + W
        mbarrier.wait(shared.has_q.index(place), turn)
        q = _flat(shared.q.index(slot), ROWS, tiles.D1)
        q2 = q
        if tiles.D2 > 0:
            q2 = _flat(shared.q2.index(slot), ROWS, tiles.D2)
        stage, turn = _stage(base, STAGES)
        mbarrier.wait(shared.full.index(stage), turn)
        s = _logits(q, q2, shared, stage, tiles)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(shared.empty.index(stage), count=1)
        s = _hide(_cap(s, inv_cap, cap, tiles), tiles, job, job.tile(0), row)
        row_max, offset, shrink = _rise(s, row_max, factor, tiles)
        x = s * factor + offset[:, None]
        stage, turn = _stage(base + 1, STAGES)
        mbarrier.wait(shared.full.index(stage), turn)
        s = _logits(q, q2, shared, stage, tiles)
        if W == 1:
            _pass_turn(num_tiles, W)
        p = _exp2(x)
        sums = _add_rows(sums, p, shrink, tiles)
        words = _pack(p, BLOCK_N)
        s = warpgroup_mma_wait(0, deps=(s,))
        if tiles.IS_PACKED:
            _clear_strangers(shared, job, stage, tiles)
        # Tiles that hide keys come first, unless a window hides some at the other end as well.
        num_hiding = _num_hiding(tiles, job, row)
        fixed = (q, q2, row, base, (factor, inv_cap, cap), shared, tiles, job)
        state = (s, words, row_max, sums, shrink, acc, acc2)
        if tiles.IS_CAUSAL or tiles.HAS_ONE_LOOP:
            for j in range(1, num_hiding):
                state = _turn(j, state, fixed, W, True)
        if not tiles.HAS_ONE_LOOP:
            for j in range(num_hiding, num_tiles):
                state = _turn(j, state, fixed, W, False)
        s, words, row_max, sums, shrink, acc, acc2 = state
        mbarrier.arrive(shared.q_free.index(place), count=1)
        # The last turn: each takes and passes as often as the other, so that no job finds a turn
        # that another one left.
        _take_turn(num_tiles, W)
        stage, _ = _stage(base + num_tiles, STAGES)
        weights = _unpack(words, BLOCK_N, tiles.o_layout)
        under_way = _attend_values(weights, shared, stage, tiles)
        if W == 0:
            _pass_turn(num_tiles, W)
        arrived = _wait_for_values(under_way, shrink, tiles)
        acc, acc2, sums = _add_values(acc, acc2, sums, arrived, tiles)
        mbarrier.arrive(shared.empty.index(stage), count=1)

    if tiles.HAS_OWN_ONES:
        row_sum = gl.convert_layout(gl.max(sums, 1), row_layout)
    elif tiles.HAS_ONES:
        column = gl.arange(0, tiles.E2, gl.SliceLayout(0, tiles.o2_layout))[None, :]
        # A sum of one value, which keeps NaN; a maximum would not.
        row_sum = gl.sum(gl.where(column == tiles.E2_COPIED, acc2, 0.0), 1)
        row_sum = gl.convert_layout(row_sum, row_layout)
    else:
        row_sum = gl.convert_layout(gl.sum(sums, 1), row_layout)
    row_max = row_max * factor
    top = row_max
    if tiles.HAS_SINKS:
        sink = gl.load(sink_ptr + job.head).to(gl.float32) * LOG2_E
        top = gl.maximum(row_max, sink)
    top = gl.where(top == float("-inf"), 0.0, top)
    shrink = _exp2(row_max - top)
    denominator = row_sum * shrink
    if tiles.HAS_SINKS:
        denominator += _exp2(sink - top + WEIGHT_BITS)
    share = gl.where(denominator == 0.0, 0.0, shrink / denominator) * v_scale
    index = gl.arange(0, ROWS, row_layout)
    token = job.batch.to(gl.int64) * num_tokens + job.q_token + W * ROWS + index
    place = token * num_heads + job.head
    num_rows = job.q_len - row
    by = gl.convert_layout(share, gl.SliceLayout(1, tiles.o_layout))[:, None]
    _store(out_ptr, acc * by, place, num_rows, 0, tiles.HEAD_DIM)
    if tiles.E2 > 0:
        acc2 *= gl.convert_layout(share, gl.SliceLayout(1, tiles.o2_layout))[:, None]
        _store(out_ptr, acc2, place, num_rows, tiles.E1, tiles.HEAD_DIM)
    lse = (gl.log2(denominator) - WEIGHT_BITS + top) * LN_2
    gl.store(lse_ptr + place, lse, mask=index < num_rows)


@gluon.jit
def _num_hiding(tiles, job, row):
    """How many of the last tiles, at least one, may hide keys from the 64 queries from `row` on."""
    num_hiding = gl.minimum(job.num_tiles, 1)
    if tiles.HAS_ONE_LOOP:
        num_hiding = job.num_tiles
    elif tiles.IS_CAUSAL:
        num_seen = gl.maximum(job.kv_len - job.q_len + row + 1, 0) // tiles.BLOCK_N
        num_hiding = gl.maximum(job.first_tile + job.num_tiles - num_seen, num_hiding)
        num_hiding = gl.minimum(num_hiding, job.num_tiles)
    return num_hiding


@gluon.jit
def _turn(j, state, fixed, W: gl.constexpr, HIDES: gl.constexpr):
    """P·V of tile j − 1 beside row maxima of tile j; its exponentials beside q·kᵀ of tile j + 1.

    The logits' registers are free for the next ones as soon as the exponents are made of them.
    After the last tile the products are of what its stage held before, and nobody reads them.
    Two warpgroups in step would both want the special-function unit and then both leave it idle:
    so they look for their row maxima in turn.
    """
    s, words, row_max, sums, shrink, acc, acc2 = state
    q, q2, row, base, logits, shared, tiles, job = fixed
    factor, inv_cap, cap = logits
    BLOCK_N: gl.constexpr = tiles.BLOCK_N
    STAGES: gl.constexpr = tiles.NUM_STAGES
    stage, _ = _stage(base + j, STAGES)
    next_stage, next_turn = _stage(base + j + 1, STAGES)
    _take_turn(j, W)
    weights = _unpack(words, BLOCK_N, tiles.o_layout)
    under_way = _attend_values(weights, shared, stage, tiles)
    s = _cap(s, inv_cap, cap, tiles)
    if HIDES:
        s = _hide(s, tiles, job, job.tile(j), row)
    row_max, offset, new_shrink = _rise(s, row_max, factor, tiles)
    arrived = _wait_for_values(under_way, shrink, tiles)
    acc, acc2, sums = _add_values(acc, acc2, sums, arrived, tiles)
    x = s * factor + offset[:, None]
    mbarrier.arrive(shared.empty.index(stage), count=1)
    mbarrier.wait(shared.full.index(next_stage), next_turn)
    _pass_turn(j, W)
    s = _logits(q, q2, shared, next_stage, tiles)
    p = _exp2(x)
    sums = _add_rows(sums, p, new_shrink, tiles)
    words = _pack(p, BLOCK_N)
    s = warpgroup_mma_wait(0, deps=(s,))
    return s, words, row_max, sums, new_shrink, acc, acc2


@gluon.jit
def _factors(job, scales, softmax, tiles):
    """What logits are multiplied by, what a cap needs, and the scale of the values."""
    scale_ptrs, scale_strides = scales
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scale_ptrs
    q_stride, k_stride, v_stride = scale_strides
    softmax_scale, softcap = softmax
    logit_scale = softmax_scale * LOG2_E
    logit_scale *= gl.load(q_scale_ptr + job.head * q_stride)
    logit_scale *= gl.load(k_scale_ptr + job.kv_head * k_stride)
    v_scale = gl.load(v_scale_ptr + job.kv_head * v_stride)
    factor = logit_scale
    if tiles.HAS_SOFTCAP:
        factor = logit_scale * 0.0 + 1.0
    return factor, 2.0 * logit_scale / softcap, softcap * LOG2_E, v_scale


@gluon.jit
def _job_after(first):
    """This program's job in the round that begins with job `first`, when a program has many.

    Programs take turns in being first: else those jobs of short sequences that have no rows would
    fall to the same programs in every round.
    """
    num_programs = gl.num_programs(0)
    return first + (gl.program_id(0) + first // num_programs) % num_programs


@gluon.jit
def _find_sequence(slot, cu_seqlens_ptr, num_sequences, BLOCK_M: gl.constexpr):
    """The packed sequence that has a slot for a tile of queries, and its first slot.

    Slots of sequence i begin at cu_seqlens[i] // BLOCK_M + i: enough for each whatever its length,
    and how many there are in all follows from the tokens, without a look at the lengths.
    """
    low = slot * 0
    width = low + num_sequences
    while width > 1:
        half = width // 2
        start = gl.load(cu_seqlens_ptr + low + half) // BLOCK_M + low + half
        is_right = start <= slot
        low = gl.where(is_right, low + half, low)
        width = gl.where(is_right, width - half, half)
    return low, gl.load(cu_seqlens_ptr + low) // BLOCK_M + low


@gluon.jit
def _make_job(index, work, tiles):
    """A job by its number; of a causal call the tiles that see most keys come first."""
    _, sequences, num_row_tiles, heads, lengths = work
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_sequences = sequences
    num_heads, group = heads
    q_len, kv_len, window = lengths
    BLOCK_M: gl.constexpr = NUM_CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = tiles.BLOCK_N
    if tiles.IS_PACKED:
        sequence, first_slot = _find_sequence(
            index // num_heads, cu_seqlens_q_ptr, num_sequences, BLOCK_M
        )
        end = gl.load(cu_seqlens_q_ptr + sequence + 1)
        num_row_tiles = end // BLOCK_M + sequence + 1 - first_slot
        index -= first_slot * num_heads
        head = index // num_row_tiles
    else:
        sequence = index // num_row_tiles // num_heads
        head = index // num_row_tiles % num_heads
    tile = index % num_row_tiles
    if tiles.IS_CAUSAL:
        tile = num_row_tiles - 1 - tile
    first_row = tile * BLOCK_M
    batch = sequence
    q_first = sequence * 0
    k_first = sequence * 0
    column = sequence * 0
    if tiles.IS_PACKED:
        batch = sequence * 0
        q_first = gl.load(cu_seqlens_q_ptr + sequence)
        k_first = gl.load(cu_seqlens_k_ptr + sequence)
        # Slots behind the last sequence are padding's: no head has them, and no query.
        q_len = gl.where(head < num_heads, end - q_first, 0)
        kv_len = gl.load(cu_seqlens_k_ptr + sequence + 1) - k_first
        column = (k_first + 16 * sequence) // 16 * 16
    lowest = kv_len - q_len + first_row
    highest = kv_len - q_len + gl.minimum(first_row + BLOCK_M, q_len) - 1
    first = sequence * 0
    last = kv_len
    if tiles.IS_CAUSAL:
        last = gl.minimum(last, highest + 1)
    if tiles.HAS_WINDOW:
        first = gl.maximum(lowest - window + 1, 0)
        last = gl.minimum(last, highest + window)
    first_tile = first // BLOCK_N
    num_tiles = gl.maximum((last + BLOCK_N - 1) // BLOCK_N - first_tile, 0)
    num_tiles = gl.where((last <= first) | (first_row >= q_len), 0, num_tiles)
    return Job(
        batch,
        head,
        head // group,
        q_first + first_row,
        k_first,
        column,
        first_row,
        q_len,
        kv_len,
        first_tile,
        num_tiles,
        window,
    )


@gluon.jit
def _zero_padding(out_ptr, lse_ptr, first_row, num_rows, HEAD_DIM: gl.constexpr):
    """Zeros for the rows (token by head) after the last sequence, by all programs."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    index = gl.arange(0, 64, gl.SliceLayout(1, layout))
    dim = gl.arange(0, 256, gl.SliceLayout(0, layout))
    zeros = gl.zeros([64, 256], out_ptr.dtype.element_ty, layout)
    no_sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    for start in range(first_row + gl.program_id(0) * 64, num_rows, gl.num_programs(0) * 64):
        row = (start + index).to(gl.int64)
        mask = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
        gl.store(out_ptr + row[:, None] * HEAD_DIM + dim[None, :], zeros, mask=mask)
        gl.store(lse_ptr + row, no_sums, mask=row < num_rows)


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
    HAS_ONES: gl.constexpr,
    HAS_ONE_LOOP: gl.constexpr,
    IS_PERSISTENT: gl.constexpr,
):
    """One tile of queries, or one after the other where IS_PERSISTENT."""
    tiles = Tiles(
        BLOCK_N,
        NUM_STAGES,
        HEAD_DIM,
        D1,
        D2,
        E1,
        E2,
        E2_COPIED,
        IS_PACKED,
        IS_CAUSAL,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HAS_SINKS,
        HAS_ONES,
        HAS_ONE_LOOP,
        IS_PERSISTENT,
    )
    if IS_PACKED:
        first_row = gl.load(cu_seqlens_q_ptr + num_sequences) * num_heads
        _zero_padding(out_ptr, lse_ptr, first_row, num_tokens * num_heads, HEAD_DIM)
    FP8: gl.constexpr = k_desc.dtype
    NUM_BUFFERS: gl.constexpr = NUM_CONSUMERS * (2 if IS_PERSISTENT else 1)
    q = gl.allocate_shared_memory(q_desc.dtype, [NUM_BUFFERS, 1, 1, ROWS, D1], q_desc.layout)
    k = gl.allocate_shared_memory(FP8, [NUM_STAGES, 1, 1, BLOCK_N, D1], k_desc.layout)
    v = gl.allocate_shared_memory(FP8, [NUM_STAGES, 1, 1, E1, BLOCK_N], v_desc.layout)
    q2, k2, v2, ones = q, k, v, v
    if D2 > 0:
        q2 = gl.allocate_shared_memory(q_desc.dtype, [NUM_BUFFERS, 1, 1, ROWS, D2], q2_desc.layout)
        k2 = gl.allocate_shared_memory(FP8, [NUM_STAGES, 1, 1, BLOCK_N, D2], k2_desc.layout)
    if E2 > 0:
        v2 = gl.allocate_shared_memory(FP8, [NUM_STAGES, 1, 1, E2, BLOCK_N], v2_desc.layout)
    if tiles.HAS_OWN_ONES:
        ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, BLOCK_N], FP8)
        ones = gl.allocate_shared_memory(FP8, [8, BLOCK_N], ones_layout)
        _store_ones(ones, 8, BLOCK_N)
    elif HAS_ONES:
        for i in gl.static_range(NUM_STAGES):
            rest = _flat(v2.index(i), E2, BLOCK_N).slice(E2_COPIED, E2 - E2_COPIED, dim=0)
            _store_ones(rest, E2 - E2_COPIED, BLOCK_N)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    has_q = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier)
    for i in gl.static_range(2):
        mbarrier.init(has_q.index(i), count=1)
        mbarrier.init(q_free.index(i), count=NUM_CONSUMERS)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NUM_CONSUMERS)
    fence_async_shared()
    shared = Shared(q, q2, k, k2, v, v2, ones, has_q, q_free, full, empty)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    heads = (num_heads, group)
    lengths = (q_len, kv_len, window)
    sequences = (cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_sequences)
    work = (num_jobs, sequences, num_row_tiles, heads, lengths)
    scale_ptrs = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    scale_strides = (q_scale_stride, k_scale_stride, v_scale_stride)
    softmax = (softmax_scale, softcap)
    scales = (scale_ptrs, scale_strides)
    results = (out_ptr, lse_ptr, sink_ptr, scales, softmax, num_heads, num_tokens)
    # A head_dim in one part has no descriptors of a rest: to make one costs the host time.
    q_rest, k_rest, v_rest = q_desc, k_desc, v_desc
    if D2 > 0:
        q_rest, k_rest = q2_desc, k2_desc
    if E2 > 0:
        v_rest = v2_desc
    copies = (q_desc, q_rest, k_desc, k_rest, v_desc, v_rest)
    gl.warp_specialize(
        [
            (_consume, (tiles, shared, work, results, FIRST)),
            (_consume, (tiles, shared, work, results, SECOND)),
            (_produce, (tiles, shared, work, copies)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
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
    config = config or default_gluon(q.shape[-1], spec)
    num_programs, fixed = _arguments(
        (q.shape[-4] if packing is None else 1, *q.shape[-3:]),
        k.shape[-3:-1],
        None if packing is None else packing.cu_seqlens_q.shape[0] - 1,
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
    assert is_valid_gluon(config)
    num_sequences, num_tokens, num_heads, head_dim = q_shape
    kv_len, num_kv_heads = kv_shape
    block_m = NUM_CONSUMERS.value * ROWS.value
    num_row_tiles = -(-num_tokens // block_m)
    num_jobs = num_row_tiles * num_sequences * num_heads
    if num_packed is not None:
        num_sequences = num_packed
        num_jobs = (num_tokens // block_m + num_sequences) * num_heads
    if num_tokens * num_heads * head_dim * num_sequences == 0:
        num_jobs = 0
    (d1, d2), (e1, e2) = split_head_dim(head_dim, is_fp8_operand=True)
    if head_dim == 256:
        e1, e2 = 256, 0
    # Where the rest's tile has rows to spare, they are the ones that add up P.
    is_spare = config.has_ones and e2 > 0 and head_dim - e1 == 8
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
        "HAS_ONES": config.has_ones,
        "HAS_ONE_LOOP": config.has_one_loop,
        "IS_PERSISTENT": config.is_persistent,
        "num_warps": 4,
        "maxnreg": MAX_REGISTERS,
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
