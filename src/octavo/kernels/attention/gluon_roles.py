"""What the warps of Hopper's attention kernel do: one copies tiles, warpgroups attend to them.

A warpgroup has 64 queries. While the tensor core works for one warpgroup, the other makes P. The
sums of a tile start from zero and are added up in float32: two-level accumulation, which costs no
more than the rescaling it replaces.
"""

from octavo.internals import internals, require
from octavo.kernels.attention.gluon_results import scale_logits, shrunk, store_results
from octavo.kernels.attention.gluon_schedule import job_after, make_job, num_hiding_tiles
from octavo.kernels.attention.gluon_softmax import (
    add_ones,
    as_operand,
    begin_rows,
    begin_sums,
    cap_logits,
    encode,
    exponents,
    hide_keys,
    refer,
)
from octavo.kernels.attention.gluon_tiles import (
    ROWS,
    as_matrix,
    clear_strangers,
    copy_keys,
    copy_queries,
    copy_values,
    place_in_ring,
)

with internals("triton"):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        mbarrier,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

require(
    "triton.experimental.gluon",
    "triton.experimental.gluon.language",
    "triton.experimental.gluon.language.nvidia.hopper.mbarrier",
)

# Barrier 8 + W lets warpgroup W have its turn; the first ones are the compiler's own.
TAKE_FIRST, TAKE_SECOND = (gl.constexpr(f"bar.sync {8 + w}, 256; mov.b32 $0, $1;") for w in (0, 1))
PASS_FIRST, PASS_SECOND = (
    gl.constexpr(f"bar.arrive {8 + w}, 256; mov.b32 $0, $1;") for w in (0, 1)
)


@gluon.jit
def produce(tiles, shared, work, descriptors):
    """One warp copies queries, keys and values of job after job, as fast as there is room."""
    if tiles.IS_PERSISTENT:
        base = work.num_jobs * 0  # stages used by the jobs before
        count = work.num_jobs * 0  # of those jobs
        for first in range(0, work.num_jobs, gl.num_programs(0)):
            index = job_after(first)
            if index < work.num_jobs:
                job = make_job(index, work, tiles)
                if job.num_tiles > 0:
                    _copy_job(tiles, shared, job, base, count, descriptors)
                    base += job.num_tiles + 1
                    count += 1
    else:
        job = make_job(gl.program_id(0), work, tiles)
        if job.num_tiles > 0:
            _copy_job(tiles, shared, job, 0, 0, descriptors)


@gluon.jit
def _copy_job(tiles, shared, job, base, count, descriptors):
    """Queries, then keys and values in the order in which they are used."""
    KEY_BYTES: gl.constexpr = tiles.BLOCK_N * (tiles.D1 + tiles.D2)
    VALUE_BYTES: gl.constexpr = tiles.BLOCK_N * (tiles.E1 + tiles.E2_COPIED)
    slot, phase = place_in_ring(count, 2)
    mbarrier.wait(shared.q_free.index(slot), phase ^ 1)
    copy_queries(descriptors, shared, tiles, job, slot)
    stage, phase = place_in_ring(base, tiles.NUM_STAGES)
    mbarrier.wait(shared.empty.index(stage), phase ^ 1)
    mbarrier.expect(shared.full.index(stage), KEY_BYTES)
    copy_keys(descriptors, shared, tiles, job, 0, stage)
    for j in range(1, job.num_tiles):
        stage, phase = place_in_ring(base + j, tiles.NUM_STAGES)
        mbarrier.wait(shared.empty.index(stage), phase ^ 1)
        mbarrier.expect(shared.full.index(stage), KEY_BYTES + VALUE_BYTES)
        copy_keys(descriptors, shared, tiles, job, j, stage)
        copy_values(descriptors, shared, tiles, job, j - 1, stage)
    stage, phase = place_in_ring(base + job.num_tiles, tiles.NUM_STAGES)
    mbarrier.wait(shared.empty.index(stage), phase ^ 1)
    mbarrier.expect(shared.full.index(stage), VALUE_BYTES)
    copy_values(descriptors, shared, tiles, job, job.num_tiles - 1, stage)


