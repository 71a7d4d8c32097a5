"""octavo's operators in torch.library, so that torch.compile sees each as one node."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, NamedTuple, NoReturn, get_args, get_type_hints

import torch
from torch import Tensor

from octavo.env import use_cache_dir, use_fused_products
from octavo.errors import UnsupportedError
from octavo.internals import internals, require
from octavo.kernels.listening import listener
from octavo.ops.arguments import PLAIN_TENSORS, Arguments, Form
from octavo.ops.playback import Playback, tape_call
from octavo.ops.select import NUM_CALLS, PREPARED, generation, remember

with internals("torch"):
    from torch._C import (
        DispatchKey,
        DispatchKeySet,
        _AutoDispatchBelowAutograd,
        _DisableAutocast,
        _dispatch_keys,
        _dispatch_tls_local_include_set,
        _len_torch_function_stack,
    )

require("torch._C.DispatchKey")

# Before any op imports its kernels.
use_cache_dir()
use_fused_products()
# In place of the state of a thread: calls that torch has dispatched, which nobody may have checked.
_BY_TORCH = "dispatched"
# To tape a call takes about as long as these save: most sizes of prompts are seen by one pass.
TAPE_AT = 8
_LIBRARY = torch.library.Library("octavo", "DEF")
_NOTHING = nullcontext()
# What torch has between autograd and an implementation, for some tensors: it records a call, finds
# shapes of results, or makes a plain tensor of one that is not, such as a lazily negated one.
_BETWEEN = DispatchKeySet(DispatchKey.Python)
for _key in (
    DispatchKey.Functionalize,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.Negative,
    DispatchKey.Conjugate,
    DispatchKey.ZeroTensor,
):
    _BETWEEN |= DispatchKeySet(_key)


class Prepared(NamedTuple):
    """What runs calls with a signature, and the GPU that must be the current one.

    playback: of a call that was taped. play: its function, if nothing of it is torch's.
    """

    run: Callable[..., Any]
    gpu: int | None
    is_repeatable: bool
    playback: Playback | None = None
    play: Callable[[Any], Any] | None = None


class Operator:
    """octavo::<name>: an op for eager calls, for autograd and for whatever traces it.

    call: the dataclass of its arguments. fake: makes empty results of the right shapes for tracing;
    it takes the flat arguments that it names. writes, constants: see `Form`.
    """

    def __init__(
        self,
        name: str,
        call: type[Arguments],
        fake: Callable[..., Any],
        *,
        writes: Sequence[str] = (),
        constants: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.form = form = Form(name, call, writes, constants)
        _LIBRARY.define(f"{name}({form.arguments}) -> {_results(call)}")

        def run(*values: Any) -> Any:
            arguments: Arguments = form.rebuild(*values)
            signature = form.signature(arguments, _BY_TORCH)
            with _DisableAutocast(), on_device_of(values):
                known = PREPARED.get(signature) or self._prepare(arguments, values, signature)
                return self._run(arguments, signature, known)

        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        names = [leaf.name for leaf in form.leaves]
        torch.library.register_fake(f"octavo::{name}", _choosing(names, fake), lib=_LIBRARY)
        no_gradient = _without_gradient(name)
        _LIBRARY.impl(name, no_gradient, "Autograd")
        for key in ("AutogradCPU", "AutogradCUDA"):
            _LIBRARY.impl(name, _directly(run, no_gradient), key, with_keyset=True)
        self._operator = getattr(torch.ops.octavo, name).default

    def __call__(self, call: Arguments) -> Any:
        """Check the arguments and run the op.

        A call with the signature of an earlier one was checked then, and runs at once: neither
        checks, selection nor torch's dispatcher cost the host time again.
        """
        # Gradients and whoever listens to calls of torch have to see every call.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or _len_torch_function_stack():
            return self._by_torch(call)
        state = _state()
        try:
            signature = self.form.signature(call, state)
            known = PREPARED.get(signature)
        except (AttributeError, TypeError):  # no tensors, or sizes that are not numbers yet
            return self._by_torch(call)
        if known is None:
            values = self.form.flatten(call)
            if state not in _PLAIN_STATES or not all(map(_is_plain, values)):
                return self._by_torch(call)
            call.check()
            known = self._prepare(call, values, signature)
        if known.gpu is not None and known.gpu != torch.cuda.current_device():
            return self._by_torch(call)
        if known.play is not None:
            result = known.play(call)
            if result is not None:
                return result
        with _AutoDispatchBelowAutograd(), _DisableAutocast():
            return self._run(call, signature, known)

    def _by_torch(self, call: Arguments) -> Any:
        call.check()
        if listener() is not None:  # as a part of another op that is taped
            return call.run(call.prepare())
        return self._operator(*self.form.flatten(call))

    def _prepare(self, call: Arguments, values: Sequence[object], signature: Any) -> Prepared:
        """Find and keep what runs calls with this signature."""
        since = generation()
        known = Prepared(call.prepare(), _gpu_of(values), call.is_repeatable())
        remember(signature, known, since)
        return known

    def _run(self, call: Arguments, signature: Any, known: Prepared) -> Any:
        """Run a call whose signature is known; one of those that repeat is taped."""
        if known.playback is not None:
            result = known.playback.run(call)
            return call.run(known.run) if result is None else result
        if not known.is_repeatable:
            return call.run(known.run)
        num_calls = NUM_CALLS[signature] = NUM_CALLS.get(signature, 0) + 1
        if num_calls != TAPE_AT:
            return call.run(known.run)
        since, tensors = generation(), self.form.tensors(call)
        result, playback = tape_call(lambda: call.run(known.run), tensors, known.gpu)
        if playback is not None:
            play = None if playback.calls_torch else playback.run
            remember(signature, Prepared(known.run, known.gpu, True, playback, play), since)
        return result


def _state() -> int:
    """What torch does with all calls of this thread, such as tracing them."""
    return _dispatch_tls_local_include_set().raw_repr()


def _plain_states() -> frozenset[int]:
    """The states in which a call may pass torch by; none if somebody traces octavo's import."""
    if (_dispatch_tls_local_include_set() & _BETWEEN).raw_repr():
        return frozenset()
    with torch.inference_mode():
        inference = _state()
    return frozenset({_state(), inference})


