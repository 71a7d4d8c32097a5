"""What a CUDA graph of a module has baked in: when it is out of date, and what it could not see."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from octavo.internals import require

require(
    "torch.nn.Module._buffers",
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
    "torch.nn.Module._modules",
    "torch.nn.Module._parameters",
)
# Whose modules compute what their tensors and configs say, and nothing else.
KNOWN_PACKAGES = ("octavo", "torch", "transformers", "transformers_modules")
# transformers records what users ask for by hooks that stay, and do nothing afterwards.
IDLE_HOOKS = "transformers.utils.output_capturing"
_PLACES = tuple(map(itemgetter, ("_modules", "_forward_hooks", "_forward_pre_hooks")))
_TENSORS = tuple(map(itemgetter, ("_parameters", "_buffers")))
_SWITCHES = ("forward", "impl", "prefill_impl", "training")
_dtype = attrgetter("dtype")


class Snapshot:
    """Modules, addresses, hooks and switches of a module and all inside it, at one moment.

    Values that are written in place are none of it: a graph reads them anew.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        # Weak, as replaced modules must not keep their weights: those alive have ids of their own.
        self._modules = [weakref.ref(module) for module in modules]
        self._state = _look(modules)

    def holds(self) -> bool:
        """Whether all is as it was; for hundreds of modules in a fraction of a millisecond."""
        modules = [ref() for ref in self._modules]
        return None not in modules and _look(modules) == self._state  # type: ignore[arg-type]


def _look(modules: list[nn.Module]) -> tuple[list[object], ...]:
    # Maps of built-in functions alone: a decode step waits for this.
    own: list[dict[str, Any]] = list(map(vars, modules))

    def values(places: Iterable[Callable[[Any], Any]]) -> Iterator[Any]:
        found = chain.from_iterable(map(place, own) for place in places)
        return chain.from_iterable(map(dict.values, found))

    tensors = [x for x in values(_TENSORS) if x is not None]
    switches = [list(map(dict.get, own, repeat(name))) for name in _SWITCHES]
    return (
        list(map(id, values(_PLACES))),
        list(map(id, tensors)),
        list(map(Tensor.data_ptr, tensors)),
        list(map(_dtype, tensors)),
        *switches,
    )


def find_objection(root: nn.Module, device: torch.device) -> str:
    """Why a graph of a module could go wrong unnoticed, on this device; empty if it could not."""
    if objection := _objection_to_forward(root):
        return objection
    for name, module in root.named_modules():
        label, own = name or type(root).__name__, vars(module)
        kind = type(module)
        if kind.__module__.partition(".")[0] not in KNOWN_PACKAGES:
            return f"{label} is a {kind.__qualname__} of {kind.__module__}"
        if kind.__name__ == "OptimizedModule" or own.get("_compiled_call_impl"):
            return f"{label} is compiled"
        if name and (objection := _objection_to_forward(module)):
            return f"{label}: {objection}"
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        if name and any(getattr(hook, "__module__", "") != IDLE_HOOKS for hook in hooks):
            return f"{label} has hooks, which a graph would not call"
        tensors = (x for get in _TENSORS for x in get(own).values() if x is not None)
        for x in tensors:
            if type(x) not in (Tensor, nn.Parameter, nn.Buffer):
                return f"{label} has a {type(x).__name__}"
            if x.device != device:
                return f"{label} is on {x.device}, not on {device}"
    return ""


def _objection_to_forward(module: nn.Module) -> str:
    forward = vars(module).get("forward")
    if forward is None or "_hf_hook" in vars(module):
        return "" if forward is None else "accelerate has hooks there"
    function = forward.func if isinstance(forward, partial) else forward
    is_ours = str(getattr(function, "__module__", "")).partition(".")[0] == "octavo"
    return "" if is_ours else "something has replaced its forward"
