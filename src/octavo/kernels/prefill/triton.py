"""Prefill over pages: gather keys and values into the layout of the attention kernel, then attend.

Gathering costs time and memory that grow with the tokens, attention's time with their product; and
only gathered values can lie transposed, as FP8 tensor cores want them.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.kernels.attention.triton import attention
from octavo.kernels.launch import launch
from octavo.kernels.prefill.config import GatherConfig
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import is_fp8
from octavo.numerics.granularity import PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.value_layout import ValueLayout, num_columns

Attend = Callable[..., tuple[Tensor, Tensor]]


@triton.jit
def _first_token(lengths_ptr, sequence):
    """How many tokens the sequences before this one have."""
    total = tl.zeros([128], tl.int32)
    for start in range(0, sequence, 128):
        index = start + tl.arange(0, 128)
        total += tl.load(lengths_ptr + index, mask=index < sequence, other=0)
    return tl.sum(total, axis=0)


@triton.jit
def _load_pages(
    pages_ptr,
    table_ptr,
    token,
    length,
    dim,
    page_stride,
    token_stride,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """[tokens, dims] of one head, zeros past the sequence's length."""
    is_token = token < length
    page = tl.load(table_ptr + token // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
    row = pages_ptr + page * page_stride + (token % PAGE_SIZE) * token_stride
    mask = is_token[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(row[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def _gather_scale(scale_ptr, out_ptr, table_ptr, token, length, place, head, PAGE_SIZE, num_heads):
    """The scale of each token and head, from beside the page to beside the token."""
    is_token = token < length
    page = tl.load(table_ptr + token // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
    source = scale_ptr + (page * num_heads + head) * PAGE_SIZE + token % PAGE_SIZE
    scale = tl.load(source, mask=is_token, other=0.0)
    tl.store(out_ptr + place * num_heads + head, scale, mask=is_token)


@triton.jit(do_not_specialize=["num_blocks", "num_tokens"])
def _gather_kernel(
    key_pages_ptr,
    value_pages_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    lengths_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cu_seqlens_ptr,
    table_stride,
    key_page_stride,
    key_head_stride,
    key_token_stride,
    value_page_stride,
    value_head_stride,
    value_token_stride,
    row_stride,
    num_blocks,
    num_heads,
    num_tokens,
    num_columns,
    IS_TRANSPOSED: tl.constexpr,
    IS_PER_TOKEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Some tokens of one sequence and KV head; its first program says where the sequence ends.

    Tokens beyond the room that was made for them are dropped, never written past its end.
    """
    # One axis: the others end at 65535, which sequences may exceed.
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % num_heads
    sequence = tl.program_id(0) // num_blocks // num_heads
    first = tl.minimum(_first_token(lengths_ptr, sequence), num_tokens)
    length = tl.minimum(tl.load(lengths_ptr + sequence), num_tokens - first)
    if block == 0 and head == 0:
        tl.store(cu_seqlens_ptr + sequence + 1, first + length)
        if sequence == 0:
            tl.store(cu_seqlens_ptr, 0)
    start = block * BLOCK
    if start >= length:
        return
    table_ptr += sequence.to(tl.int64) * table_stride
    key_pages_ptr += head.to(tl.int64) * key_head_stride
    value_pages_ptr += head.to(tl.int64) * value_head_stride
    in_tile = tl.arange(0, BLOCK)
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    token = start + in_tile
    place = first.to(tl.int64) + token
    row = (place * num_heads + head) * row_stride
    mask = (token < length)[:, None] & is_dim[None, :]
    k = _load_pages(
        key_pages_ptr,
        table_ptr,
        token,
        length,
        dim,
        key_page_stride,
        key_token_stride,
        PAGE_SIZE,
        HEAD_DIM,
    )
    tl.store(k_ptr + row[:, None] + dim[None, :], k.to(k_ptr.dtype.element_ty), mask=mask)
    # Column 4t + 2g + e of every 16 holds key 8g + 2t + e.
    source = token
    if IS_TRANSPOSED:
        source = start + in_tile // 16 * 16 + in_tile // 2 % 2 * 8 + in_tile // 4 % 4 * 2
        source += in_tile % 2
    v = _load_pages(
        value_pages_ptr,
        table_ptr,
        source,
        length,
        dim,
        value_page_stride,
        value_token_stride,
        PAGE_SIZE,
        HEAD_DIM,
    ).to(v_ptr.dtype.element_ty)
    if IS_TRANSPOSED:
        column = (first + 16 * sequence) // 16 * 16 + token
        is_column = token < (length + 15) // 16 * 16
        places = (head.to(tl.int64) * HEAD_DIM + dim)[:, None] * num_columns + column[None, :]
        tl.store(v_ptr + places, tl.trans(v), mask=is_dim[:, None] & is_column[None, :])
    else:
        tl.store(v_ptr + row[:, None] + dim[None, :], v, mask=mask)
    if IS_PER_TOKEN:
        _gather_scale(
            key_scale_ptr, k_scale_ptr, table_ptr, token, length, place, head, PAGE_SIZE, num_heads
        )
        _gather_scale(
            value_scale_ptr,
            v_scale_ptr,
            table_ptr,
            token,
            length,
            place,
            head,
            PAGE_SIZE,
            num_heads,
        )


def gather(
    view: PagedView,
    dtype: torch.dtype,
    value_layout: ValueLayout,
    num_tokens: int,
    config: GatherConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(k, v, k_scale, v_scale, cu_seqlens) of all sequences, packed, in `dtype`.

    num_tokens: room for all of them. Keys have rows of head_dim rounded up to 16, so that each
    starts aligned.
    """
    config = config or GatherConfig()
    device, heads, head_dim = view.device, view.num_kv_heads, view.head_dim
    row = -(-head_dim // 16) * 16
    k = torch.empty(num_tokens, heads, row, dtype=dtype, device=device)[..., :head_dim]
    is_transposed = value_layout == "transposed"
    columns = num_columns(num_tokens, view.num_sequences)
    if is_transposed:
        v = torch.empty(heads, head_dim, columns, dtype=dtype, device=device)
    else:
        v = torch.empty(num_tokens, heads, row, dtype=dtype, device=device)[..., :head_dim]
    k_scale, v_scale = view.key_scale, view.value_scale
    is_per_token = isinstance(view.scale_granularity, PerToken)
    if is_per_token:
        k_scale, v_scale = (
            torch.empty(num_tokens, heads, dtype=torch.float32, device=device) for _ in range(2)
        )
    cu_seqlens = torch.empty(view.num_sequences + 1, dtype=torch.int32, device=device)
    num_blocks = max(1, triton.cdiv(view.max_pages * view.page_size, config.block_tokens))
    launch(
        _gather_kernel,
        (num_blocks * heads * view.num_sequences,),
        view.key_pages,
        view.value_pages,
        view.key_scale,
        view.value_scale,
        view.page_table,
        view.lengths,
        k,
        v,
        k_scale,
        v_scale,
        cu_seqlens,
        view.page_table.stride(0),
        view.key_pages.stride(0),
        view.key_pages.stride(1),
        view.key_pages.stride(2),
        view.value_pages.stride(0),
        view.value_pages.stride(1),
        view.value_pages.stride(2),
        row,
        num_blocks,
        heads,
        num_tokens,
        columns,
        IS_TRANSPOSED=is_transposed,
        IS_PER_TOKEN=is_per_token,
        PAGE_SIZE=view.page_size,
        HEAD_DIM=head_dim,
        BLOCK=config.block_tokens,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=config.num_warps,
    )
    return k, v, k_scale, v_scale, cu_seqlens


def prefill(
    q: Tensor,
    view: PagedView,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    spec: AttentionSpec,
    q_scale: Tensor | None,
    *,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    num_cached_tokens: int,
    attend: Attend = attention,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as `octavo.reference.paged` defines them; attend: the attention kernel.

    FP8 pages stay FP8 beside FP8 queries; beside others their values, which bf16 holds exactly,
    take on the queries' dtype, and the scales act as in FP8. Queries and other pages of two dtypes
    meet in float32.
    """
    if view.num_sequences == 0:
        out = q.new_zeros(q.shape, dtype=out_dtype)  # contiguous, whatever q is
        return out, q.new_zeros(q.shape[:-1], dtype=torch.float32)
    fp8 = is_fp8(q.dtype)
    value_layout: ValueLayout = "transposed" if fp8 else "rows"
    if not view.is_fp8 and view.dtype != q.dtype:
        q = q.float()  # neither dtype holds the other's values
    dtype = view.dtype if fp8 else q.dtype
    k, v, k_scale, v_scale, cu_seqlens_k = gather(view, dtype, value_layout, num_cached_tokens)
    q_scale = torch.ones((), device=q.device) if q_scale is None else q_scale
    max_seqlen_k = view.max_pages * view.page_size
    return attend(
        q,
        k,
        v,
        spec,
        QkvScales(q_scale, k_scale, v_scale),
        packing=Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        sinks=sinks,
        key_mask=None,
        out_dtype=out_dtype,
        value_layout=value_layout,
    )
