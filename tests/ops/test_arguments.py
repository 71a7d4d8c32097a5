"""What is derived from the dataclass of an op's arguments: schema, flat arguments, signature."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import Granularity, PerChannel, PerToken
from octavo.numerics.quantize import Quantized
from octavo.ops.arguments import Arguments, Form


class Pair(NamedTuple):
    """Two tensors with names."""

    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Everything(Arguments):
    """An argument of each kind."""

    x: Tensor
    maybe: Tensor | None
    weight: Quantized | None
    pairs: tuple[Pair, Pair] | None
    spec: AttentionSpec
    granularity: Granularity | None
    layout: Literal["rows", "columns"]
    size: int
    impl: str | None


def everything(**changes) -> Everything:
    x = torch.ones(2, 3)
    options = {
        "x": x,
        "maybe": None,
        "weight": Quantized(x, torch.ones(()), PerToken()),
        "pairs": (Pair(x, 2 * x), Pair(3 * x, 4 * x)),
        "spec": AttentionSpec(causal=True),
        "granularity": None,
        "layout": "rows",
        "size": 3,
        "impl": None,
    }
    return Everything(**options | changes)


FORM = Form("everything", Everything, writes=("pairs_1_low",), constants=("size",))


def test_a_schema_is_made_of_fields():
    assert FORM.arguments == (
        "Tensor x, Tensor? maybe, Tensor? weight_data, Tensor? weight_scale, "
        "str? weight_granularity, Tensor? pairs_0_low, Tensor? pairs_0_high, "
        "Tensor(a7!)? pairs_1_low, Tensor? pairs_1_high, str spec, str? granularity, str layout, "
        "int size, str? impl"
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"maybe": torch.ones(4)}, {"weight": None}, {"pairs": None}, {"granularity": PerToken()}],
    ids=lambda changes: "-".join(changes) or "all",
)
def test_flat_arguments_are_the_call(changes):
    call = everything(**changes)
    flat = FORM.flatten(call)
    rebuilt = FORM.rebuild(*flat)
    assert vars(rebuilt) == vars(call)
    for ours, theirs in zip(FORM.flatten(rebuilt), flat, strict=True):
        assert ours is theirs or (ours == theirs and not isinstance(ours, Tensor))


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.ones(3, 3)},
        {"x": torch.ones(3, 2).t()},
        {"x": torch.ones(2, 3).half()},
        {"x": torch.ones(2, 3, device="meta")},
        {"maybe": torch.ones(4)},
        {"weight": None},
        {"weight": Quantized(torch.ones(2, 3), torch.ones(2), PerToken())},
        {"weight": Quantized(torch.ones(2, 3), torch.ones(()), PerChannel())},
        {"pairs": None},
        {"spec": AttentionSpec()},
        {"granularity": PerToken()},
        {"layout": "columns"},
        {"size": 4},
        {"impl": "reference"},
    ],
    ids=str,
)
def test_whatever_checks_depend_on_is_in_the_signature(changes):
    def signature(**changes):
        return FORM.signature(everything(**changes), state=0)

    assert signature() == signature() != signature(**changes)
    assert FORM.signature(everything(), state=1) != signature()


def test_mistakes_in_a_definition_raise():
    @dataclass
    class Odd(Arguments):
        x: Tensor
        table: dict[str, int]

    @dataclass
    class Either(Arguments):
        x: int | str

    with pytest.raises(TypeError, match="that torch.library can take, got table"):
        Form("odd", Odd)
    with pytest.raises(TypeError, match="one type or None"):
        Form("either", Either)
    with pytest.raises(ValueError, match="expected arguments among"):
        Form("everything", Everything, writes=("pair",))
