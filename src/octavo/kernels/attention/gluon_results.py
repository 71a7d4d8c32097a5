"""What Hopper's attention kernel makes of sums: rows of the result, and their logarithms."""

from octavo.internals import internals, require
from octavo.kernels.attention.gluon_softmax import LOG2_E, WEIGHT_BITS, Logits, exp2
from octavo.kernels.attention.gluon_tiles import ROWS

with internals("triton"):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.language.core import _aggregate as aggregate

require("triton.experimental.gluon", "triton.experimental.gluon.language")

LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Results:
    """Where results go, and the scales that make numbers of codes."""

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    sink_ptr: gl.tensor
    q_scale_ptr: gl.tensor
    k_scale_ptr: gl.tensor
    v_scale_ptr: gl.tensor
    q_scale_stride: gl.tensor
    k_scale_stride: gl.tensor
    v_scale_stride: gl.tensor
    softmax_scale: gl.tensor
    softcap: gl.tensor
    num_heads: gl.tensor
    num_tokens: gl.tensor

    @gluon.constexpr_function
    def __init__(self, ptrs, scale_ptrs, scale_strides, softmax, sizes):
        self.out_ptr, self.lse_ptr, self.sink_ptr = ptrs
        self.q_scale_ptr, self.k_scale_ptr, self.v_scale_ptr = scale_ptrs
        self.q_scale_stride, self.k_scale_stride, self.v_scale_stride = scale_strides
        self.softmax_scale, self.softcap = softmax
        self.num_heads, self.num_tokens = sizes


@gluon.jit
def shrunk(sums, shrink):
    """Sums relative to the new reference of each row."""
    return sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def scale_logits(job, results, tiles):
    """What products of codes are multiplied by, and what a cap needs."""
    logit_scale = results.softmax_scale * LOG2_E
    logit_scale *= gl.load(results.q_scale_ptr + job.head * results.q_scale_stride)
    logit_scale *= gl.load(results.k_scale_ptr + job.kv_head * results.k_scale_stride)
    factor = logit_scale
    if tiles.HAS_SOFTCAP:
        factor = logit_scale * 0.0 + 1.0
    softcap = results.softcap
    return Logits(factor, 2.0 * logit_scale / softcap, softcap * LOG2_E)


@gluon.jit
def store_results(accs, sums, rows, factor, job, row, results, tiles):
    """The epilogue: running sums become rows of the result, and logarithms of their sums."""
    PARTS: gl.constexpr = tiles.NUM_PARTS
    row_layout: gl.constexpr = gl.SliceLayout(1, tiles.s_layout)
    if tiles.HAS_OWN_ONES:
        row_sum = gl.convert_layout(gl.max(sums, 1), row_layout)
    elif tiles.HAS_ONES:
        column = gl.arange(0, tiles.E2, gl.SliceLayout(0, tiles.o2_layout))[None, :]
        # A sum of one value, which keeps NaN; a maximum would not.
        row_sum = gl.sum(gl.where(column == tiles.E2_COPIED, accs[PARTS], 0.0), 1)
        row_sum = gl.convert_layout(row_sum, row_layout)
    else:
        row_sum = gl.convert_layout(gl.sum(sums, 1), row_layout)
    reference = rows.reference * factor
    top = reference
    if tiles.HAS_SINKS:
        sink = gl.load(results.sink_ptr + job.head).to(gl.float32) * LOG2_E
        top = gl.maximum(reference, sink)
    top = gl.where(top == float("-inf"), 0.0, top)
    shrink = exp2(reference - top)
    denominator = row_sum * shrink
    if tiles.HAS_SINKS:
        denominator += exp2(sink - top + WEIGHT_BITS)
    v_scale = gl.load(results.v_scale_ptr + job.kv_head * results.v_scale_stride)
    share = gl.where(denominator == 0.0, 0.0, shrink / denominator) * v_scale
    index = gl.arange(0, ROWS, row_layout)
    token = job.batch.to(gl.int64) * results.num_tokens + job.q_token + row - job.first_row + index
    place = token * results.num_heads + job.head
    num_rows = job.q_len - row
    for i in gl.static_range(PARTS):
        out = shrunk(accs[i], share)
        _store(results.out_ptr, out, place, num_rows, i * tiles.WIDTH, tiles.HEAD_DIM)
    if tiles.E2 > 0:
        out = shrunk(accs[PARTS], share)
        _store(results.out_ptr, out, place, num_rows, tiles.E1, tiles.HEAD_DIM)
    lse = (gl.log2(denominator) - WEIGHT_BITS + top) * LN_2
    gl.store(results.lse_ptr + place, lse, mask=index < num_rows)


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
