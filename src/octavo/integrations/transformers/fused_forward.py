"""When a forward of ours may replace that of an attention module: its class is as we know it.

A forward is put on the instance. One that is overridden, wrapped or replaced (by hooks that move
its inputs, say) stays.
"""

import inspect
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from octavo.errors import ConfigError
from octavo.internals import require

Forward = Callable[..., Any]


class Replacement(NamedTuple):
    """What replaces a forward, a function of the module and its arguments.

    children: what a module must have, and no more: a norm of queries, say, would be left out.
    """

    forward: Forward
    children: frozenset[str]


def find_forward(module: nn.Module, known: Mapping[str, Replacement]) -> Forward | None:
    """The forward that can replace a module's own; None if its class is not as we know it.

    known: by the full names of forwards.
    """
    own = type(module).forward
    found = known.get(f"{own.__module__}.{getattr(own, '__qualname__', '')}")
    if found is None or hasattr(own, "__wrapped__") or "forward" in vars(module):
        return None
    require("transformers.PreTrainedConfig._attn_implementation")
    has_same_parameters = _parameters(own) == _parameters(found.forward)
    has_same_children = {child for child, _ in module.named_children()} == found.children
    return found.forward if has_same_parameters and has_same_children else None


def _parameters(function: Forward) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def is_fused(module: nn.Module, functions: Container[Forward]) -> bool:
    """Whether the module runs one of these functions in place of its class's forward."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func in functions


def check_implementation(module: Any, layer: object, expected: str) -> None:
    """Raise unless the module's config still has our attention; layer: what the error calls it.

    A forward of ours asks no registry: it would go on whatever the config says.
    """
    found = module.config._attn_implementation
    if found != expected:
        raise ConfigError(
            f"{layer}: expected the attention implementation {expected!r} that apply_ set in the "
            f"config, got {found!r}: restore_ the model first"
        )
