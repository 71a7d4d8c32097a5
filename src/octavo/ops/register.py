"""octavo's operators in torch.library, so that torch.compile sees each as one node."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo.env import use_cache_dir
from octavo.errors import UnsupportedError

use_cache_dir()  # before any op imports its kernels
_LIBRARY = torch.library.Library("octavo", "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define octavo::<schema>; `fake` makes empty results of the right shapes for tracing."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _without_autocast(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    if "!" in schema:  # torch.library has no gradients for operators that write to their inputs
        _LIBRARY.impl(name, _without_gradient(name), "Autograd")
    else:
        torch.library.register_autograd(f"octavo::{name}", _no_gradient(name), lib=_LIBRARY)


def empty_result(q: Tensor, out_dtype: torch.dtype, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Empty (out, lse) of an attention call: lse has no elements unless it was asked for."""
    lse_shape = q.shape[:-1] if return_lse else torch.Size([0])
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape, dtype=torch.float32)


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as it is outside torch.autocast: an op's arguments say in what dtype it computes."""

    def call(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return run(*args)

    return call


def _no_gradient(name: str) -> Callable[..., NoReturn]:
    def backward(*_: object) -> NoReturn:
        raise UnsupportedError(
            f"octavo's {name} has no gradient: expected inference, got backward(); call it on "
            "detached tensors or under torch.no_grad()"
        )

    return backward


def _without_gradient(name: str) -> Callable[..., Any]:
    """Runs the operator below autograd; its results raise when a gradient reaches them."""

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return getattr(torch.ops.octavo, name)(*args)

        backward = staticmethod(_no_gradient(name))

    return NoGradient.apply
