"""calibrate_linear: the largest activations of all batches as scales that quantize_ takes."""

import re

import pytest
import torch
from torch import nn

from octavo import (
    CalibrationSettings,
    ConfigError,
    Recipe,
    apply_,
    calibrate_linear,
    load_scales,
    quantize_,
    save_scales,
)
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(40, 65), nn.Linear(65, 40), nn.Linear(40, 40)

    def forward(self, x, *, gain=1.0, is_all=False):
        x = self.down(torch.relu(self.up(input=x * gain)))
        return self.unused(x) if is_all else x


def make():
    torch.manual_seed(0)
    return Mlp().requires_grad_(False)


def batches(num=3):
    return [Draw(seed).normal(2, 7, 40) * (seed + 1) for seed in range(num)]


IGNORED = {"ignored_layers": ["unused"]}


@pytest.mark.parametrize("margin", [1.0, 1.5])
def test_scales_are_those_of_the_largest_value_of_all_batches(margin):
    model, data = make(), batches()
    scales = calibrate_linear(model, data, CalibrationSettings(margin=margin), **IGNORED)
    hidden = torch.cat([torch.relu(model.up(x)) for x in data])
    expected = {"up": torch.cat(data).abs().max(), "down": hidden.max()}
    assert scales.inputs.keys() == expected.keys() and not scales.layers
    for name, amax in expected.items():
        assert scales.inputs[name] == pytest.approx(margin * float(amax) / 448, rel=1e-7)
    assert (scales.header.kind, scales.header.passes) == ("linear", 3)
    assert (scales.header.margin, scales.header.observer) == (margin, "amax")


def test_all_kinds_of_batches():
    x = batches(1)[0]
    expected = calibrate_linear(make(), [x], **IGNORED).inputs
    for batch in ({"x": x}, (x,), [x], {"x": x, "gain": 1.0}):
        assert calibrate_linear(make(), [batch], **IGNORED).inputs == expected
    assert calibrate_linear(make(), iter([x]), **IGNORED).inputs == expected
    assert len(calibrate_linear(make(), [{"x": x, "is_all": True}]).inputs) == 3


def test_the_model_is_left_as_it_was():
    model = make()
    before = model(batches(1)[0])
    calibrate_linear(model, batches(), **IGNORED)
    assert_same_bits(model(batches(1)[0]), before)
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(TypeError):
        calibrate_linear(model, [{"y": 1}], **IGNORED)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_from_calibration_to_a_static_model(tmp_path):
    model, data = make(), batches()
    x = data[1]
    truth = model(x)
    scales = calibrate_linear(model, data, CalibrationSettings(margin=1.0), **IGNORED)
    path = tmp_path / "scales.json"
    save_scales(path, scales)
    assert load_scales(path) == scales
    recipe = Recipe(linear={"activation_scheme": "static"}, scales=str(path), **IGNORED)
    apply_(model, recipe)
    assert isinstance(model.up, Fp8Linear)
    assert float(model.up.input_scale) == pytest.approx(scales.inputs["up"])
    # Two products of 3.8 % each, of which relu passes on the larger half.
    assert relative_rms(model(x), truth) < 0.07
    other = make()
    quantize_(other, {"activation_scheme": "static"}, scales=scales, **IGNORED)
    assert_same_bits(other(x), model(x))
    again = Recipe.from_toml(Recipe.from_json(recipe.to_json()).to_toml())
    assert again == recipe


def test_a_percentile_leaves_outliers_out():
    model, x = make(), batches(1)[0]
    x[0, 0, 0] = 1000.0
    settings = CalibrationSettings(observer="percentile", percentile=99, margin=1.0)
    assert calibrate_linear(model, [x], settings, **IGNORED).inputs["up"] < 10 / 448
    exact = calibrate_linear(model, [x], CalibrationSettings(margin=1.0), **IGNORED)
    assert exact.inputs["up"] == pytest.approx(1000 / 448)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_activations_that_are_not_finite(bad):
    data = batches()
    data[1][0, 0, 3] = bad
    with pytest.raises(ConfigError, match="up: expected finite activations, got 1 NaN or Inf"):
        calibrate_linear(make(), data, **IGNORED)


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (batches(), {}, "got no pass of 'unused': use data that reaches them, or ignore them"),
        ([], IGNORED, "got no pass of 'up', 'down'"),
        ([torch.zeros(0, 40)], IGNORED, "got no pass of 'up', 'down'"),
        ([torch.zeros(3, 40)], IGNORED, "up: expected values to calibrate on, got only zeros"),
        (batches(), {"ignored_layers": ["unsued"]}, "did you mean 'unused'"),
        (
            batches(),
            {"settings": CalibrationSettings(granularity="head"), **IGNORED},
            "expected granularity 'tensor' without rotate_keys",
        ),
        (
            batches(),
            {"settings": CalibrationSettings(rotate_keys=True), **IGNORED},
            "expected granularity 'tensor' without rotate_keys",
        ),
    ],
)
def test_data_and_settings_that_are_refused(data, options, said):
    with pytest.raises(ConfigError) as caught:
        calibrate_linear(make(), data, **options)
    assert said in str(caught.value)


def test_a_model_in_fp8_is_refused():
    model = make()
    quantize_(model)
    with pytest.raises(ConfigError, match="in FP8 already"):
        calibrate_linear(model, batches())


def test_layers_whose_scales_do_not_reach_are_named_while_the_model_runs():
    model, data = make(), batches()
    scales = calibrate_linear(model, data, CalibrationSettings(margin=1.0), **IGNORED)
    quantize_(model, {"scaling": "static"}, scales=scales, **IGNORED)
    for x in data:
        model(x)
    with pytest.warns(UserWarning) as told:
        for x in data:
            model(100 * x)
    assert len(told) == 1
    message = str(told[0].message)
    assert "inputs of linear layers lie beyond the range of their static scales" in message
    for name in ("up", "down"):
        assert re.search(rf"\b{name} \([\d.]+ % of its inputs, up to [\d.]+ times", message)
    assert "Calibrate again" in message and "larger margin" in message
