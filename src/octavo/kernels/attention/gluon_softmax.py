"""Softmax of Hopper's attention kernel: logits of one tile become P, the operand of P·V.

Exact: P = 2^(x + 8), rounded to e4m3, relative to the largest logit so far. Codes: the byte of an
e4m3 number is 8 · log2 P + 120 but for a small error, so no exponential is taken; P is relative to
the largest logit of its own tile, and a row with keys far below it is rounded as exactly as without
codes. `octavo.reference.softmax` says both in torch.
"""

import struct

from octavo.internals import internals, require
from octavo.kernels.attention.gluon_tiles import ROWS

with internals("triton"):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.language.core import _aggregate as aggregate

require("triton.experimental.gluon", "triton.experimental.gluon.language")

LOG2_E = gl.constexpr(1.4426950408889634)
# P ≤ 1 is multiplied by 2^8 before it is rounded, to use more of e4m3's range.
WEIGHT_BITS = gl.constexpr(8.0)
# The code of 2^8 is 120; 7/16 less centers the error of a mantissa that grows linearly.
TOP_CODE = gl.constexpr(120 - 7 / 16)
# With codes a tile's reference lies at most so many powers of two below the largest logit so far.
CODE_SPAN = gl.constexpr(64.0)
# Codes are multiplied by this, so that float16's largest number is the code 126, e4m3's largest;
# the float16 below takes it back.
CODE_UNIT = gl.constexpr(1 / 0.001922607421875)
_INV_CODE_UNIT = gl.constexpr(0x17E017E0)
# What makes log2 P + 8 of a code in those units, which is not rounded yet: factor, offset; as bits.
_ROUND_FACTOR = gl.constexpr(struct.pack(">f", 1 / (8 * CODE_UNIT.value)).hex())
_ROUND_OFFSET = gl.constexpr(struct.pack(">f", WEIGHT_BITS.value - TOP_CODE.value / 8).hex())
# Keys with one value of (key mod 8) // 2 are a thread's: a row is rounded if the largest logit of
# one of its four threads lies so far below the row's.
CODE_FAR = gl.constexpr(9.0)

_EXP2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")
_ROUND = gl.constexpr("""
{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}""")
# For a thread's two rows: bit 0 says that the row is rounded, since one of its four threads wants
# that, bit 1 that some row of the warp is.
_VOTE = gl.constexpr("""
{
.reg .pred first, second, anywhere;
.reg .b32 firsts, seconds, quad, word;
setp.ne.s32 first, $2, 0;
setp.ne.s32 second, $3, 0;
vote.sync.ballot.b32 firsts, first, 0xffffffff;
vote.sync.ballot.b32 seconds, second, 0xffffffff;
or.b32 word, firsts, seconds;
setp.ne.s32 anywhere, word, 0;
selp.b32 word, 2, 0, anywhere;
mov.u32 quad, %laneid;
and.b32 quad, quad, 28;
shr.u32 firsts, firsts, quad;
shr.u32 seconds, seconds, quad;
and.b32 firsts, firsts, 15;
and.b32 seconds, seconds, 15;
min.u32 firsts, firsts, 1;
min.u32 seconds, seconds, 1;
or.b32 $0, firsts, word;
or.b32 $1, seconds, word;
}""")
# The operand P is its words as they are.
_UNPACK = gl.constexpr("mov.b32 $0, $1;")


@aggregate
class Rows:
    """What is known of 64 rows of logits, in units of a product of codes."""

    reference: gl.tensor  # what P is relative to; without codes the same as `largest`
    largest: gl.tensor

    @gluon.constexpr_function
    def __init__(self, reference, largest):
        self.reference, self.largest = reference, largest


@aggregate
class Logits:
    """What products of codes are multiplied by, and what a cap needs."""

    factor: gl.tensor
    inv_cap: gl.tensor
    cap: gl.tensor

    @gluon.constexpr_function
    def __init__(self, factor, inv_cap, cap):
        self.factor, self.inv_cap, self.cap = factor, inv_cap, cap


