"""decode_attention: a few query tokens of each sequence over its pages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.kernels.decode.config import (
    DecodeShape,
    GluonConfig,
    TritonConfig,
    default,
    default_gluon,
    objection,
    objection_to_gluon,
)
from octavo.kernels.device import Device, describe
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.decode_plan import DecodePlan
from octavo.ops.arguments import Arguments
from octavo.ops.check import (
    check_exponentials,
    check_float,
    check_one_device,
    check_query_over_pages,
    check_sinks,
    result_dtype,
)
from octavo.ops.plan_decode import (
    MAX_QUERY_TOKENS,
    PLANNED,
    decode_request,
    plan_decode,
    settings_for,
    shape_of,
)
from octavo.ops.register import Operator, as_contiguous
from octavo.ops.select import Request, register_impl, register_reference
from octavo.reference.paged import paged_attention
from octavo.reference.softmax import kernel_rounding


def decode_attention(
    q: Tensor,
    view: PagedView,
    spec: AttentionSpec = AttentionSpec(causal=True),
    *,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    plan: DecodePlan | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of the newest 1 … 4 tokens of each sequence over all of its pages.

    q: [num_sequences, q_len, num_heads, head_dim] in bf16, fp16 or fp32: decoding reads FP8 pages
    but quantizes neither q nor P, since it is bound by memory. Query j of sequence i is token
    view.lengths[i] − q_len + j. A sequence of length 0 gives zeros (or what its sink leaves).
    plan: of this step, by `plan_decode`; without one, each call makes its own.
    """
    call = DecodeArguments(q, view, spec, sinks, out_dtype, plan, plan.impl if plan else impl)
    if plan is not None and impl not in (None, plan.impl):
        raise ConfigError(f"expected a plan made for impl={impl!r}, got one for {plan.impl!r}")
    result: Tensor = _OPERATOR(call)
    return result


@dataclass(eq=False)
class DecodeArguments(Arguments):
    """One call of `decode_attention`; impl: that of the plan, if there is one."""

    q: Tensor
    view: PagedView
    spec: AttentionSpec
    sinks: Tensor | None
    out_dtype: torch.dtype | None
    plan: DecodePlan | None
    impl: str | None

    def check(self) -> None:
        q, view = self.q, self.view
        if q.dim() != 4 or q.shape[0] != view.num_sequences:
            raise ConfigError(
                f"expected q [{view.num_sequences}, q_len, num_heads, head_dim], got "
                f"{list(q.shape)}"
            )
        if not 1 <= q.shape[1] <= MAX_QUERY_TOKENS:
            raise ConfigError(
                f"expected 1 to {MAX_QUERY_TOKENS} query tokens, got {q.shape[1]}: use "
                "prefill_attention for more"
            )
        check_float("q", q)
        check_query_over_pages(q, view, None)
        check_exponentials(self.spec, q)
        check_sinks(self.sinks, q.shape[2])
        check_one_device(q=q, pages=view.key_pages, sinks=self.sinks)
        if self.plan is not None:
            _check_plan(self.plan, q, view, self.spec)
        result_dtype(self.out_dtype, q.dtype)

    def request(self) -> Request:
        return decode_request(
            self.view,
            self.spec,
            num_heads=self.q.shape[2],
            dtype=self.q.dtype,
            has_sinks=self.sinks is not None,
        )

    def prepare(self) -> Callable[..., Any]:
        run = super().prepare()
        if run not in _DEFAULTS:
            return run
        _, q_len, num_heads, _ = self.q.shape
        shape = shape_of(self.view, self.spec, num_heads=num_heads, q_len=q_len, dtype=self.q.dtype)
        return partial(run, config=_DEFAULTS[run](shape, describe(self.q.device)))

    def run(self, run: Callable[..., Any]) -> Tensor:
        result: Tensor = run(
            self.q,
            self.view,
            self.spec,
            sinks=as_contiguous(self.sinks),
            out_dtype=result_dtype(self.out_dtype, self.q.dtype),
            **({} if self.plan is None else {"plan": self.plan}),
        )
        return result


