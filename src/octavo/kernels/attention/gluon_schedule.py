"""Which tile of queries a program of Hopper's attention kernel attends to, and what it sees."""

from octavo.internals import internals, require
from octavo.kernels.attention.gluon_tiles import ROWS

with internals("triton"):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.language.core import _aggregate as aggregate

require("triton.experimental.gluon", "triton.experimental.gluon.language")


@aggregate
class Work:
    """All tiles of queries: how many, of which sequences and heads."""

    num_jobs: gl.tensor
    num_row_tiles: gl.tensor  # of a sequence, where all have one length
    num_sequences: gl.tensor
    num_heads: gl.tensor
    group: gl.tensor  # heads that share keys and values
    q_len: gl.tensor
    kv_len: gl.tensor
    window: gl.tensor
    cu_seqlens_q_ptr: gl.tensor
    cu_seqlens_k_ptr: gl.tensor

    @gluon.constexpr_function
    def __init__(self, counts, heads, lengths, cu_seqlens):
        self.num_jobs, self.num_row_tiles, self.num_sequences = counts
        self.num_heads, self.group = heads
        self.q_len, self.kv_len, self.window = lengths
        self.cu_seqlens_q_ptr, self.cu_seqlens_k_ptr = cu_seqlens


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
    def __init__(self, heads, tokens, lengths, tiles, window):
        self.batch, self.head, self.kv_head = heads
        self.q_token, self.k_token, self.column, self.first_row = tokens
        self.q_len, self.kv_len = lengths
        self.first_tile, self.num_tiles = tiles
        self.window = window

    @gluon.jit
    def tile(self, j):
        """The j-th tile of keys: from the last one, which hides keys, back to the first."""
        return self.first_tile + self.num_tiles - 1 - j


@gluon.jit
def job_after(first):
    """This program's job in the round that begins with job `first`, when a program has many.

    Programs take turns in being first: else those jobs of short sequences that have no rows would
    fall to the same programs in every round.
    """
    num_programs = gl.num_programs(0)
    return first + (gl.program_id(0) + first // num_programs) % num_programs


@gluon.jit
def make_job(index, work, tiles):
    """A job by its number; of a causal call the tiles that see most keys come first.

    IS_LONGEST_FIRST: those of all heads and sequences; else head by head, whose keys and values
    stay in the cache.
    """
    BLOCK_M: gl.constexpr = tiles.NUM_CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = tiles.BLOCK_N
    q_len, kv_len, num_row_tiles = work.q_len, work.kv_len, work.num_row_tiles
    if tiles.IS_PACKED:
        sequence, first_slot = _find_sequence(index // work.num_heads, work, BLOCK_M)
        end = gl.load(work.cu_seqlens_q_ptr + sequence + 1)
        num_row_tiles = end // BLOCK_M + sequence + 1 - first_slot
        index -= first_slot * work.num_heads
        head = index // num_row_tiles
        tile = index % num_row_tiles
    elif tiles.IS_LONGEST_FIRST:
        num_others = work.num_sequences * work.num_heads
        tile = index // num_others
        sequence = index % num_others // work.num_heads
        head = index % num_others % work.num_heads
    else:
        sequence = index // num_row_tiles // work.num_heads
        head = index // num_row_tiles % work.num_heads
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
        q_first = gl.load(work.cu_seqlens_q_ptr + sequence)
        k_first = gl.load(work.cu_seqlens_k_ptr + sequence)
        # Slots behind the last sequence are padding's: no head has them, and no query.
        q_len = gl.where(head < work.num_heads, end - q_first, 0)
        kv_len = gl.load(work.cu_seqlens_k_ptr + sequence + 1) - k_first
        column = (k_first + 16 * sequence) // 16 * 16
    lowest = kv_len - q_len + first_row
    highest = kv_len - q_len + gl.minimum(first_row + BLOCK_M, q_len) - 1
    first = sequence * 0
    last = kv_len
    if tiles.IS_CAUSAL:
        last = gl.minimum(last, highest + 1)
    if tiles.HAS_WINDOW:
        first = gl.maximum(lowest - work.window + 1, 0)
        last = gl.minimum(last, highest + work.window)
    first_tile = first // BLOCK_N
    num_tiles = gl.maximum((last + BLOCK_N - 1) // BLOCK_N - first_tile, 0)
    num_tiles = gl.where((last <= first) | (first_row >= q_len), 0, num_tiles)
    return Job(
        (batch, head, head // work.group),
        (q_first + first_row, k_first, column, first_row),
        (q_len, kv_len),
        (first_tile, num_tiles),
        work.window,
    )


@gluon.jit
def _find_sequence(slot, work, BLOCK_M: gl.constexpr):
    """The packed sequence that has a slot for a tile of queries, and its first slot.

    Slots of sequence i begin at cu_seqlens[i] // BLOCK_M + i: enough for each whatever its length,
    and how many there are in all follows from the tokens, without a look at the lengths.
    """
    cu_seqlens_ptr = work.cu_seqlens_q_ptr
    low = slot * 0
    width = low + work.num_sequences
    while width > 1:
        half = width // 2
        start = gl.load(cu_seqlens_ptr + low + half) // BLOCK_M + low + half
        is_right = start <= slot
        low = gl.where(is_right, low + half, low)
        width = gl.where(is_right, width - half, half)
    return low, gl.load(cu_seqlens_ptr + low) // BLOCK_M + low


@gluon.jit
def num_hiding_tiles(tiles, job, row):
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
def zero_padding(out_ptr, lse_ptr, first_row, num_rows, HEAD_DIM: gl.constexpr):
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