@gluon.jit
def consume(tiles, shared, work, results, W: gl.constexpr):
    """Warpgroup W attends with 64 queries of job after job."""
    if tiles.IS_PERSISTENT:
        base = work.num_jobs * 0  # stages used by the jobs before
        count = work.num_jobs * 0  # of those jobs
        for first in range(0, work.num_jobs, gl.num_programs(0)):
            index = job_after(first)
            if index < work.num_jobs:
                job = make_job(index, work, tiles)
                if job.first_row < job.q_len:
                    _attend(tiles, shared, job, base, count, results, W)
                if job.num_tiles > 0:
                    base += job.num_tiles + 1
                    count += 1
    else:
        job = make_job(gl.program_id(0), work, tiles)
        if job.first_row < job.q_len:
            _attend(tiles, shared, job, 0, 0, results, W)


@gluon.jit
def _attend(tiles, shared, job, base, count, results, W: gl.constexpr):
    """64 queries: logits, P, weighted values, tile after tile."""
    logits = scale_logits(job, results, tiles)
    row = job.first_row + W * ROWS
    rows = begin_rows(tiles)
    sums = begin_sums(tiles)
    accs = _begin_accs(tiles)
    if job.num_tiles > 0:
        slot, phase = place_in_ring(count, 2)
        mbarrier.wait(shared.has_q.index(slot), phase)
        q, q2 = _queries(shared, slot * tiles.NUM_CONSUMERS + W, tiles)
        stage, phase = place_in_ring(base, tiles.NUM_STAGES)
        mbarrier.wait(shared.full.index(stage), phase)
        s = _multiply_keys(q, q2, shared, stage, tiles)
        s = warpgroup_mma_wait(0, deps=(s,))
        s = hide_keys(cap_logits(s, logits, tiles), tiles, job, job.tile(0), row)
        rows, shrink, votes = refer(s, rows, logits, tiles)
        x = exponents(s, rows, logits, tiles)
        # The first tile has no logits that are waited for, and no turn.
        fixed = (q, q2, row, base, slot, logits, shared, tiles, job)
        first = (x, votes, rows, sums, shrink, accs)
        if tiles.HAS_CODES:
            rows, sums, accs = _go_on_by_codes(first, fixed)
        else:
            rows, sums, accs = _go_on_exactly(first, fixed, W)
    store_results(accs, sums, rows, logits.factor, job, row, results, tiles)


@gluon.jit
def _go_on_by_codes(first, fixed):
    """(rows, sums, accs) after all tiles but the first, of which x is known.

    The tensor core works on P·V of one tile and q·kᵀ of the next; P is made while it works for the
    other warpgroup.
    """
    x, votes, rows, sums, shrink, accs = first
    q, q2, row, base, slot, logits, shared, tiles, job = fixed
    stage, _ = place_in_ring(base, tiles.NUM_STAGES)
    mbarrier.arrive(shared.empty.index(stage), count=1)
    words, sums = encode(x, votes, sums, shrink, tiles)
    if tiles.IS_PACKED:
        stage, phase = place_in_ring(base + 1, tiles.NUM_STAGES)
        mbarrier.wait(shared.full.index(stage), phase)
        clear_strangers(shared, job, stage, tiles)
    num_hiding = num_hiding_tiles(tiles, job, row)
    state = (words, rows, sums, shrink, accs)
    if tiles.IS_CAUSAL or tiles.HAS_ONE_LOOP:
        for j in range(1, num_hiding):
            state = _step_by_codes(j, state, fixed, True)
    if not tiles.HAS_ONE_LOOP:
        for j in range(num_hiding, job.num_tiles):
            state = _step_by_codes(j, state, fixed, False)
    words, rows, sums, shrink, accs = state
    mbarrier.arrive(shared.q_free.index(slot), count=1)
    stage, phase = place_in_ring(base + job.num_tiles, tiles.NUM_STAGES)
    mbarrier.wait(shared.full.index(stage), phase)
    p = as_operand(words, tiles.BLOCK_N, tiles.o_layout)
    under_way = _begin_values(p, accs, shrink, shared, stage, tiles)
    accs, sums = _end_values(under_way, p, words, accs, sums, shrink, shared, stage, tiles, 0)
    mbarrier.arrive(shared.empty.index(stage), count=1)
    return rows, sums, accs


