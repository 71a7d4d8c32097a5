"""append_kv: new keys and values into the pages of a KV cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.kernels.append_kv.config import objection
from octavo.kernels.device import describe
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.rotary import Rotary
from octavo.ops.arguments import Arguments
from octavo.ops.check import check_float, check_heads, check_one_device, check_scale
from octavo.ops.register import Operator
from octavo.ops.select import Request, register_impl, register_reference
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
    turned: Tensor = _OPERATOR(
        AppendArguments(view, key, value, slots, query, rotary, q_scale, saturated, impl)
    )
    return None if query is None else turned


@dataclass(eq=False)
class AppendArguments(Arguments):
    """One call of `append_kv`."""

    view: PagedView
    key: Tensor
    value: Tensor
    slots: Tensor
    query: Tensor | None
    rotary: Rotary | None
    q_scale: Tensor | None
    saturated: Tensor | None
    impl: str | None

    def check(self) -> None:
        view, key, query, q_scale = self.view, self.key, self.query, self.q_scale
        _check_new(view, key, self.value, self.slots)
        check_one_device(
            pages=view.key_pages,
            key=key,
            value=self.value,
            slots=self.slots,
            query=query,
            q_scale=q_scale,
            saturated=self.saturated,
        )
        if query is not None:
            _check_query(view, query, len(self.slots))
        if q_scale is not None:
            if query is None:
                raise ConfigError("q_scale quantizes the query: pass a query, or leave it out")
            check_scale("query", q_scale, PerHead() if q_scale.dim() else PerTensor(), query.shape)
        if (rotary := self.rotary) is not None:
            check_float("cos and sin", rotary.cos)
            check_one_device(key=key, cos=rotary.cos, sin=rotary.sin)
            rotary.check(len(key), key.shape[-1])
        if self.saturated is not None:
            _check_saturated(self.saturated)

    def request(self) -> Request:
        view, query, rotary = self.view, self.query, self.rotary
        used = {
            "query": query is not None,
            "fp8-query": self.q_scale is not None,
            "rotary": rotary is not None,
            "interleaved": rotary is not None and rotary.is_interleaved,
            "saturated": self.saturated is not None,
        }
        return Request(
            op="append_kv",
            device=describe(self.key.device),
            dtype=self.key.dtype,
            other_dtype=view.dtype,
            head_dim=view.head_dim,
            group=1 if query is None else query.shape[1] // view.num_kv_heads,
            page_size=view.page_size,
            granularity=str(view.scale_granularity),
            features=frozenset(name for name, is_used in used.items() if is_used),
        )

    def run(self, run: Callable[..., Any]) -> Tensor:
        turned: Tensor | None = run(
            self.view,
            self.key,
            self.value,
            self.slots,
            query=self.query,
            rotary=self.rotary,
            q_scale=self.q_scale,
            saturated=self.saturated,
        )
        if turned is None:
            return self.key.new_empty(0)
        # An operator's result is none of its arguments, and has the strides that are promised.
        is_new = turned is not self.query and turned.is_contiguous()
        return turned if is_new else torch.clone(turned, memory_format=torch.contiguous_format)


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


def _fake(key: Tensor, query: Tensor | None, q_scale: Tensor | None) -> Tensor:
    if query is None:
        return key.new_empty(0)
    dtype = query.dtype if q_scale is None else E4M3.dtype
    return query.new_empty(query.shape, dtype=dtype)


_OPERATOR = Operator(
    "append_kv",
    AppendArguments,
    _fake,
    writes=(
        "view_key_pages",
        "view_value_pages",
        "view_key_scale",
        "view_value_scale",
        "saturated",
    ),
)


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
    is_repeatable=True,
)
