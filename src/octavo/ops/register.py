"""octavo's operators in torch.library, so that torch.compile sees each as one node."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo.errors import UnsupportedError

_LIBRARY = torch.library.Library("octavo", "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define octavo::<schema>; `fake` makes empty results of the right shapes for tracing."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    if "!" not in schema:
        torch.library.register_autograd(f"octavo::{name}", _no_gradient(name), lib=_LIBRARY)


def empty_result(q: Tensor, out_dtype: torch.dtype, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Empty (out, lse) of an attention call: lse has no elements unless it was asked for."""
    lse_shape = q.shape[:-1] if return_lse else torch.Size([0])
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape, dtype=torch.float32)


def _no_gradient(name: str) -> Callable[..., NoReturn]:
    def backward(*_: object) -> NoReturn:
        raise UnsupportedError(
            f"octavo's {name} has no gradient: expected inference, got backward(); call it on "
            "detached tensors or under torch.no_grad()"
        )

    return backward
