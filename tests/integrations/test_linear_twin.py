"""Recipes without their linear layers, and models beside which FP8 ones are made."""

import pytest
import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.integrations.apply import quantized_twin, split_linear
from octavo.layers.linear import Fp8Linear
from octavo.recipe import Recipe

SCALES = {"0": {"input": 0.5}}


def test_a_recipe_without_linear_layers_is_all_the_rest():
    recipe = Recipe(kv_cache="fp8", skip_layers=["0"])
    assert split_linear(recipe) == (None, recipe)


def test_both_parts_have_what_is_theirs():
    recipe = Recipe(
        linear="fp8",
        ignored_layers=["lm_head"],
        kv_cache="fp8",
        skip_layers=["0"],
        promote_every=2,
    )
    linear, rest = split_linear(recipe)
    assert linear == Recipe(linear="fp8", ignored_layers=["lm_head"])
    assert rest == Recipe(kv_cache="fp8", skip_layers=["0"], promote_every=2)


def test_scales_go_with_what_takes_them():
    recipe = Recipe(linear={"scaling": "static"}, kv_cache="fp8", scales=SCALES)
    linear, rest = split_linear(recipe)
    assert linear.scales == recipe.scales and rest.scales is None
    recipe = Recipe(linear="fp8", kv_cache={"scaling": "static"}, scales=SCALES)
    linear, rest = split_linear(recipe)
    assert linear.scales is None and rest.scales == recipe.scales


class Model(nn.Module):
    """A linear layer between what no recipe touches."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.proj = nn.Linear(32, 48)
        self.register_buffer("table", torch.ones(48))

    def forward(self, x):
        return self.proj(self.norm(x)) * self.table


def test_only_linear_layers_are_others():
    model = Model()
    weight, x = model.proj.weight.clone(), torch.randn(5, 32)
    before = model(x)
    twin, changes = quantized_twin(model, Recipe(linear="fp8"))
    assert changes.layers == {"linear": ["proj"]}
    assert isinstance(twin.proj, Fp8Linear) and type(model.proj) is nn.Linear
    assert twin.norm.weight is model.norm.weight and twin.table is model.table
    assert torch.equal(model.proj.weight, weight) and torch.equal(model(x), before)
    error = (twin(x) - before).norm() / before.norm()
    assert 0 < error < 0.06  # e4m3 rounds both operands by 2.6 % in the root mean square


def test_what_is_wrong_leaves_the_model_as_it_is():
    model = Model()
    with pytest.raises(ConfigError, match="missing"):
        quantized_twin(model, Recipe(linear="fp8", ignored_layers=["missing"]))
    assert type(model.proj) is nn.Linear
