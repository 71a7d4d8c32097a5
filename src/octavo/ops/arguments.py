"""The arguments of one call of an op: one dataclass from which everything else is derived.

`Form` reads the fields of such a dataclass, and of the dataclasses in them (scales, page views,
rotary tables). From their types it makes what torch.library wants, a flat list of tensors and plain
values, and the signature by which calls that were checked before are recognized.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from octavo.numerics.attention import AttentionSpec, parse_spec
from octavo.numerics.decode_plan import PlanSettings
from octavo.numerics.formats import Fp8Format, format_named
from octavo.numerics.granularity import Granularity, parse_granularity
from octavo.ops.select import Request, find_run, is_repeatable


class Arguments:
    """The arguments of one call of an op; a subclass is a dataclass with a field for each."""

    impl: str | None

    def check(self) -> None:
        """Raise unless the arguments fit together; reads shapes, strides and dtypes, never data."""
        raise NotImplementedError

    def request(self) -> Request:
        """What decides which implementation runs."""
        raise NotImplementedError

    def prepare(self) -> Callable[..., Any]:
        """What runs calls with this signature: the implementation that is selected for them."""
        return find_run(self.request(), self.impl)

    def is_repeatable(self) -> bool:
        """Whether all that calls like this one do follows from their signature."""
        return is_repeatable(self.request(), self.impl)

    def run(self, run: Callable[..., Any]) -> Any:
        """The result of `run`, as a tensor or a tuple of tensors; none of them is an argument."""
        raise NotImplementedError


# Python type -> torch's word for it.
_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
}
# Types that travel through torch.library as something plain: torch's word, how, and back.
_PLAIN: dict[Any, tuple[str, str, Callable[[Any], Any]]] = {
    AttentionSpec: ("str", "str({})", parse_spec),
    Fp8Format: ("str", "{}.name", format_named),
    Granularity: ("str", "str({})", parse_granularity),
    PlanSettings: ("int[]", "{}.numbers", PlanSettings.of_numbers),
}
PLAIN_TENSORS = (Tensor, nn.Parameter)
# What checks and kernels depend on, apart from a tensor's values. Whether memory holds the values
# negated (a view of a conjugated tensor) is asked too: such a tensor needs torch's help. Signatures
# are kept, so they are numbers in plain tuples, which cost the garbage collector nothing.
_TRAITS = (
    "(tuple((x := {0}).shape), x.stride(), x.dtype, x.device, type(x) in PLAIN_TENSORS, x.is_neg())"
)


@dataclass(frozen=True)
class _Leaf:
    """One flat argument: its name, torch's word for its type, and Python that finds it in `call`.

    trait: Python for what checks depend on. place: where it is, unless it is missing.
    """

    name: str
    kind: str
    value: str
    trait: str
    place: str


class Form:
    """What can be derived from the fields of a `Arguments`.

    arguments: those of a schema. flatten: the flat arguments of a call. rebuild: the call of flat
    arguments. signature: the op's name, the state of the thread, and what checks of a call depend
    on: one tuple of plain values as far as possible, since many are kept.
    writes: flat arguments that the op writes into. constants: integers for which a traced graph is
    made; others may vary.
    """

    def __init__(
        self, name: str, call: type, writes: Sequence[str] = (), constants: Sequence[str] = ()
    ) -> None:
        self.leaves = list(_leaves_of_fields(call, "call"))
        names = [leaf.name for leaf in self.leaves]
        unknown = {*writes, *constants}.difference(names)
        if unknown:
            raise ValueError(f"expected arguments among {names}, got {sorted(unknown)}")
        self.arguments = ", ".join(
            _declaration(leaf, place if leaf.name in writes else None, leaf.name in constants)
            for place, leaf in enumerate(self.leaves)
        )
        # Written out as Python and compiled once: loops over fields would cost every call time.
        self.flatten = _tuple_of("call", [leaf.value for leaf in self.leaves])
        traits = [repr(name), "state", *(leaf.trait for leaf in self.leaves)]
        self.signature = _tuple_of("call, state", traits)
        scope: dict[str, Any] = {}
        made = _maker(call, deque(names), scope)
        self.rebuild: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {made}", scope)

    def tensors(self, call: Any) -> dict[str, Tensor]:
        """The tensors among the arguments of a call, by the Python that finds them in it."""
        named = zip(self.leaves, self.flatten(call), strict=True)
        return {leaf.place: x for leaf, x in named if isinstance(x, Tensor)}


def _leaves_of_fields(
    owner: type, place: str, prefix: str = "", guard: str = ""
) -> Iterator[_Leaf]:
    for name, hint in _fields(owner):
        yield from _leaves(hint, prefix + name, f"{place}.{name}", guard)


def _fields(owner: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(owner)
    names = [own.name for own in fields(owner)] if is_dataclass(owner) else owner._fields
    return [(name, hints[name]) for name in names]


def _leaves(hint: Any, name: str, place: str, guard: str) -> Iterator[_Leaf]:
    """The flat arguments of such a value; guard: Python that is true where the value is missing."""
    inner, is_optional = _without_none(hint)
    if is_optional:
        guard = f"{guard} or {place} is None" if guard else f"{place} is None"
    if get_origin(inner) is tuple:
        for index, part in enumerate(get_args(inner)):
            yield from _leaves(part, f"{name}_{index}", f"{place}[{index}]", guard)
    elif inner in _KINDS or inner in _PLAIN or get_origin(inner) is Literal:
        kind, pattern, _ = _PLAIN.get(inner, (_KINDS.get(inner, "str"), "{}", None))
        trait = _TRAITS.format(place) if inner is Tensor else place
        yield _Leaf(
            name=name,
            kind=f"{kind}?" if guard else kind,
            value=_guarded(pattern.format(place), guard),
            trait=_guarded(trait, guard),
            place=place,
        )
    elif is_dataclass(inner) or hasattr(inner, "_fields"):
        yield from _leaves_of_fields(inner, place, f"{name}_", guard)
    else:
        raise TypeError(f"expected a type that torch.library can take, got {name}: {hint}")


def _without_none(hint: Any) -> tuple[Any, bool]:
    if not isinstance(hint, UnionType):
        return hint, False
    inner, *others = [option for option in get_args(hint) if option is not NoneType]
    if others:
        raise TypeError(f"expected one type or None, got {hint}")
    return inner, True


def _guarded(value: str, guard: str) -> str:
    return f"(None if {guard} else {value})" if guard else value


def _declaration(leaf: _Leaf, written: int | None, is_constant: bool) -> str:
    """How a schema says one argument; written: a number that tells it from others written into."""
    kind = leaf.kind.replace("SymInt", "int") if is_constant else leaf.kind
    if written is not None:
        kind = kind.replace("Tensor", f"Tensor(a{written}!)")
    return f"{kind} {leaf.name}"


def _tuple_of(parameters: str, values: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """A function that makes a tuple of these."""
    source = f"lambda {parameters}: ({', '.join(values)},)"
    function: Callable[..., tuple[Any, ...]] = eval(source, {"PLAIN_TENSORS": PLAIN_TENSORS})
    return function


def _maker(hint: Any, names: deque[str], scope: dict[str, Any]) -> str:
    """Python that makes such a value of the next flat arguments; scope: what it calls."""
    inner, is_optional = _without_none(hint)
    if inner in _PLAIN:
        scope[f"read_{inner.__name__}"] = _PLAIN[inner][2]
        name = names.popleft()
        return f"(None if {name} is None else read_{inner.__name__}({name}))"
    if inner in _KINDS or get_origin(inner) is Literal:
        return names.popleft()
    first = names[0]
    if get_origin(inner) is tuple:
        made = f"({', '.join(_maker(part, names, scope) for part in get_args(inner))},)"
    else:
        scope[inner.__name__] = inner
        parts = [f"{name}={_maker(part, names, scope)}" for name, part in _fields(inner)]
        made = f"{inner.__name__}({', '.join(parts)})"
    # Of a value that may be missing the first argument is not None, unless it is missing.
    return f"(None if {first} is None else {made})" if is_optional else made