_PLAIN_STATES = _plain_states()


def _is_plain(value: object) -> bool:
    """Whether an argument can be given to an implementation as it is."""
    if not isinstance(value, Tensor):
        return True
    is_known = type(value) in PLAIN_TENSORS and value.device.type in ("cpu", "cuda")
    return is_known and not (_dispatch_keys(value) & _BETWEEN).raw_repr()


def _gpu_of(values: Sequence[object]) -> int | None:
    """The GPU of the first tensor; None if that is not on a GPU."""
    first = next((value for value in values if isinstance(value, Tensor)), None)
    return first.device.index if first is not None and first.is_cuda else None


def _results(call: type[Arguments]) -> str:
    """What a schema says of the results of an op."""
    results = get_args(get_type_hints(call.run)["return"])
    return f"({', '.join('Tensor' for _ in results)})" if results else "Tensor"


def _choosing(names: Sequence[str], fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake` as a function of all flat arguments."""
    places = [names.index(name) for name in signature(fake).parameters]
    return lambda *args: fake(*(args[place] for place in places))


def as_contiguous(x: Tensor | None) -> Tensor | None:
    """A small operand as implementations get it: whatever its strides were, one after the other."""
    return None if x is None else x.contiguous()


def on_device_of(args: Sequence[object]) -> AbstractContextManager[object]:
    """The GPU of the first tensor as the current one, on which Triton launches its kernels."""
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if first is not None and first.is_cuda and first.device.index != torch.cuda.current_device():
        return torch.cuda.device(first.device)
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
        tensors = [x for x in args if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return NoGradient.apply(args, *tensors)  # type: ignore[no-untyped-call]
        with _AutoDispatchBelowAutograd():
            return getattr(torch.ops.octavo, name)(*args)

    return call


def _directly(run: Callable[..., Any], no_gradient: Callable[..., Any]) -> Callable[..., Any]:
    """What torch would call below autograd, without asking it: that would cost the host time."""

    def call(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() or (keys & _BETWEEN).raw_repr():
            return no_gradient(*args)
        with _AutoDispatchBelowAutograd():
            return run(*args)

    return call
