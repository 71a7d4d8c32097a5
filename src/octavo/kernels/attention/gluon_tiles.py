"""Tiles of Hopper's attention kernel: their sizes, where they lie, and how TMA copies them."""

from octavo.internals import internals, require
from octavo.kernels.gluon_primitives import load_tile, thread_barrier

with internals("triton"):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
    from triton.language.core import _aggregate as aggregate

require(
    "triton.experimental.gluon",
    "triton.experimental.gluon.language",
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier",
    "triton.experimental.gluon.language.nvidia.hopper.tma.tensor_descriptor",
)

# Queries of one warpgroup.
ROWS = gl.constexpr(64)


@gluon.constexpr_function
def _sum_layout(columns):
    """Where a warpgroup's sums of a product [64, columns] lie in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@aggregate
class Tiles:
    """What is compiled into a kernel: sizes of the tiles, what the call uses, register layouts."""

    BLOCK_N: gl.constexpr
    NUM_STAGES: gl.constexpr
    NUM_CONSUMERS: gl.constexpr  # warpgroups that attend to 64 queries each
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
    HAS_CODES: gl.constexpr  # P without exponentials
    IS_ONE_LEVEL: gl.constexpr  # the tensor core adds P·V of all tiles
    HAS_ONES: gl.constexpr  # the tensor core adds up the rows of P, too
    HAS_OWN_ONES: gl.constexpr  # not in the rows of the rest that are left
    HAS_ONE_LOOP: gl.constexpr  # for tiles that hide keys and those that do not
    HAS_TURNS: gl.constexpr  # warpgroups find row maxima one after the other
    HAS_JOINT_PRODUCTS: gl.constexpr  # P·V and the next q·kᵀ are under way together
    IS_PERSISTENT: gl.constexpr
    IS_LONGEST_FIRST: gl.constexpr
    IS_BY_PARTS: gl.constexpr  # P·V part by part: two levels of all columns need too many registers
    WIDTH: gl.constexpr  # columns of a part of the main ones
    NUM_PARTS: gl.constexpr  # of the main ones
    s_layout: gl.constexpr
    o_layout: gl.constexpr
    o2_layout: gl.constexpr
    sum_layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, sizes, parts, uses, how):
        part_width = sizes[4]
        self.BLOCK_N, self.NUM_STAGES = map(gl.constexpr, sizes[:2])
        self.NUM_CONSUMERS, self.HEAD_DIM = map(gl.constexpr, sizes[2:4])
        self.D1, self.D2, self.E1, self.E2, self.E2_COPIED = map(gl.constexpr, parts)
        self.IS_PACKED, self.IS_CAUSAL, self.HAS_WINDOW = map(gl.constexpr, uses[:3])
        self.HAS_SOFTCAP, self.HAS_SINKS, self.HAS_CODES = map(gl.constexpr, uses[3:6])
        self.IS_ONE_LEVEL = gl.constexpr(uses[6])
        has_ones, has_one_loop, is_persistent, is_longest_first = how
        e1, e2, e2_copied = parts[2:]
        self.HAS_ONES = gl.constexpr(has_ones)
        self.HAS_OWN_ONES = gl.constexpr(has_ones and e2_copied == e2)
        # A window hides keys at both ends, and a cap spills where nothing interrupts the loop.
        self.HAS_ONE_LOOP = gl.constexpr(has_one_loop or uses[2] or uses[3])
        # Two warpgroups in step would both want the special-function unit and then both leave it
        # idle; codes do not need it.
        self.HAS_TURNS = gl.constexpr(not uses[5] and sizes[2] == 2)
        self.IS_PERSISTENT = gl.constexpr(is_persistent)
        self.IS_LONGEST_FIRST = gl.constexpr(is_longest_first)
        # More than 128 columns twice, as sums of a tile and of all, are too many for registers.
        self.IS_BY_PARTS = gl.constexpr(sizes[3] > 128 and not uses[6])
        width = part_width if self.IS_BY_PARTS.value else min(e1, 128)
        self.WIDTH, self.NUM_PARTS = gl.constexpr(width), gl.constexpr(e1 // width)
        # Registers of a thread: logits, sums of a tile and of all, words of P.
        columns = width if self.IS_BY_PARTS.value else e1 + e2
        num_registers = (sizes[0] + columns + e1 + e2) // 2 + sizes[0] // 8
        self.HAS_JOINT_PRODUCTS = gl.constexpr(num_registers <= 224)
        self.s_layout = gl.constexpr(_sum_layout(sizes[0]))
        self.o_layout = gl.constexpr(_sum_layout(width))
        self.o2_layout = gl.constexpr(_sum_layout(e2 or 8))
        self.sum_layout = gl.constexpr(_sum_layout(8))


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
    has_q: gl.shared_memory_descriptor  # mbarriers
    q_free: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, ones, barriers):
        self.q, self.q2 = q
        self.k, self.k2 = k
        self.v, self.v2 = v
        self.ones = ones
        self.has_q, self.q_free, self.full, self.empty = barriers


@aggregate
class Descriptors:
    """What TMA reads tiles from; of a head_dim in one part, the main one stands for the rest."""

    q: tma.tensor_descriptor
    q2: tma.tensor_descriptor
    k: tma.tensor_descriptor
    k2: tma.tensor_descriptor
    v: tma.tensor_descriptor
    v2: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q2, k, k2, v, v2):
        self.q, self.q2, self.k, self.k2, self.v, self.v2 = q, q2, k, k2, v, v2


@gluon.jit
def begin_barriers(has_q, q_free, full, empty, tiles):
    """mbarriers of the queries of two jobs and of the ring's stages, ready for use."""
    for i in gl.static_range(2):
        mbarrier.init(has_q.index(i), count=1)
        mbarrier.init(q_free.index(i), count=tiles.NUM_CONSUMERS)
    for i in gl.static_range(tiles.NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=tiles.NUM_CONSUMERS)


