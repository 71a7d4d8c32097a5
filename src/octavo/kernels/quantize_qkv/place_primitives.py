"""Where values of q, k and v lie.

`part`: (memory, num_tokens, num_heads, length of one sequence). `memory`: (pointer, strides of
batch, token and head, `first`, num_first). `first`: pointer and strides of the num_first tokens
that every sequence starts with, if they lie elsewhere; otherwise its pointer is None. SHAPE is that
of `primitives`.
"""

import triton
import triton.language as tl


@triton.jit
def place(part, token, heads, unit, SHAPE: tl.constexpr):
    """Pointers [tokens, units] into q, k or v.

    Strides count ALIGN values, so that the compiler sees how wide its loads can be.
    """
    memory, _, _, length = part
    x_ptr, batch_stride, token_stride, head_stride, first, _ = memory
    ALIGN: tl.constexpr = SHAPE[2]
    HAS_BATCH: tl.constexpr = SHAPE[3]
    if first[0] is not None:
        return place_streams(part, token, heads, unit, SHAPE)
    if HAS_BATCH:
        batch, offset = (token // length).to(tl.int64), (token % length).to(tl.int64)
        row = batch * batch_stride + offset * token_stride
    else:
        row = token.to(tl.int64) * token_stride
    column = heads.to(tl.int64) * head_stride * ALIGN + unit
    return x_ptr + (row * ALIGN)[:, None] + column[None, :]


@triton.jit
def place_streams(part, token, heads, unit, SHAPE: tl.constexpr):
    """As `place`, where the first tokens of each sequence are those of another tensor.

    What differs is chosen for each token, so that values of a head still lie side by side.
    """
    memory, _, _, length = part
    x_ptr, batch_stride, token_stride, head_stride, first, num_first = memory
    first_ptr, first_batch_stride, first_token_stride, first_head_stride = first
    ALIGN: tl.constexpr = SHAPE[2]
    HAS_BATCH: tl.constexpr = SHAPE[3]
    offset = token % length if HAS_BATCH else token
    is_first = offset < num_first
    offset = tl.where(is_first, offset, offset - num_first).to(tl.int64)
    row = offset * tl.where(is_first, first_token_stride, token_stride)
    if HAS_BATCH:
        batch = (token // length).to(tl.int64)
        row += batch * tl.where(is_first, first_batch_stride, batch_stride)
    at = tl.where(is_first, first_ptr, x_ptr) + row * ALIGN
    head = tl.where(is_first, first_head_stride, head_stride).to(tl.int64)
    column = heads[None, :] * head[:, None] * ALIGN + unit[None, :]
    return at[:, None] + column


@triton.jit
def place_behind(at, step, place_of, SHAPE: tl.constexpr, NUM: tl.constexpr):
    """Pointers to the tokens NUM behind those that `place` gave for `place_of`, a step apart.

    They are of the same sequences; where its first tokens lie elsewhere, each has its own place.
    """
    part, token, heads, unit = place_of
    _, _, _, _, first, _ = part[0]
    if first[0] is None:
        return at + step * NUM
    else:
        return place(part, token + NUM, heads, unit, SHAPE)