@gluon.jit
def _step_by_codes(j, state, fixed, HIDES: gl.constexpr):
    """P·V of tile j − 1 and q·kᵀ of tile j, then P of tile j."""
    words, rows, sums, shrink, accs = state
    q, q2, row, base, _, logits, shared, tiles, job = fixed
    stage, phase = place_in_ring(base + j, tiles.NUM_STAGES)
    mbarrier.wait(shared.full.index(stage), phase)
    p = as_operand(words, tiles.BLOCK_N, tiles.o_layout)
    under_way = _begin_values(p, accs, shrink, shared, stage, tiles)
    if tiles.HAS_JOINT_PRODUCTS:
        s = _multiply_keys(q, q2, shared, stage, tiles)
        NUM_BEGUN: gl.constexpr = 2 if tiles.D2 > 0 else 1
        accs, sums = _end_values(
            under_way, p, words, accs, sums, shrink, shared, stage, tiles, NUM_BEGUN
        )
    else:
        accs, sums = _end_values(under_way, p, words, accs, sums, shrink, shared, stage, tiles, 0)
        s = _multiply_keys(q, q2, shared, stage, tiles)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(shared.empty.index(stage), count=1)
    s = cap_logits(s, logits, tiles)
    if HIDES:
        s = hide_keys(s, tiles, job, job.tile(j), row)
    rows, shrink, votes = refer(s, rows, logits, tiles)
    words, sums = encode(exponents(s, rows, logits, tiles), votes, sums, shrink, tiles)
    return words, rows, sums, shrink, accs


@gluon.jit
def _go_on_exactly(first, fixed, W: gl.constexpr):
    """(rows, sums, accs) after all tiles but the first, of which x is known.

    The tensor core works on P·V of one tile while the row maxima of the next are found, and on q·kᵀ
    of the one after while exponentials are taken; the two warpgroups do so by turns.
    """
    x, votes, rows, sums, shrink, accs = first
    q, q2, row, base, slot, logits, shared, tiles, job = fixed
    num_tiles = job.num_tiles
    stage, phase = place_in_ring(base + 1, tiles.NUM_STAGES)
    mbarrier.wait(shared.full.index(stage), phase)
    s = _multiply_keys(q, q2, shared, stage, tiles)
    if W == 1:
        _pass_turn(num_tiles, tiles, W)
    words, sums = encode(x, votes, sums, shrink, tiles)
    s = warpgroup_mma_wait(0, deps=(s,))
    if tiles.IS_PACKED:
        clear_strangers(shared, job, stage, tiles)
    # Tiles that hide keys come first, unless a window hides some at the other end as well.
    num_hiding = num_hiding_tiles(tiles, job, row)
    state = (s, words, rows, sums, shrink, accs)
    if tiles.IS_CAUSAL or tiles.HAS_ONE_LOOP:
        for j in range(1, num_hiding):
            state = _step_exactly(j, state, fixed, W, True)
    if not tiles.HAS_ONE_LOOP:
        for j in range(num_hiding, num_tiles):
            state = _step_exactly(j, state, fixed, W, False)
    s, words, rows, sums, shrink, accs = state
    mbarrier.arrive(shared.q_free.index(slot), count=1)
    stage, _ = place_in_ring(base + num_tiles - 1, tiles.NUM_STAGES)
    mbarrier.arrive(shared.empty.index(stage), count=1)
    # The last turn: each takes and passes as often as the other, so that no job finds a turn that
    # another one left.
    _take_turn(num_tiles, tiles, W)
    stage, _ = place_in_ring(base + num_tiles, tiles.NUM_STAGES)
    p = as_operand(words, tiles.BLOCK_N, tiles.o_layout)
    under_way = _begin_values(p, accs, shrink, shared, stage, tiles)
    if W == 0:
        _pass_turn(num_tiles, tiles, W)
    accs, sums = _end_values(under_way, p, words, accs, sums, shrink, shared, stage, tiles, 0)
    mbarrier.arrive(shared.empty.index(stage), count=1)
    return rows, sums, accs