def _check_plan(plan: DecodePlan, q: Tensor, view: PagedView, spec: AttentionSpec) -> None:
    """Raise unless the plan was made for such a call."""
    check_one_device(q=q, plan=plan.items)
    if plan.impl in PLANNED:
        _, q_len, num_heads, _ = q.shape
        expected = settings_for(
            plan.impl, view, spec, num_heads=num_heads, q_len=q_len, dtype=q.dtype
        )
        if plan.settings != expected:
            raise ConfigError(
                f"expected a plan made for {expected}, got one for {plan.settings}: make it by "
                "plan_decode with the same view, spec and queries"
            )
        # Batches of many sizes have the same settings; the counters tell them apart.
        programs = plan.settings.programs_per_item
        if len(plan.counters) != view.num_sequences * programs:
            raise ConfigError(
                f"expected a plan made for {view.num_sequences} sequences, got one for "
                f"{len(plan.counters) // programs}"
            )


def _fake(q: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return q.new_empty(q.shape, dtype=result_dtype(out_dtype, q.dtype))


def _reference(
    q: Tensor,
    view: PagedView,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    plan: DecodePlan | None = None,
) -> Tensor:
    """What every implementation of `decode_attention` takes and returns: out like q.

    plan: given only where the caller made one for this implementation.
    """
    num_sequences, q_len = q.shape[:2]
    ends = torch.arange(0, (num_sequences + 1) * q_len, q_len, dtype=torch.int32)
    rounding = kernel_rounding(q.dtype, spec)
    out, _ = paged_attention(q.flatten(0, 1), view, ends, spec, sinks=sinks, rounding=rounding)
    return out.view(q.shape).to(out_dtype)


def _triton(
    q: Tensor, view: PagedView, spec: AttentionSpec, *, config: TritonConfig, **options: Any
) -> Tensor:
    from octavo.kernels.decode.triton import decode

    plan = _plan("triton", q, view, spec, options)
    return decode(q, view, spec, plan, config, **options)


def _gluon(
    q: Tensor, view: PagedView, spec: AttentionSpec, *, config: GluonConfig, **options: Any
) -> Tensor:
    from octavo.kernels.decode.gluon_sm89 import decode

    plan = _plan("gluon", q, view, spec, options)
    return decode(q, view, spec, plan, config, **options)


# The launch settings of octavo's kernels.
_DEFAULTS: dict[Callable[..., Any], Callable[[DecodeShape, Device], object]] = {
    _triton: default,
    _gluon: default_gluon,
}


def _plan(
    impl: str, q: Tensor, view: PagedView, spec: AttentionSpec, options: dict[str, Any]
) -> DecodePlan:
    """The plan among the options of a call, taken out of them, or one of its own."""
    plan: DecodePlan | None = options.pop("plan", None)
    if plan is not None:
        return plan
    _, q_len, num_heads, _ = q.shape
    return plan_decode(view, spec, num_heads=num_heads, q_len=q_len, dtype=q.dtype, impl=impl)


def _triton_objection(request: Request) -> str | None:
    return objection(request.device, head_dim=request.head_dim)


def _gluon_objection(request: Request) -> str | None:
    return objection_to_gluon(
        request.device,
        q_dtype=request.dtype,
        page_dtype=request.other_dtype,
        head_dim=request.head_dim,
        page_size=request.page_size,
    )


_OPERATOR = Operator("decode_attention", DecodeArguments, _fake)
register_reference("decode_attention", _reference)
register_impl(
    "decode_attention",
    "triton",
    _triton,
    objection=_triton_objection,
    reason="split over pages on any CUDA GPU",
    is_automatic=True,
    is_repeatable=True,
)
register_impl(
    "decode_attention",
    "gluon",
    _gluon,
    objection=_gluon_objection,
    reason="pages straight to registers, at memory speed",
    is_automatic=True,
    is_repeatable=True,
)
