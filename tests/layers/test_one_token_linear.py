"""Linear layers whose single tokens go another way, to the same result."""

import pytest
import torch
from torch import nn

from octavo import ops
from octavo.layers import linear
from octavo.layers.linear import (
    OneTokenLinear,
    give_single_tokens_back,
    take_single_tokens,
)


@pytest.fixture
def calls(monkeypatch):
    """How many products went by `ops.matvec`."""
    seen = []

    def counted(x, weight, bias=None, **options):
        seen.append(tuple(x.shape))
        return matvec(x, weight, bias, **options)

    matvec = ops.matvec
    monkeypatch.setattr(linear.ops, "matvec", counted)
    return seen


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 1, 48)])
def test_single_tokens(calls, shape, has_bias):
    torch.manual_seed(0)
    layer = nn.Linear(48, 40, bias=has_bias)
    x = torch.randn(shape)
    expected = layer(x)
    (found,) = take_single_tokens(layer)
    assert found is layer and isinstance(layer, OneTokenLinear)
    actual = layer(x)
    assert calls == [shape] and actual.shape == expected.shape
    # Sums of 48 products in another order.
    torch.testing.assert_close(actual, expected, rtol=0, atol=48 * 2e-7)


@pytest.mark.parametrize("shape", [(2, 48), (1, 7, 48), (0, 48)])
def test_other_inputs_are_as_they_were(calls, shape):
    layer = nn.Linear(48, 40)
    x = torch.randn(shape)
    expected = layer(x)
    take_single_tokens(layer)
    assert torch.equal(layer(x), expected) and calls == []


def test_only_plain_layers_change_and_all_of_them_back():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(8, 8), Scaled(8, 8), nn.Sequential(nn.Linear(8, 8, bias=False)))
    keys = list(model.state_dict())
    found = take_single_tokens(model)
    assert [type(part) for part in (model[0], model[1], model[2][0])] == [
        OneTokenLinear,
        Scaled,
        OneTokenLinear,
    ]
    assert take_single_tokens(model) == []
    assert list(model.state_dict()) == keys
    give_single_tokens_back(found)
    assert [type(part) for part in (model[0], model[1], model[2][0])] == [
        nn.Linear,
        Scaled,
        nn.Linear,
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.inference_mode()
def test_one_graph_for_a_token_and_one_for_more():
    layer = nn.Linear(48, 40)
    take_single_tokens(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (1, 5, 9, 1):
        x = torch.randn(1, length, 48)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-5)