@gluon.jit
def _step_exactly(j, state, fixed, W: gl.constexpr, HIDES: gl.constexpr):
    """P·V of tile j − 1 beside row maxima of tile j, then q·kᵀ of tile j + 1 beside P of tile j.

    The logits' registers are free for the next ones as soon as exponents are made of them. After
    the last tile the products are of what its stage held before, and nobody reads them.
    """
    s, words, rows, sums, shrink, accs = state
    q, q2, row, base, _, logits, shared, tiles, job = fixed
    before, _ = place_in_ring(base + j - 1, tiles.NUM_STAGES)
    stage, _ = place_in_ring(base + j, tiles.NUM_STAGES)
    next_stage, next_phase = place_in_ring(base + j + 1, tiles.NUM_STAGES)
    _take_turn(j, tiles, W)
    p = as_operand(words, tiles.BLOCK_N, tiles.o_layout)
    under_way = _begin_values(p, accs, shrink, shared, stage, tiles)
    s = cap_logits(s, logits, tiles)
    if HIDES:
        s = hide_keys(s, tiles, job, job.tile(j), row)
    rows, new_shrink, votes = refer(s, rows, logits, tiles)
    accs, sums = _end_values(under_way, p, words, accs, sums, shrink, shared, stage, tiles, 0)
    x = exponents(s, rows, logits, tiles)
    mbarrier.arrive(shared.empty.index(before), count=1)
    # Before the wait: with two stages, that stage is filled after the other's turn.
    _pass_turn(j, tiles, W)
    mbarrier.wait(shared.full.index(next_stage), next_phase)
    s = _multiply_keys(q, q2, shared, next_stage, tiles)
    words, sums = encode(x, votes, sums, new_shrink, tiles)
    s = warpgroup_mma_wait(0, deps=(s,))
    return s, words, rows, sums, new_shrink, accs


