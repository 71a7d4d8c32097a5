"""append_kv: new keys and values into the pages of a KV cache."""

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.kernels.append_kv.config import objection
from octavo.kernels.device import describe
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.rotary import Rotary
from octavo.ops.check import check_float, check_heads, check_one_device, check_scale
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_impl, register_reference
from octavo.reference.paged import append_kv as reference


def append_kv(
    view: PagedView,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    query: Tensor | None = None,
    rotary: Rotary | None = None,
    q_scale: Tensor | None = None,
    saturated: Tensor | None = None,
    impl: str | None = None,
) -> Tensor | None:
    """Write new keys and values into their pages, quantized as the cache is.

    key, value: [num_tokens, num_kv_heads, head_dim], bf16, fp16 or fp32; slots: [num_tokens] int64,
    page · page_size + offset (`view.slots`), negative for padding that is not written. No slot may
    come twice. Static scales are the view's own; scales per token and head are computed here and
    written beside the page.
    rotary: turns keys and queries first, in float32. query: [num_tokens, num_heads, head_dim]; with
    it the turned queries are returned, padding's too: in their own dtype, or in e4m3 with the
    q_scale, [] or [num_heads], that is given.
    saturated: int64 [2], to which the numbers of keys and values are added that lie beyond the
    range of their static scale, infinities among them; NaN and padding are not counted.
    """
    _check_new(view, key, value, slots)
    check_one_device(
        pages=view.key_pages,
        key=key,
        value=value,
        slots=slots,
        query=query,
        q_scale=q_scale,
        saturated=saturated,
    )
    if query is not None:
        _check_query(view, query, len(slots))
    if q_scale is not None:
        if query is None:
            raise ConfigError("q_scale quantizes the query: pass a query, or leave it out")
        check_scale("query", q_scale, PerHead() if q_scale.dim() else PerTensor(), query.shape)
    if rotary is not None:
        check_float("cos and sin", rotary.cos)
        check_one_device(key=key, cos=rotary.cos, sin=rotary.sin)
        rotary.check(len(key), key.shape[-1])
    if saturated is not None:
        _check_saturated(saturated)
    turned: Tensor = torch.ops.octavo.append_kv(
        view.tensors[:4],
        view.tensors[4:],
        key,
        value,
        slots,
        query,
        *((None, None) if rotary is None else (rotary.cos, rotary.sin)),
        rotary is not None and rotary.is_interleaved,
        q_scale,
        saturated,
        impl,
    )
    return None if query is None else turned


def _check_new(view: PagedView, key: Tensor, value: Tensor, slots: Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise ConfigError(
            f"expected int64 slots [num_tokens], got {slots.dtype} {list(slots.shape)}"
        )
    expected = (len(slots), view.num_kv_heads, view.head_dim)
    for name, x in (("key", key), ("value", value)):
        check_float(name, x)
        if tuple(x.shape) != expected:
            raise ConfigError(
                f"expected {name} of shape {list(expected)} [tokens, num_kv_heads, head_dim], got "
                f"{list(x.shape)}"
            )


def _check_saturated(saturated: Tensor) -> None:
    is_good = saturated.dtype == torch.int64 and tuple(saturated.shape) == (2,)
    if not is_good or not saturated.is_contiguous():
        raise ConfigError(
            f"expected saturated as contiguous int64 [2] (keys, values), got {saturated.dtype} "
            f"{list(saturated.shape)} with strides {list(saturated.stride())}"
        )


def _check_query(view: PagedView, query: Tensor, num_tokens: int) -> None:
    check_float("query", query)
    is_good = query.dim() == 3 and query.shape[0] == num_tokens
    if not is_good or query.shape[2] != view.head_dim:
        raise ConfigError(
            f"expected query of shape [{num_tokens}, num_heads, {view.head_dim}], got "
            f"{list(query.shape)}"
        )
    check_heads(query.shape[1], view.num_kv_heads)


def _run(
    pages_and_scales: list[Tensor],
    tables: list[Tensor],
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    query: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    is_interleaved: bool,
    q_scale: Tensor | None,
    saturated: Tensor | None,
    impl: str | None,
) -> Tensor:
    view = PagedView(*pages_and_scales, *tables)
    used = {
        "query": query is not None,
        "fp8-query": q_scale is not None,
        "rotary": cos is not None,
        "interleaved": is_interleaved,
        "saturated": saturated is not None,
    }
    request = Request(
        op="append_kv",
        device=describe(key.device),
        dtype=key.dtype,
        other_dtype=view.dtype,
        head_dim=view.head_dim,
        group=1 if query is None else query.shape[1] // view.num_kv_heads,
        page_size=view.page_size,
        granularity=str(view.scale_granularity),
        features=frozenset(name for name, is_used in used.items() if is_used),
    )
    rotary = None if cos is None or sin is None else Rotary(cos, sin, is_interleaved)
    turned: Tensor | None = find_run(request, impl)(
        view, key, value, slots, query=query, rotary=rotary, q_scale=q_scale, saturated=saturated
    )
    if turned is None:
        return key.new_empty(0)
    # An operator's result must not be one of its arguments, and has the strides that are promised.
    is_new = turned is not query and turned.is_contiguous()
    return turned if is_new else torch.clone(turned, memory_format=torch.contiguous_format)


def _fake(key: Tensor, query: Tensor | None, q_scale: Tensor | None) -> Tensor:
    if query is None:
        return key.new_empty(0)
    dtype = query.dtype if q_scale is None else E4M3.dtype
    return query.new_empty(query.shape, dtype=dtype)


define("append_kv", _run, _fake, writes=("pages_and_scales", "saturated"))


def _triton_objection(request: Request) -> str | None:
    return objection(
        request.device,
        request.head_dim,
        request.other_dtype,
        request.group,
        is_fp8_query="fp8-query" in request.features,
    )


register_reference("append_kv", reference)
register_impl(
    "append_kv",
    "triton",
    "octavo.kernels.append_kv.triton:append_kv",
    objection=_triton_objection,
    reason="rotary, casts and the scatter into pages in one launch",
    is_automatic=True,
)