@gluon.constexpr_function
def _maxima_ptx(num):
    """PTX that leaves the largest logits of a thread's two rows in its registers 0 and 2.

    Its operands are what it leaves, then the logits: two of the first row, two of the second, ….
    The largest of float32 numbers, of which one is positive, is that of their bits as integers; and
    of integers one instruction finds the largest of three. Where all are negative it is not.
    """
    rows = [[f"${num + i}" for i in range(num) if i // 2 % 2 == row] for row in (0, 1)]
    # Two chains for each row: an instruction waits for the one before it in its chain.
    chains = {f"m{row}{half}": of[half::2] for row, of in enumerate(rows) for half in (0, 1)}

    def largest(kind):
        lines = [f"mov.b32 {name}, {of[0]};" for name, of in chains.items()]
        for i in range(1, num // 4):
            lines += [f"max.{kind} {name}, {name}, {of[i]};" for name, of in chains.items()]
        return [*lines, f"max.{kind} m00, m00, m01;", f"max.{kind} m10, m10, m11;"]

    lines = [
        ".reg .pred is_below;",
        f".reg .b32 {', '.join(chains)}, sign;",
        *largest("s32"),
        "or.b32 sign, m00, m10;",
        "setp.lt.s32 is_below, sign, 0;",
        "vote.sync.any.pred is_below, is_below, 0xffffffff;",
        "@!is_below bra.uni FOUND;",
        *largest("f32"),
        "FOUND:",
        "mov.b32 $0, m00;",
        "mov.b32 $2, m10;",
    ]
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def _log2(x):
    return x.bit_length() - 1


@gluon.constexpr_function
def _maxima_constraints(num):
    """The operands of `_maxima_ptx`, as LLVM wants them."""
    return ",".join(["=r"] * num + ["r"] * num)


@gluon.constexpr_function
def _codes_ptx(num_words):
    """PTX that makes words of four codes each from those of each key, not rounded, in CODE_UNITs.

    Its operands are the words, then codes of each word's first key, of its second, …, then what
    _VOTE says of each word's row. float16 numbers of the size of 1024 are integers, and their low
    byte is the code; what lies beyond e4m3's range is cut off, and NaN stays NaN, whose low byte is
    e4m3's NaN. A warp without a row to be rounded takes no exponential.
    """
    words = [f"${i}" for i in range(num_words)]
    keys = [[f"${num_words * (1 + k) + i}" for k in range(4)] for i in range(num_words)]
    votes = [f"${num_words * 5 + i}" for i in range(num_words)]
    by_codes, by_both = [], []
    for word, four, vote in zip(words, keys, votes, strict=True):
        a, b, c, d = four
        by_code = [
            f"cvt.rn.satfinite.relu.f16x2.f32 low, {b}, {a};",
            f"cvt.rn.satfinite.relu.f16x2.f32 high, {d}, {c};",
            "fma.rn.f16x2 low, low, unit, magic;",
            "fma.rn.f16x2 high, high, unit, magic;",
            f"prmt.b32 {word}, low, high, 0x6420;",
        ]
        by_codes += by_code
        by_both += by_code
        for name, x in zip("abcd", four, strict=True):
            by_both += [
                f"fma.rn.f32 {name}, {x}, factor, offset;",
                f"ex2.approx.ftz.f32 {name}, {name};",
            ]
        by_both += [
            "cvt.rn.satfinite.e4m3x2.f32 first, b, a;",
            "cvt.rn.satfinite.e4m3x2.f32 second, d, c;",
            "mov.b32 low, {first, second};",
            f"and.b32 high, {vote}, 1;",
            "setp.ne.s32 is_rounded, high, 0;",
            f"selp.b32 {word}, low, {word}, is_rounded;",
        ]
    lines = [
        ".reg .pred is_rounded;",
        ".reg .b32 low, high, unit, magic;",
        ".reg .b16 first, second;",
        ".reg .f32 a, b, c, d, factor, offset;",
        "mov.b32 magic, 0x64006400;",
        f"mov.b32 unit, {_INV_CODE_UNIT.value:#x};",
        f"setp.ge.s32 is_rounded, {votes[0]}, 2;",
        "@is_rounded bra.uni ROUND;",
        *by_codes,
        "bra.uni DONE;",
        "ROUND:",
        f"mov.b32 factor, 0f{_ROUND_FACTOR.value};",
        f"mov.b32 offset, 0f{_ROUND_OFFSET.value};",
        *by_both,
        "DONE:",
    ]
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def _codes_constraints(num_words):
    """The operands of `_codes_ptx`, as LLVM wants them; words are written before all x are read."""
    return ",".join(["=&r"] * num_words + ["f"] * (4 * num_words) + ["r"] * num_words)


@gluon.jit
def exp2(x):
    """2^x by the special-function unit."""
    return gl.inline_asm_elementwise(_EXP2, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def begin_rows(tiles):
    """Rows of which no logit is known."""
    nothing = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, tiles.s_layout))
    return Rows(nothing, nothing)


@gluon.jit
def cap_logits(s, logits, tiles):
    """Logits capped: tanh(x) = 1 − 2 / (e^2x + 1), and then in powers of two."""
    if tiles.HAS_SOFTCAP:
        s = logits.cap - 2.0 * logits.cap / (exp2(s * logits.inv_cap) + 1.0)
    return s


@gluon.jit
def hide_keys(s, tiles, job, tile, row):
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
def refer(s, rows, logits, tiles):
    """(rows, shrink, votes): what P of one tile is relative to.

    shrink: by how much earlier sums shrink; more than 1 where the reference falls. votes, [64, 4]:
    which rows are rounded in spite of codes.
    """
    layout: gl.constexpr = gl.SliceLayout(1, tiles.s_layout)
    factor = logits.factor
    if tiles.HAS_CODES:
        by_thread = _largest_of_threads(s, tiles.BLOCK_N)
        found = gl.convert_layout(gl.max(by_thread, 1), layout)
        largest = gl.maximum(rows.largest, found)
        reference = gl.maximum(found, largest - CODE_SPAN / factor)
        reference = gl.where(found == float("-inf"), rows.reference, reference)
        top = gl.convert_layout(finite(reference), gl.SliceLayout(1, by_thread.type.layout))
        is_far = (top[:, None] - by_thread) * factor > CODE_FAR
        votes = gl.inline_asm_elementwise(
            _VOTE, "=&r,=&r,r,r", [is_far.to(gl.int32)], dtype=gl.int32, is_pure=True, pack=2
        )
    else:
        found = gl.convert_layout(_row_max(s, tiles.BLOCK_N), layout)
        largest = gl.maximum(rows.largest, found)
        reference = largest
        votes = gl.zeros([ROWS], gl.int32, layout)
    # Exactly 1 where the reference stays: a product's rounding would add up over the tiles.
    shrink = exp2((rows.reference - finite(reference)) * factor)
    return Rows(reference, largest), shrink, votes


@gluon.jit
def finite(reference):
    """The reference, or 0 for a row that has seen nothing."""
    return gl.where(reference == float("-inf"), 0.0, reference)


@gluon.jit
def _row_max(s, BLOCK_N: gl.constexpr):
    """Largest logit of each row, by short chains in registers and then two shuffles."""
    GROUPS: gl.constexpr = BLOCK_N // 8
    most = gl.max(s.reshape([ROWS, GROUPS, 4, 2]), 3)
    most = gl.max(most.reshape([ROWS, 4, GROUPS // 4, 4]), 1)
    return gl.max(gl.max(most, 1), 1)


@gluon.jit
def _largest_of_threads(s, BLOCK_N: gl.constexpr):
    """Largest logits of each row in each of its four threads, [64, 4]."""
    NUM: gl.constexpr = BLOCK_N // 2
    PTX: gl.constexpr = _maxima_ptx(NUM)
    CONSTRAINTS: gl.constexpr = _maxima_constraints(NUM)
    bits = s.to(gl.int32, bitcast=True)
    bits = gl.inline_asm_elementwise(
        PTX, CONSTRAINTS, [bits], dtype=gl.int32, is_pure=True, pack=NUM
    )
    # Of each thread the first of its keys stands for all.
    first, _ = bits.reshape([ROWS, BLOCK_N // 8, 4, 2]).split()
    first = first.permute([0, 2, 1])
    for _ in gl.static_range(_log2(BLOCK_N // 8)):
        first, _ = first.reshape([ROWS, 4, first.shape[2] // 2, 2]).split()
    return first.reshape([ROWS, 4]).to(gl.float32, bitcast=True)


@gluon.jit
def exponents(s, rows, logits, tiles):
    """What `encode` makes P of: log2 of it, or its code in CODE_UNITs before it is rounded."""
    highest = finite(rows.reference) * logits.factor
    if tiles.HAS_CODES:
        top = (TOP_CODE - highest * 8.0) * CODE_UNIT
        x = s * (logits.factor * (8.0 * CODE_UNIT)) + top[:, None]
    else:
        x = s * logits.factor + (WEIGHT_BITS - highest)[:, None]
    return x


@gluon.jit
def encode(x, votes, sums, shrink, tiles):
    """(words, sums): P as words of four e4m3, in the order of transposed values, and added to sums.

    No thread needs another's: the order is made for that. sums: as they were, if the tensor core
    adds up P.
    """
    if tiles.HAS_CODES:
        words = _encode_words(x, votes, tiles.BLOCK_N)
    else:
        p = exp2(x)
        sums = _add_rows(sums, p, shrink, tiles)
        a, b, c, d = _keys_of_words(p, tiles.BLOCK_N)
        words = gl.inline_asm_elementwise(
            _ROUND, "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1
        )
    words = gl.convert_layout(words, gl.SliceLayout(2, _weight_layout(tiles.BLOCK_N)))
    return words, sums


@gluon.jit
def _encode_words(x, votes, BLOCK_N: gl.constexpr):
    a, b, c, d = _keys_of_words(x, BLOCK_N)
    # A thread's words are those of its own keys.
    of_threads = a.reshape([ROWS, BLOCK_N // 16, 4])
    votes = gl.convert_layout(votes, gl.SliceLayout(1, of_threads.type.layout))
    votes = votes[:, None, :].broadcast_to([ROWS, BLOCK_N // 16, 4])
    votes = gl.convert_layout(votes.reshape([ROWS, BLOCK_N // 4]), a.type.layout)
    NUM_WORDS: gl.constexpr = BLOCK_N // 8
    PTX: gl.constexpr = _codes_ptx(NUM_WORDS)
    CONSTRAINTS: gl.constexpr = _codes_constraints(NUM_WORDS)
    return gl.inline_asm_elementwise(
        PTX, CONSTRAINTS, [a, b, c, d, votes], dtype=gl.int32, is_pure=True, pack=NUM_WORDS
    )


@gluon.jit
def _keys_of_words(p, BLOCK_N: gl.constexpr):
    """The four keys of each word, [64, BLOCK_N / 4] each."""
    split = p.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    even, odd = split.reshape([ROWS, BLOCK_N // 4, 2, 2]).split()
    even0, even1 = even.split()
    odd0, odd1 = odd.split()
    return even0, odd0, even1, odd1


@gluon.jit
def begin_sums(tiles):
    """Sums of P's rows before the first tile, in each row's four threads: [64, 4]."""
    if tiles.HAS_ONES:
        sums = _thread_sums(gl.zeros([ROWS, 8], gl.float32, tiles.sum_layout), 8)
    else:
        p = gl.zeros([ROWS, tiles.BLOCK_N], gl.float32, tiles.s_layout)
        sums = _thread_sums(p, tiles.BLOCK_N)
    return sums


@gluon.jit
def add_ones(sums, total, shrink):
    """Running sums of P's rows with those of a tile, which the tensor core left in 8 columns."""
    part = gl.max(total.reshape([ROWS, 4, 2]), 2)
    part = gl.convert_layout(part, sums.type.layout)
    return sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + part


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
def _thread_sums(p, BLOCK_N: gl.constexpr):
    """Sums of each row's values in each of its four threads: [64, 4], without a shuffle."""
    GROUPS: gl.constexpr = BLOCK_N // 8
    total = gl.sum(p.reshape([ROWS, GROUPS, 4, 2]), 3)
    if GROUPS >= 4:
        total = gl.sum(total.reshape([ROWS, 4, GROUPS // 4, 4]), 1)
    return gl.sum(total, 1)


@gluon.jit
def as_operand(words, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """The operand P from words."""
    words = gl.expand_dims(words, 2).broadcast_to([ROWS, BLOCK_N // 4, 4])
    p = gl.inline_asm_elementwise(
        _UNPACK, "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4
    )
    return gl.convert_layout(p.reshape([ROWS, BLOCK_N]), gl.DotOperandLayout(0, layout, 4))


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
