"""Which attention layer of diffusers runs: its backends are told nothing of the layer.

Hooks on the layer leave word for the backend, in the same thread. In a compiled block both are
traced, and the scales of each layer are inputs of one graph.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diffusers import AttentionBackendName
from torch import Tensor, nn

from octavo.errors import UnsupportedError
from octavo.integrations.diffusers.two_streams import Streams
from octavo.internals import internals, require
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QkvScales
from octavo.numerics.rotary import Rotary

with internals("diffusers"):
    from diffusers.models.attention_dispatch import (
        _AttentionBackendRegistry,
        dispatch_attention_fn,
    )

require(
    "diffusers.models.attention.AttentionModuleMixin._attention_backend",
    "diffusers.models.attention_dispatch._AttentionBackendRegistry",
)

See = Callable[[str, Tensor, Tensor, Tensor], None]
OBSERVED = "octavo_observed"


@dataclass(frozen=True, eq=False)
class Left:
    """What a layer has not done to its queries and keys, and where they are."""

    norm: QkNorm
    rotary: Rotary | None
    streams: Streams


class _Current(threading.local):
    """What the layer that runs has left for its backend."""

    def __init__(self) -> None:  # in each thread: a compiled block guards what it finds here
        self.name: str | None = None
        self.scales: QkvScales | None = None
        self.left: Left | None = None
        self.see: See | None = None
        self.backend: AttentionBackendName | None = None


_CURRENT = _Current()


def hook_scales(layer: nn.Module, scales: QkvScales) -> list[Any]:
    """Let a layer's backend find its static scales; returns the hooks, to be removed."""

    def leave(module: nn.Module, args: object) -> None:
        _CURRENT.scales = scales

    def take_back(module: nn.Module, args: object, result: object) -> None:
        _CURRENT.scales = None

    # Not always_call: torch would compile each block anew.
    return [layer.register_forward_pre_hook(leave), layer.register_forward_hook(take_back)]


def current_scales(query: Tensor) -> QkvScales:
    """The static scales of the layer that runs, on the device of its queries."""
    scales = _CURRENT.scales
    if scales is None:
        raise UnsupportedError(
            "static FP8 attention: expected a call through its layer, got one of its processor "
            "alone, which has no scales"
        )
    return QkvScales(*(x.to(query.device) for x in (scales.q, scales.k, scales.v)))


def leave(left: Left) -> None:
    """Leave it to the backend, when it is called next, to normalize queries and keys."""
    _CURRENT.left = left


def take_left() -> Left | None:
    """What the layer that runs has left for its backend; for its one call alone."""
    found = _CURRENT.left
    _CURRENT.left = None
    return found


@contextmanager
def observe_attention(layers: Mapping[str, nn.Module], see: See) -> Iterator[None]:
    """Call `see` with name, q, k and v of these layers, [batch, length, heads, head_dim].

    They run with the backends that they have.
    """
    member = AttentionBackendName(OBSERVED)
    before = {name: layer.processor._attention_backend for name, layer in layers.items()}  # type: ignore[union-attr]
    hooks = []
    for name, layer in layers.items():
        hooks += _hook_observer(name, layer, see, before[name])
    try:
        for layer in layers.values():
            layer.processor._attention_backend = member  # type: ignore[union-attr]
        yield
    finally:
        for name, layer in layers.items():
            layer.processor._attention_backend = before[name]  # type: ignore[union-attr]
        for hook in hooks:
            hook.remove()


def _hook_observer(
    name: str, layer: nn.Module, see: See, backend: AttentionBackendName | None
) -> list[Any]:
    def leave(module: nn.Module, args: object) -> None:
        _CURRENT.name, _CURRENT.see, _CURRENT.backend = name, see, backend

    def take_back(module: nn.Module, args: object, result: object) -> None:
        _CURRENT.name = _CURRENT.see = _CURRENT.backend = None

    return [
        layer.register_forward_pre_hook(leave),
        layer.register_forward_hook(take_back, always_call=True),
    ]


def octavo_observed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> Any:
    """Show q, k and v, then run the backend that the layer had."""
    if _CURRENT.name is None or _CURRENT.see is None:
        raise UnsupportedError(
            "attention: expected a call through its layer to calibrate it, got one of its "
            "processor alone"
        )
    _CURRENT.see(_CURRENT.name, query, key, value)
    return dispatch_attention_fn(
        *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, others),
        backend=_CURRENT.backend,
        parallel_config=_parallel_config,
    )


def add_member(name: str) -> AttentionBackendName:
    """The enum's member of this name, appended if it has none: diffusers has no other way in."""
    if name in AttentionBackendName._value2member_map_:
        return AttentionBackendName(name)
    member: Any = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name
    member._sort_order_ = len(AttentionBackendName._member_names_)
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[name] = member
    return member


def add_backend(name: str, run: Callable[..., Any]) -> AttentionBackendName:
    """The member of this name, with `run` as its function if it has none yet.

    diffusers drops what a backend's signature does not name. This one is given whatever any backend
    takes, and refuses what it cannot do.
    """
    member = add_member(name)
    if member not in _AttentionBackendRegistry._backends:
        known = set().union(*_AttentionBackendRegistry._supported_arg_names.values())
        _AttentionBackendRegistry.register(member)(run)
        _AttentionBackendRegistry._supported_arg_names[member] |= known
    return member


add_backend(OBSERVED, octavo_observed)
