"""octavo's operators in torch.library, so that torch.compile sees each as one node."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo.env import use_cache_dir, use_fused_products
from octavo.errors import UnsupportedError
from octavo.internals import internals, require

with internals("torch"):
    from torch._C import DispatchKey, DispatchKeySet, _AutoDispatchBelowAutograd, _DisableAutocast

require("torch._C.DispatchKey")

# Before any op imports its kernels.
use_cache_dir()
use_fused_products()
_LIBRARY = torch.library.Library("octavo", "DEF")
_NOTHING = nullcontext()
# What torch has between autograd and an implementation, for some tensors: it notes a call, finds
# shapes of results, or makes a plain tensor of one that is none, such as one whose sign is to come.
_BETWEEN = DispatchKeySet(DispatchKey.Python)
for _key in (
    DispatchKey.Functionalize,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.Negative,
    DispatchKey.Conjugate,
    DispatchKey.ZeroTensor,
):
    _BETWEEN |= DispatchKeySet(_key)


def define(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    writes: Sequence[str] = (),
    constants: Sequence[str] = (),
) -> None:
    """Define octavo::<name> with the signature of `run`.

    fake: makes empty results of the right shapes for tracing; it takes the parameters of `run` that
    it names. writes: parameters that `run` writes into. constants: integers that a traced graph is
    made for; others may vary.
    """
    schema = torch.library.infer_schema(run, mutates_args=writes)
    for constant in constants:
        schema = re.sub(rf"SymInt((?:\[\])? {constant}\b)", r"int\1", schema)
    _LIBRARY.define(name + schema)
    guarded = _guarded(run)
    _LIBRARY.impl(name, guarded, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", _choosing(run, fake), lib=_LIBRARY)
    no_gradient = _without_gradient(name)
    _LIBRARY.impl(name, no_gradient, "Autograd")
    for key in ("AutogradCPU", "AutogradCUDA"):
        _LIBRARY.impl(name, _directly(guarded, no_gradient), key, with_keyset=True)


def _choosing(run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake` as a function of all that `run` takes."""
    names = list(signature(run).parameters)
    places = [names.index(name) for name in signature(fake).parameters]
    return lambda *args: fake(*(args[place] for place in places))


def empty_result(q: Tensor, out_dtype: torch.dtype, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Empty (out, lse) of an attention call: lse has no elements unless it was asked for."""
    lse_shape = q.shape[:-1] if return_lse else torch.Size([0])
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape, dtype=torch.float32)


def as_contiguous(x: Tensor | None) -> Tensor | None:
    """A small operand as implementations get it: whatever its strides were, one after the other."""
    return None if x is None else x.contiguous()


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` outside torch.autocast, on the GPU of its arguments, which say dtypes and place."""

    def call(*args: Any) -> Any:
        with _DisableAutocast(), on_device_of(args):
            return run(*args)

    return call


def on_device_of(args: Sequence[object]) -> AbstractContextManager[object]:
    """The GPU of the first tensor as the current one, on which Triton launches its kernels."""
    for arg in args:
        first = arg[0] if isinstance(arg, list) and arg else arg
        if isinstance(first, Tensor):
            if first.is_cuda and first.device.index != torch.cuda.current_device():
                return torch.cuda.device(first.device)
            break
    return _NOTHING


def _without_gradient(name: str) -> Callable[..., Any]:
    """The operator as autograd sees it: its results raise when a gradient reaches them."""

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, args: tuple[Any, ...], *tensors: Tensor) -> Any:
            with _AutoDispatchBelowAutograd():
                return getattr(torch.ops.octavo, name)(*args)

        @staticmethod
        def backward(ctx: Any, *_: object) -> NoReturn:
            raise UnsupportedError(
                f"octavo's {name} has no gradient: expected inference, got backward(); call it on "
                "detached tensors or under torch.no_grad()"
            )

    def call(*args: Any) -> Any:
        # torch looks for gradients in arguments, not in lists of them.
        tensors = [x for x in _flat(args) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return NoGradient.apply(args, *tensors)  # type: ignore[no-untyped-call]
        with _AutoDispatchBelowAutograd():
            return getattr(torch.ops.octavo, name)(*args)

    return call


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    for arg in args:
        yield from arg if isinstance(arg, list) else (arg,)


def _directly(run: Callable[..., Any], no_gradient: Callable[..., Any]) -> Callable[..., Any]:
    """What torch would call below autograd, without asking it: that would cost the host time."""

    def call(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() or (keys & _BETWEEN).raw_repr():
            return no_gradient(*args)
        with _AutoDispatchBelowAutograd():
            return run(*args)

    return call