@gluon.jit
def store_ones(ones, v2, tiles):
    """Rows of ones, whose product with P is its sum: a tile of their own, or rows left in v2."""
    if tiles.HAS_OWN_ONES:
        _store_ones(ones, 8, tiles.BLOCK_N)
    elif tiles.HAS_ONES:
        LEFT: gl.constexpr = tiles.E2 - tiles.E2_COPIED
        for i in gl.static_range(tiles.NUM_STAGES):
            rest = as_matrix(v2.index(i), tiles.E2, tiles.BLOCK_N)
            _store_ones(rest.slice(tiles.E2_COPIED, LEFT, dim=0), LEFT, tiles.BLOCK_N)


@gluon.jit
def _store_ones(ref, HEIGHT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows of ones; as bits, since ptxas makes garbage of a constant's conversion to FP8."""
    threads: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    one = gl.full([HEIGHT, BLOCK_N], 0x38, gl.int8, threads)
    ref.store(one.to(ref.dtype, bitcast=True))


@gluon.jit
def as_matrix(ref, rows: gl.constexpr, columns: gl.constexpr):
    """A tile [1, 1, rows, columns] of shared memory as a matrix."""
    return ref.reshape([rows, columns])


@gluon.jit
def place_in_ring(j, NUM_STAGES: gl.constexpr):
    """The j-th stage's index and the phase of its mbarriers; NUM_STAGES is a power of two."""
    return j % NUM_STAGES, (j // NUM_STAGES) & 1


@gluon.jit
def copy_queries(descriptors, shared, tiles, job, slot):
    """Start to copy a job's queries, 64 for each warpgroup."""
    bar = shared.has_q.index(slot)
    mbarrier.expect(bar, tiles.NUM_CONSUMERS * ROWS * (tiles.D1 + tiles.D2))
    for w in gl.static_range(tiles.NUM_CONSUMERS):
        row, part = job.q_token + w * ROWS, slot * tiles.NUM_CONSUMERS + w
        load_tile(descriptors.q, [job.batch, job.head, row, 0], bar, shared.q.index(part))
        if tiles.D2 > 0:
            place = [job.batch, job.head, row, tiles.D1]
            load_tile(descriptors.q2, place, bar, shared.q2.index(part))


@gluon.jit
def copy_keys(descriptors, shared, tiles, job, j, stage):
    """Start to copy the keys of the job's j-th tile."""
    bar = shared.full.index(stage)
    row = job.k_token + job.tile(j) * tiles.BLOCK_N
    load_tile(descriptors.k, [job.batch, job.kv_head, row, 0], bar, shared.k.index(stage))
    if tiles.D2 > 0:
        place = [job.batch, job.kv_head, row, tiles.D1]
        load_tile(descriptors.k2, place, bar, shared.k2.index(stage))


@gluon.jit
def copy_values(descriptors, shared, tiles, job, j, stage):
    """Start to copy the values of the job's j-th tile."""
    bar = shared.full.index(stage)
    column = job.column + job.tile(j) * tiles.BLOCK_N
    load_tile(descriptors.v, [job.batch, job.kv_head, 0, column], bar, shared.v.index(stage))
    if tiles.E2 > 0:
        rest = shared.v2.index(stage)
        if tiles.E2_COPIED < tiles.E2:
            rest = rest.slice(0, tiles.E2_COPIED, dim=2)
        load_tile(descriptors.v2, [job.batch, job.kv_head, tiles.E1, column], bar, rest)


@gluon.jit
def clear_strangers(shared, job, stage, tiles):
    """Zeros for what the last tile of values has of the next sequence: 0 times its NaN is NaN.

    All warpgroups write the same bytes, each before it reads them.
    """
    num_columns = (job.kv_len + 15) // 16 * 16 - job.tile(0) * tiles.BLOCK_N
    if num_columns < tiles.BLOCK_N:
        values = as_matrix(shared.v.index(stage), tiles.E1, tiles.BLOCK_N)
        _clear_columns(values, num_columns, tiles.BLOCK_N)
        if tiles.E2 > 0:
            values = as_matrix(shared.v2.index(stage), tiles.E2, tiles.BLOCK_N)
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
