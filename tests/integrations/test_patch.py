"""Patch: whatever was changed is as it was, in reverse order, on copies too."""

import copy
import pickle
import types

import pytest
import torch
from torch import nn

from octavo.integrations.patch import Patch


class Config:
    """An attribute behind a property, as transformers' configs have it."""

    def __init__(self):
        self._internal = "sdpa"

    @property
    def implementation(self):
        return self._internal

    @implementation.setter
    def implementation(self, value):
        self._internal = value


class Double(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def double(x):
    return 2 * x


def test_attributes_of_every_kind_are_as_they_were():
    layer, config, library = nn.Linear(2, 2), Config(), types.ModuleType("library")
    model, weight = nn.Sequential(layer), layer.weight
    library.read = read = object()
    before = dict(vars(layer))
    with Patch() as patch:
        patch.set(layer, "forward", double)  # hides the class's own
        patch.set(layer, "weight", nn.Parameter(torch.zeros(2, 2)))
        patch.set(layer, "note", 1)
        patch.set(layer, "note", 2)
        patch.set(config, "implementation", "octavo")
        patch.set(library, "read", None)
        patch.set(model, "0", nn.Identity())
        patch.set(layer, "__class__", Double)
        assert config.implementation == "octavo" and library.read is None
        assert layer.note == 2 and type(layer) is Double and not layer.weight.any()
        assert torch.equal(layer(torch.ones(2)), torch.full((2,), 2.0))
        assert isinstance(model[0], nn.Identity)
    assert vars(layer) == before and layer.weight is weight and type(layer) is nn.Linear
    assert config.implementation == "sdpa" and vars(config) == {"_internal": "sdpa"}
    assert library.read is read and model[0] is layer


def test_hooks_and_attributes_go_in_reverse_order():
    layer, calls = nn.Identity(), []
    patch = Patch()
    patch.hook(layer.register_forward_hook(lambda *_: calls.append("hook")))
    layer(torch.ones(1))
    patch.undo()
    patch.undo()  # an empty one does nothing
    layer(torch.ones(1))
    assert calls == ["hook"] and not layer._forward_hooks


def test_an_error_inside_undoes_too():
    layer = nn.Identity()
    with pytest.raises(ValueError, match="inside"), Patch() as patch:
        patch.set(layer, "note", 1)
        raise ValueError("inside")
    assert "note" not in vars(layer)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_carries_a_patch_of_its_own_parts(make_copy):
    model = nn.Sequential(nn.Linear(2, 2))
    patch = Patch()
    patch.set(model[0], "forward", double)
    patch.set(model[0], "__class__", Double)
    model.patch = patch
    other = make_copy(model)
    other.patch.undo()
    assert type(other[0]) is nn.Linear and "forward" not in vars(other[0])
    assert type(model[0]) is Double and model[0].forward is double
    patch.undo()
    assert type(model[0]) is nn.Linear and "forward" not in vars(model[0])
