"""decode_attention: a few query tokens of each sequence over its pages."""

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.numerics.attention import AttentionSpec, parse_spec
from octavo.ops.check import (
    check_float,
    check_one_device,
    check_out_dtype,
    check_query_over_pages,
    check_sinks,
)
from octavo.ops.register import define
from octavo.ops.select import Request, features_of, find_run, register_reference
from octavo.reference.paged import paged_attention
from octavo.reference.softmax import kernel_rounding

MAX_QUERY_TOKENS = 4


def decode_attention(
    q: Tensor,
    view: PagedView,
    spec: AttentionSpec = AttentionSpec(causal=True),
    *,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of the newest 1 … 4 tokens of each sequence over all of its pages.

    q: [num_sequences, q_len, num_heads, head_dim] in bf16, fp16 or fp32: decoding reads FP8 pages
    but quantizes neither q nor P, since it is bound by memory. Query j of sequence i is token
    view.lengths[i] − q_len + j. A sequence of length 0 gives zeros (or what its sink leaves).
    """
    if q.dim() != 4 or q.shape[0] != view.num_sequences:
        raise ConfigError(
            f"expected q [{view.num_sequences}, q_len, num_heads, head_dim], got {list(q.shape)}"
        )
    if not 1 <= q.shape[1] <= MAX_QUERY_TOKENS:
        raise ConfigError(
            f"expected 1 to {MAX_QUERY_TOKENS} query tokens, got {q.shape[1]}: use "
            "prefill_attention for more"
        )
    check_float("q", q)
    check_query_over_pages(q, view, None)
    check_sinks(sinks, q.shape[2])
    check_one_device(q=q, pages=view.key_pages, sinks=sinks)
    result: Tensor = torch.ops.octavo.decode_attention(
        q,
        str(spec),
        check_out_dtype(out_dtype, q),
        view.tensors,
        sinks,
        impl,
    )
    return result


def _run(
    q: Tensor,
    spec_text: str,
    out_dtype: torch.dtype,
    tensors: list[Tensor],
    sinks: Tensor | None,
    impl: str | None,
) -> Tensor:
    spec = parse_spec(spec_text)
    view = PagedView(*tensors)
    request = Request(
        op="decode_attention",
        device=describe(q.device),
        dtype=q.dtype,
        other_dtype=view.dtype,
        head_dim=view.head_dim,
        group=q.shape[-2] // view.num_kv_heads,
        page_size=view.page_size,
        granularity=str(view.scale_granularity),
        features=features_of(spec, sinks=sinks is not None),
    )
    result: Tensor = find_run(request, impl)(q, view, spec, sinks=sinks, out_dtype=out_dtype)
    return result


def _fake(q: Tensor, spec_text: str, out_dtype: torch.dtype, *rest: object) -> Tensor:
    return q.new_empty(q.shape, dtype=out_dtype)


def _reference(
    q: Tensor,
    view: PagedView,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """What every implementation of `decode_attention` takes and returns: out like q."""
    num_sequences, q_len = q.shape[:2]
    ends = torch.arange(0, (num_sequences + 1) * q_len, q_len, dtype=torch.int32)
    rounding = kernel_rounding(q.dtype, spec)
    out, _ = paged_attention(q.flatten(0, 1), view, ends, spec, sinks=sinks, rounding=rounding)
    return out.view(q.shape).to(out_dtype)


define(
    "decode_attention(Tensor q, str spec, ScalarType out_dtype, Tensor[] view, Tensor? sinks, "
    "str? impl) -> Tensor",
    _run,
    _fake,
)
register_reference("decode_attention", _reference)
