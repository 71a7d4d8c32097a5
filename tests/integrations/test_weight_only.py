"""weight_only_layers: FP8 weights and plain activations, for the layers that patterns name."""

import pytest
import torch
from torch import nn

from octavo import ConfigError, Recipe, apply_, calibrate_linear, quantize_
from octavo.integrations.apply import split_linear
from octavo.layers.linear import Fp8Linear
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

ALONE = LinearSettings(activation=None)


class Model(nn.Module):
    """Two blocks with a fused projection, a router and a head."""

    def __init__(self):
        super().__init__()
        blocks = [
            {"to_qkv": nn.Linear(32, 96), "out": nn.Linear(96, 32), "gate": nn.Linear(32, 32)}
            for _ in range(2)
        ]
        self.blocks = nn.ModuleList(nn.ModuleDict(block) for block in blocks)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        for block in self.blocks:
            x = x + block["out"](block["to_qkv"](x)) * block["gate"](x)
        return self.head(x)

    def get_output_embeddings(self):
        return self.head


def make():
    torch.manual_seed(0)
    return Model().requires_grad_(False)


def settings_of(model):
    return {name: m.settings for name, m in model.named_modules() if isinstance(m, Fp8Linear)}


def test_the_named_layers_have_fp8_weights_and_take_inputs_as_they_are():
    model = make()
    changes = quantize_(model, weight_only_layers=["blocks.0.out"])
    found = settings_of(model)
    assert found.pop("blocks.0.out") == ALONE
    assert len(found) == 3 and set(found.values()) == {LinearSettings()}
    assert changes.weight_only == {"linear": ["blocks.0.out"]}
    assert "linear: 4 layers, 1 of them weight-only\n" in str(changes)
    layer, x = model.get_submodule("blocks.0.out"), Draw(1).normal(3, 96)
    exact = nn.functional.linear(x, layer.dequantize(), layer.bias)
    torch.testing.assert_close(layer(x), exact, rtol=1e-5, atol=1e-6)
    other = model.get_submodule("blocks.1.out")
    rounded = nn.functional.linear(x, other.dequantize(), other.bias) - other(x)
    assert rounded.abs().max() > 1e-3


def test_without_the_field_nothing_changes():
    model, changes = make(), None
    changes = apply_(model, Recipe(linear="fp8"))
    assert not changes.weight_only and "weight-only" not in str(changes)
    assert set(settings_of(model).values()) == {LinearSettings()}


@pytest.mark.parametrize(
    ("linear", "expected", "num_scales"),
    [({"weight": "tensor"}, ALONE, 96), ({"weight": "block 128x128"}, None, 1)],
)
def test_weights_are_per_channel_unless_they_are_in_blocks(linear, expected, num_scales):
    model = make()
    quantize_(model, linear, weight_only_layers=["blocks.1.to_qkv"])
    layer = model.get_submodule("blocks.1.to_qkv")
    blocks = LinearSettings(weight="block 128x128", activation=None)
    assert layer.settings == (expected or blocks)
    assert layer.weight_scale.numel() == num_scales
    assert layer.state_dict()["weight_scale"].numel() == num_scales


def test_a_config_may_have_them():
    model, other = make(), make()
    words = {"method": "fp8", "ignored_layers": ["1"], "weight_only_layers": ["to_qkv"]}
    with pytest.raises(ConfigError, match="in both: .blocks.1.to_qkv"):
        quantize_(model, words)
    words["weight_only_layers"] = ["0"]
    with pytest.raises(ConfigError, match=r"blocks.0.gate stays as it is \(a router of experts\)"):
        quantize_(model, words)
    assert not settings_of(model)  # all that is wrong is found before anything changes
    words["weight_only_layers"] = ["re:0.(to_qkv|out)$"]
    quantize_(model, words)
    patterns = {name: words.pop(name) for name in ("ignored_layers", "weight_only_layers")}
    quantize_(other, words, **patterns)
    assert set(settings_of(model).values()) == {ALONE} and len(settings_of(model)) == 2
    assert settings_of(other) == settings_of(model)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: quantize_(m, weight_only_layers=["no"]), "pattern 'no' matches none of the 7"),
        (lambda m: quantize_(m, weight_only_layers=["modulation"]), "none of them is modulation"),
        (
            lambda m: quantize_(m, weight_only_layers=["head"]),
            "head stays as it is (an output head)",
        ),
        (lambda m: quantize_(m, weight_only_layers="head"), "expected a list of patterns"),
        (
            lambda m: quantize_(m, {"weight_only_layers": ["out"]}, weight_only_layers=["out"]),
            "expected weight_only_layers once",
        ),
        (
            lambda m: quantize_(m, Recipe(linear="fp8"), weight_only_layers=["out"]),
            "weight_only_layers and scales in the recipe, got them beside",
        ),
    ],
)
def test_what_is_refused(call, said):
    model = make()
    with pytest.raises(ConfigError) as caught:
        call(model)
    assert said in str(caught.value)
    assert not settings_of(model)


def test_a_component_of_that_name_is_matched_as_any_other():
    model = nn.ModuleDict({"modulation": nn.Linear(32, 32), "other": nn.Linear(32, 32)})
    changes = quantize_(model, weight_only_layers=["modulation"])
    assert changes.weight_only == {"linear": ["modulation"]}


def test_static_scales_are_for_the_others():
    batches = [Draw(2).normal(4, 32)]
    everything = calibrate_linear(make(), batches)
    scales = calibrate_linear(make(), batches, weight_only_layers=["to_qkv"])
    assert scales.inputs.keys() == {"blocks.0.out", "blocks.1.out"}
    for given in (scales, everything):
        model = make()
        quantize_(model, {"scaling": "static"}, weight_only_layers=["to_qkv"], scales=given)
        alone, other = (model.get_submodule(f"blocks.0.{name}") for name in ("to_qkv", "out"))
        assert alone.settings == ALONE and alone.input_scale is None
        assert float(other.input_scale) == pytest.approx(given.inputs["blocks.0.out"])
        assert model(batches[0]).isfinite().all()
    with pytest.raises(ConfigError, match="got weight-only ones alone"):
        calibrate_linear(make(), batches, weight_only_layers=["to_qkv", "out"])


def test_a_twin_has_them():
    linear, rest = split_linear(Recipe(linear="fp8", kv_cache="fp8", weight_only_layers=["out"]))
    assert linear == Recipe(linear="fp8", weight_only_layers=["out"])
    assert rest == Recipe(kv_cache="fp8")


def test_a_state_dict_loads_into_a_model_of_the_same_recipe():
    first, second = make(), make()
    for model in (first, second):
        quantize_(model, weight_only_layers=["out"])
    with torch.no_grad():
        first.blocks[0]["out"].weight_scale.mul_(2)
    second.load_state_dict(first.state_dict())
    x = Draw(3).normal(2, 32)
    assert_same_bits(second(x), first(x))
