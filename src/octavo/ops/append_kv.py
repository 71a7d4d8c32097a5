"""append_kv: new keys and values into the pages of a KV cache."""

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.ops.check import check_float, check_one_device
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_reference
from octavo.reference.paged import append_kv as reference


def append_kv(
    view: PagedView, key: Tensor, value: Tensor, slots: Tensor, *, impl: str | None = None
) -> None:
    """Write new keys and values into their pages, quantized as the cache is.

    key, value: [num_tokens, num_kv_heads, head_dim], bf16, fp16 or fp32; slots: [num_tokens] int64,
    page · page_size + offset (`view.slots`), negative for padding that is not written. No slot may
    come twice. Static scales are the view's own; scales per token and head are computed here and
    written beside the page.
    """
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
    check_one_device(pages=view.key_pages, key=key, value=value, slots=slots)
    torch.ops.octavo.append_kv(
        view.tensors[:4],
        view.tensors[4:],
        key,
        value,
        slots,
        impl,
    )


def _run(
    pages_and_scales: list[Tensor],
    tables: list[Tensor],
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    impl: str | None,
) -> None:
    view = PagedView(*pages_and_scales, *tables)
    request = Request(
        op="append_kv",
        device=describe(key.device),
        dtype=key.dtype,
        other_dtype=view.dtype,
        head_dim=view.head_dim,
        page_size=view.page_size,
        granularity=str(view.scale_granularity),
    )
    find_run(request, impl)(view, key, value, slots)


def _fake(*args: object) -> None:
    return None


define(
    "append_kv(Tensor(a!)[] pages_and_scales, Tensor[] tables, Tensor key, Tensor value, "
    "Tensor slots, str? impl) -> ()",
    _run,
    _fake,
)
register_reference("append_kv", reference)