@gluon.jit
def _take_turn(some, tiles, W: gl.constexpr):
    """Wait until the other warpgroup passes the turn; `some` is any number."""
    if tiles.HAS_TURNS:
        TAKE: gl.constexpr = TAKE_FIRST if W == 0 else TAKE_SECOND
        gl.inline_asm_elementwise(TAKE, "=r,r", [some], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(some, tiles, W: gl.constexpr):
    """Let the other warpgroup have its turn."""
    if tiles.HAS_TURNS:
        PASS: gl.constexpr = PASS_SECOND if W == 0 else PASS_FIRST
        gl.inline_asm_elementwise(PASS, "=r,r", [some], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _queries(shared, slot, tiles):
    """The queries in a slot of shared memory, main part and rest."""
    q = as_matrix(shared.q.index(slot), ROWS, tiles.D1)
    q2 = q
    if tiles.D2 > 0:
        q2 = as_matrix(shared.q2.index(slot), ROWS, tiles.D2)
    return q, q2


@gluon.jit
def _multiply_keys(q, q2, shared, stage, tiles):
    """q·kᵀ of one tile, still under way."""
    zero = gl.zeros([ROWS, tiles.BLOCK_N], gl.float32, tiles.s_layout)
    k = as_matrix(shared.k.index(stage), tiles.BLOCK_N, tiles.D1)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if tiles.D2 > 0:
        k2 = as_matrix(shared.k2.index(stage), tiles.BLOCK_N, tiles.D2)
        s = warpgroup_mma(q2, k2.permute((1, 0)), s, use_acc=True, is_async=True)
    return s


@gluon.jit
def _begin_accs(tiles):
    """Running sums of P·V: parts of the main columns, then the rest of them."""
    accs = (gl.zeros([ROWS, tiles.E2 if tiles.E2 > 0 else 8], gl.float32, tiles.o2_layout),)
    for _ in gl.static_range(tiles.NUM_PARTS):
        accs = (gl.zeros([ROWS, tiles.WIDTH], gl.float32, tiles.o_layout),) + accs
    return accs


@gluon.jit
def _begin_values(p, accs, shrink, shared, stage, tiles):
    """P·V of one tile, and P·1 if sums come from there; under way.

    Two-level accumulation begins from zero, and IS_BY_PARTS with the first part alone. With one
    level the tensor core adds to what it has summed up.
    """
    begun = ()
    if tiles.IS_ONE_LEVEL:
        for i in gl.static_range(tiles.NUM_PARTS):
            v = _values(shared, stage, i, tiles)
            begun = begun + (_add_product(p, v, shrunk(accs[i], shrink)),)
        if tiles.E2 > 0:
            v = _values(shared, stage, tiles.NUM_PARTS, tiles)
            begun = begun + (_add_product(p, v, shrunk(accs[tiles.NUM_PARTS], shrink)),)
    else:
        begun = (_multiply_values(p, shared, stage, 0, tiles),)
        if tiles.E2 > 0 and not tiles.IS_BY_PARTS:
            begun = begun + (_multiply_values(p, shared, stage, tiles.NUM_PARTS, tiles),)
    if tiles.HAS_OWN_ONES:
        begun = begun + (_product(p, shared.ones, tiles.sum_layout),)
    return begun


@gluon.jit
def _end_values(begun, p, words, accs, sums, shrink, shared, stage, tiles, NUM_BEGUN: gl.constexpr):
    """(accs, sums) with what `_begin_values` began; NUM_BEGUN products were begun after it.

    words: the registers of p, which nobody may write before.
    """
    arrived = warpgroup_mma_wait(NUM_BEGUN, deps=begun + (words,))
    if tiles.HAS_OWN_ONES:
        sums = add_ones(sums, arrived[len(begun) - 1], shrink)
    LAST: gl.constexpr = tiles.NUM_PARTS if tiles.E2 > 0 else tiles.NUM_PARTS - 1
    added = ()
    if tiles.IS_BY_PARTS:
        part = arrived[0]
        for i in gl.static_range(LAST):
            following = _multiply_values(p, shared, stage, i + 1, tiles)
            added = added + (shrunk(accs[i], shrink) + part,)
            part = warpgroup_mma_wait(0, deps=(following,))
        added = added + (shrunk(accs[LAST], shrink) + part,)
    else:
        for i in gl.static_range(LAST + 1):
            if tiles.IS_ONE_LEVEL:
                added = added + (arrived[i],)
            else:
                added = added + (shrunk(accs[i], shrink) + arrived[i],)
    if tiles.E2 == 0:
        added = added + (accs[tiles.NUM_PARTS],)
    return added, sums


@gluon.jit
def _multiply_values(p, shared, stage, PART: gl.constexpr, tiles):
    """P·V of some columns, from zero, still under way."""
    layout: gl.constexpr = tiles.o2_layout if PART == tiles.NUM_PARTS else tiles.o_layout
    return _product(p, _values(shared, stage, PART, tiles), layout)


@gluon.jit
def _values(shared, stage, PART: gl.constexpr, tiles):
    """Some columns of a tile's values, which lie transposed; behind the main parts is the rest."""
    if PART == tiles.NUM_PARTS:
        v = as_matrix(shared.v2.index(stage), tiles.E2, tiles.BLOCK_N)
    else:
        v = as_matrix(shared.v.index(stage), tiles.E1, tiles.BLOCK_N)
        if tiles.NUM_PARTS > 1:
            v = v.slice(PART * tiles.WIDTH, tiles.WIDTH, dim=0)
    return v


@gluon.jit
def _product(p, v, layout: gl.constexpr):
    """P times the transpose of v, from zero, still under way."""
    WIDTH: gl.constexpr = v.shape[0]
    zero = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, layout, 4))
    return warpgroup_mma(p, v.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _add_product(p, v, sums):
    """P times the transpose of v, added to sums by the tensor core, still under way."""
    p = gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 4))
    return warpgroup_mma(p, v.permute((1, 0)), sums, use_acc=True, is_async=True)
