"""decode_attention: a few query tokens of each sequence over its pages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.kernels.decode.config import (
    DecodeShape,
    default,
    default_gluon,
    objection,
    objection_to_gluon,
)
from octavo.kernels.device import Device, describe
from octavo.numerics.attention import AttentionSpec, parse_spec
from octavo.numerics.decode_plan import DecodePlan, PlanSettings
from octavo.ops.check import (
    check_float,
    check_one_device,
    check_out_dtype,
    check_query_over_pages,
    check_sinks,
)
from octavo.ops.plan_decode import (
    MAX_QUERY_TOKENS,
    PLANNED,
    decode_request,
    plan_decode,
    settings_for,
    shape_of,
)
from octavo.ops.register import as_contiguous, define
from octavo.ops.select import Request, find_run, register_impl, register_reference, select
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
    if plan is not None:
        impl = _check_plan(plan, q, view, spec, impl)
    result: Tensor = torch.ops.octavo.decode_attention(
        q,
        str(spec),
        check_out_dtype(out_dtype, q),
        view.tensors,
        sinks,
        [] if plan is None else [plan.items, plan.counters],
        [] if plan is None else plan.settings.numbers,
        impl,
    )
    return result


def _check_plan(
    plan: DecodePlan, q: Tensor, view: PagedView, spec: AttentionSpec, impl: str | None
) -> str:
    """The implementation the plan was made for; raise unless it was made for such a call."""
    if impl is not None and impl != plan.impl:
        raise ConfigError(f"expected a plan made for impl={impl!r}, got one for {plan.impl!r}")
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
    return plan.impl


def _run(
    q: Tensor,
    spec_text: str,
    out_dtype: torch.dtype,
    tensors: list[Tensor],
    sinks: Tensor | None,
    plan_tensors: list[Tensor],
    plan_numbers: list[int],
    impl: str | None,
) -> Tensor:
    spec = parse_spec(spec_text)
    view = PagedView(*tensors)
    request = decode_request(
        view, spec, num_heads=q.shape[2], dtype=q.dtype, has_sinks=sinks is not None
    )
    run = find_run(request, impl)
    plan = None
    if plan_tensors:
        items, counters = plan_tensors
        settings = PlanSettings.of_numbers(plan_numbers)
        plan = DecodePlan(items, counters, settings, select(request, impl).impl)
    options = {} if plan is None else {"plan": plan}
    result: Tensor = run(q, view, spec, sinks=as_contiguous(sinks), out_dtype=out_dtype, **options)
    return result


def _fake(q: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=out_dtype)


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


def _triton(q: Tensor, view: PagedView, spec: AttentionSpec, **options: Any) -> Tensor:
    from octavo.kernels.decode.triton import decode

    return _decode(decode, default, "triton", q, view, spec, **options)


def _gluon(q: Tensor, view: PagedView, spec: AttentionSpec, **options: Any) -> Tensor:
    from octavo.kernels.decode.gluon_sm89 import decode

    return _decode(decode, default_gluon, "gluon", q, view, spec, **options)


def _decode(
    decode: Callable[..., Tensor],
    choose: Callable[[DecodeShape, Device], object],
    impl: str,
    q: Tensor,
    view: PagedView,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    plan: DecodePlan | None = None,
) -> Tensor:
    """A kernel with the settings that `choose` gives it, and with a plan of its own if need be."""
    _, q_len, num_heads, _ = q.shape
    if plan is None:
        plan = plan_decode(view, spec, num_heads=num_heads, q_len=q_len, dtype=q.dtype, impl=impl)
    shape = shape_of(view, spec, num_heads=num_heads, q_len=q_len, dtype=q.dtype)
    config = choose(shape, describe(q.device))
    return decode(q, view, spec, plan, config, sinks=sinks, out_dtype=out_dtype)


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


define("decode_attention", _run, _fake, constants=("plan_numbers",))
register_reference("decode_attention", _reference)
register_impl(
    "decode_attention",
    "triton",
    _triton,
    objection=_triton_objection,
    reason="split over pages on any CUDA GPU",
    is_automatic=True,
)
register_impl(
    "decode_attention",
    "gluon",
    _gluon,
    objection=_gluon_objection,
    reason="pages straight to registers, at memory speed",
    is_automatic=True,
)
