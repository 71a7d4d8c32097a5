"""prefill_attention: the newest tokens of each sequence over its pages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.prefill.config import objection
from octavo.numerics.attention import AttentionSpec
from octavo.ops.arguments import Arguments
from octavo.ops.attention import objection_to_codes, objection_to_gluon
from octavo.ops.check import (
    check_cu_seqlens,
    check_exponentials,
    check_one_device,
    check_query_over_pages,
    check_sinks,
    empty_result,
    result_dtype,
)
from octavo.ops.register import Operator, as_contiguous
from octavo.ops.select import Request, features_of, register_impl, register_reference
from octavo.reference.paged import paged_attention
from octavo.reference.softmax import kernel_rounding


@overload
def prefill_attention(
    q: Tensor,
    view: PagedView,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    spec: AttentionSpec = ...,
    q_scale: Tensor | None = ...,
    *,
    sinks: Tensor | None = ...,
    num_cached_tokens: int | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
    impl: str | None = ...,
) -> Tensor: ...


@overload
def prefill_attention(
    q: Tensor,
    view: PagedView,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    spec: AttentionSpec = ...,
    q_scale: Tensor | None = ...,
    *,
    sinks: Tensor | None = ...,
    num_cached_tokens: int | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    impl: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def prefill_attention(
    q: Tensor,
    view: PagedView,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    spec: AttentionSpec = AttentionSpec(causal=True),
    q_scale: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    num_cached_tokens: int | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each sequence over all of its pages, theirs included.

    q: packed [num_tokens, num_heads, head_dim]; sequence i is cu_seqlens_q[i] … cu_seqlens_q[i + 1]
    and its last query is the last of its view.lengths[i] tokens. FP8 queries need the q_scale they
    were quantized with, [] or [num_heads], and make the whole attention FP8; with bf16, fp16 or
    fp32 queries FP8 pages are dequantized. max_seqlen_q: an upper bound of the query lengths.
    num_cached_tokens: an upper bound of the sum of view.lengths, for which kernels make room
    without asking the device; left out, all that the page table has room for.
    return_lse: also the log of the softmax denominator, float32 [num_tokens, num_heads].
    """
    call = PrefillArguments(
        q,
        view,
        cu_seqlens_q,
        max_seqlen_q,
        spec,
        q_scale,
        sinks,
        num_cached_tokens,
        out_dtype,
        return_lse,
        impl,
    )
    out, lse = _OPERATOR(call)
    return (out, lse) if return_lse else out


@dataclass(eq=False)
class PrefillArguments(Arguments):
    """One call of `prefill_attention`."""

    q: Tensor
    view: PagedView
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    spec: AttentionSpec
    q_scale: Tensor | None
    sinks: Tensor | None
    num_cached_tokens: int | None
    out_dtype: torch.dtype | None
    return_lse: bool
    impl: str | None

    def check(self) -> None:
        q, view, cu_seqlens_q = self.q, self.view, self.cu_seqlens_q
        if q.dim() != 3:
            raise ConfigError(f"expected q [num_tokens, num_heads, head_dim], got {list(q.shape)}")
        check_query_over_pages(q, view, self.q_scale)
        check_exponentials(self.spec, q)
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
        if len(cu_seqlens_q) != view.num_sequences + 1:
            raise ConfigError(
                f"expected cu_seqlens_q of length {view.num_sequences + 1} for "
                f"{view.num_sequences} sequences, got {len(cu_seqlens_q)}"
            )
        if self.num_cached_tokens is not None and self.num_cached_tokens < 0:
            raise ConfigError(
                f"num_cached_tokens must not be negative, got {self.num_cached_tokens}"
            )
        check_sinks(self.sinks, q.shape[1])
        check_one_device(
            q=q,
            pages=view.key_pages,
            cu_seqlens_q=cu_seqlens_q,
            q_scale=self.q_scale,
            sinks=self.sinks,
        )
        result_dtype(self.out_dtype, q.dtype)

    def request(self) -> Request:
        view = self.view
        return Request(
            op="prefill_attention",
            device=describe(self.q.device),
            dtype=self.q.dtype,
            other_dtype=view.dtype,
            head_dim=view.head_dim,
            group=self.q.shape[-2] // view.num_kv_heads,
            page_size=view.page_size,
            granularity=str(view.scale_granularity),
            features=features_of(self.spec, sinks=self.sinks is not None, lse=self.return_lse),
        )

    def run(self, run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        view, num_cached_tokens = _with_contiguous_scales(self.view), self.num_cached_tokens
        if num_cached_tokens is None:
            num_cached_tokens = view.num_sequences * view.max_pages * view.page_size
        out, lse = run(
            self.q,
            view,
            self.cu_seqlens_q.contiguous(),
            self.max_seqlen_q,
            self.spec,
            as_contiguous(self.q_scale),
            sinks=as_contiguous(self.sinks),
            out_dtype=result_dtype(self.out_dtype, self.q.dtype),
            num_cached_tokens=num_cached_tokens,
        )
        return out, lse if self.return_lse else self.q.new_empty(0, dtype=torch.float32)


def _with_contiguous_scales(view: PagedView) -> PagedView:
    if view.key_scale.is_contiguous() and view.value_scale.is_contiguous():
        return view
    key_scale, value_scale = view.key_scale.contiguous(), view.value_scale.contiguous()
    return replace(view, key_scale=key_scale, value_scale=value_scale)


def _reference(
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
) -> tuple[Tensor, Tensor]:
    """What every implementation of `prefill_attention` takes and returns: (out, lse)."""
    rounding = kernel_rounding(q.dtype, spec)
    out, lse = paged_attention(q, view, cu_seqlens_q, spec, q_scale, sinks=sinks, rounding=rounding)
    return out.to(out_dtype), lse


_OPERATOR = Operator("prefill_attention", PrefillArguments, empty_result)


def _triton_objection(request: Request) -> str | None:
    found = objection(request.device, request.dtype, request.other_dtype, request.head_dim)
    return found or objection_to_codes(request)


def _gluon_objection(request: Request) -> str | None:
    features = request.features | {"transposed"}  # as values are gathered
    return objection_to_gluon(replace(request, features=features))


register_reference("prefill_attention", _reference)
register_impl(
    "prefill_attention",
    "triton",
    "octavo.kernels.prefill.triton:prefill",
    objection=_triton_objection,
    reason="pages gathered once, then tiles on tensor cores",
    is_automatic=True,
    is_repeatable=True,
)
register_impl(
    "prefill_attention",
    "gluon",
    "octavo.kernels.prefill.gluon_sm90:prefill",
    objection=_gluon_objection,
    reason="pages gathered once, then Hopper's attention kernel",
    is_automatic=True,
    is_repeatable=True,
)
