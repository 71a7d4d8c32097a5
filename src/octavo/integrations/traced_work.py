"""What a model computes in one pass, found by running it: linear layers, attention, other passes.

On the meta device nothing is computed and no memory is taken, so sizes may be real ones.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from octavo.integrations.patch import Patch
from octavo.internals import internals, require

with internals("torch"):
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

require("torch._ops.OpOverload._schema")

# Ops of a graph that move no bytes, beside views; products, and the zeros that stand for what
# linear layers and attention write.
_NOT_COUNTED = {
    *("aten::detach", "aten::empty", "aten::empty_like", "aten::_unsafe_view", "aten::lift_fresh"),
    *("aten::bmm", "aten::convolution", "aten::mm", "aten::new_zeros"),
}


@dataclass(frozen=True)
class LinearWork:
    """One linear layer; rows: tokens that it sees in one pass.

    is_reached: whether a recipe that quantizes linear layers quantizes this one.
    """

    name: str
    inputs: int
    outputs: int
    rows: int = 1
    is_reached: bool = True

    @property
    def num_weights(self) -> int:
        """Values of its weight."""
        return self.inputs * self.outputs

    @property
    def flops(self) -> float:
        """Of one pass: a multiplication and an addition for each weight and row."""
        return 2.0 * self.rows * self.num_weights


@dataclass(frozen=True)
class AttentionWork:
    """Attention of one call without a mask; place: where it ran, if that was asked for."""

    num_heads: int
    head_dim: int
    num_queries: int
    num_keys: int
    place: str = ""

    @property
    def flops(self) -> float:
        """Of QK and PV."""
        return 4.0 * self.num_heads * self.head_dim * self.num_queries * self.num_keys


@dataclass
class Trace:
    """What was seen; bytes of other ops are those that they read and write, by where they ran."""

    linear: list[LinearWork] = field(default_factory=list)
    attention: list[AttentionWork] = field(default_factory=list)
    other_bytes: dict[str, float] = field(default_factory=dict)


def trace(
    model: nn.Module,
    call: Callable[[], Any],
    places: Mapping[str, str] = MappingProxyType({}),
    *,
    has_bytes: bool = False,
) -> Trace:
    """Run a call of the model and say what it did.

    places: modules by name, and what to call them; the innermost one is where an op ran.
    has_bytes: count those of other ops that run in one of them.
    """
    found = Trace()
    inside: list[str] = []
    with ExitStack() as stack:
        patch = stack.enter_context(Patch())
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                patch.hook(module.register_forward_hook(partial(_record_linear, found, name)))
        for name, place in places.items():
            part = model.get_submodule(name)
            patch.hook(part.register_forward_pre_hook(lambda *_, place=place: inside.append(place)))
            patch.hook(part.register_forward_hook(partial(_leave, inside)))
        stack.enter_context(_NoProducts(found, inside))
        if has_bytes:
            stack.enter_context(_BytesSeen(found, inside))
        call()
    return found


def _record_linear(found: Trace, name: str, module: Any, args: Any, result: Any) -> None:
    rows = args[0].numel() // args[0].shape[-1]
    found.linear.append(LinearWork(name, module.in_features, module.out_features, rows))


def _leave(inside: list[str], *_: object) -> None:
    inside.pop()


class _NoProducts(TorchFunctionMode):
    """Takes the place of attention and linear layers: zeros, so that nothing is multiplied."""

    def __init__(self, found: Trace, inside: list[str]) -> None:
        super().__init__()
        self.found, self.inside = found, inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            x, weight = args[:2]
            return x.new_zeros((*x.shape[:-1], weight.shape[0]))
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3] if len(args) >= 3 else (kwargs["query"], kwargs["key"], kwargs["value"])
        batch, heads = q.shape[0], q.shape[-3]
        place = self.inside[-1] if self.inside else ""
        work = AttentionWork(batch * heads, q.shape[-1], q.shape[-2], k.shape[-2], place)
        self.found.attention.append(work)
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))


class _BytesSeen(TorchDispatchMode):
    """Counts the bytes of ops that are neither products nor views, where that is asked for."""

    def __init__(self, found: Trace, inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.inside = found, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if self.inside and not func.is_view and name not in _NOT_COUNTED:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            place, counted = self.inside[-1], self.found.other_bytes
            counted[place] = counted.get(place, 0.0) + sum(x.nbytes for x in tensors)
        return result
