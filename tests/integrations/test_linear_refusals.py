"""What quantize_ refuses, and that the model is then as it was."""

import pytest
import torch
from torch import nn

from octavo import ConfigError, Recipe, UnsupportedError, apply_, quantize_, restore_
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import CheckpointError
from octavo.kernels.device import Device
from octavo.layers.linear import Fp8Linear
from octavo.ops import check
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw
from octavo_testkit.models.small_linear_model import (
    CHOSEN,
    Model,
    assert_untouched,
    fp8_layers,
    make,
    state,
)

A100 = Device(type="cuda", name="NVIDIA A100", capability=(8, 0), num_sms=108)


def test_applying_twice():
    model = make()
    quantize_(model, ignored_layers=["0"])
    x = Draw(1).normal(5, 63)
    before = model(x)
    for again in (lambda: quantize_(model), lambda: apply_(model, Recipe(linear="fp8"))):
        with pytest.raises(ConfigError, match="got 6 in FP8 already, such as blocks.1.img_mlp.0"):
            again()
    assert_same_bits(model(x), before)


def test_weights_cannot_be_restored():
    model = make()
    quantize_(model)
    with pytest.raises(UnsupportedError, match="8 that are FP8 now, .* load the model again"):
        restore_(model)
    assert fp8_layers(model) == CHOSEN
    # A layer that was made in FP8, as a loader does, has no other weight to go back to.
    made = nn.Sequential(Fp8Linear(32, 32, LinearSettings()))
    with pytest.raises(ConfigError, match="as it was made"):
        restore_(made)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_weight_at_the_end_and_nothing_is_changed(bad):
    model = make()
    model.blocks[3].img_mlp[2].weight[3, 4] = bad
    before = state(model)
    with pytest.raises(ConfigError, match="blocks.3.img_mlp.2: expected a finite weight, got 1"):
        quantize_(model)
    assert_untouched(model, before)
    quantize_(model, ignored_layers=["blocks.3.img_mlp.2"])


def test_hooks_would_be_lost():
    model = make()
    before = state(model)
    hook = model.blocks[2].img_mlp[0].register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(UnsupportedError, match="blocks.2.img_mlp.0: .* without hooks"):
        quantize_(model)
    hook.remove()
    model.blocks[2].img_mlp[0].forward = lambda x: x
    with pytest.raises(UnsupportedError, match="blocks.2.img_mlp.0: .* without hooks"):
        quantize_(model)
    del model.blocks[2].img_mlp[0].forward
    assert_untouched(model, before)
    quantize_(model)


def test_weights_that_are_not_there():
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ConfigError, match="one on meta: load it first"):
        quantize_(model)


def test_a_gpu_without_fp8(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: A100)
    model = make()
    before = state(model)
    with pytest.raises(
        UnsupportedError, match=r"blocks.0.img_mlp.0: .*\(sm_80\): .*\(activation=N"
    ):
        quantize_(model)
    assert_untouched(model, before)
    quantize_(model, {"activation": None})
    assert model(Draw(1).normal(5, 63)).isfinite().all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: quantize_(model, "int4"), "expected None, 'fp8' or settings"),
        (lambda model: quantize_(model, None), "expected 'fp8' or settings of linear layers, got"),
        (lambda model: quantize_(model, Recipe(kv_cache="fp8")), "got kv_cache: use apply_"),
        (lambda model: quantize_(model, Recipe()), "got an empty one: use apply_"),
        (
            lambda model: quantize_(model, Recipe(linear="fp8"), ignored_layers=["0"]),
            "expected ignored_layers, weight_only_layers and scales in the recipe",
        ),
        (
            lambda model: quantize_(model, {"ignored_layers": ["0"]}, ignored_layers=["1"]),
            "expected ignored_layers once",
        ),
        (lambda model: quantize_(model, {"bits": 8}), "unknown key 'bits'"),
        (lambda model: quantize_(model, ignored_layers="0"), "expected a list of patterns"),
        (lambda model: quantize_(model, {"scaling": "static"}), "needs scales, got none"),
        (lambda model: quantize_(model, scales={"a": {"input": 1.0}}), "nothing has scaling 'st"),
        (lambda model: quantize_(nn.Linear(32, 32)), "Fp8Linear.from_linear makes one of it"),
        (lambda model: quantize_(nn.LayerNorm(4)), "left alone are none"),
    ],
)
def test_calls_that_are_refused(call, said):
    model = make()
    before = state(model)
    with pytest.raises(ConfigError) as caught:
        call(model)
    assert said in str(caught.value)
    assert_untouched(model, before)


INPUTS = dict.fromkeys(CHOSEN, 0.05)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({n: 1.0 for n in CHOSEN[1:]}, "expected input scales for 'blocks.0.img_mlp.0', got none"),
        ({**INPUTS, CHOSEN[3]: float("nan")}, "positive finite"),
        ({**INPUTS, CHOSEN[3]: float("inf")}, "positive finite"),
        ({**INPUTS, CHOSEN[3]: 0.0}, "positive finite"),
        ({**INPUTS, CHOSEN[3]: -1.0}, "positive finite"),
    ],
)
def test_scales_that_are_missing_or_bad(inputs, said):
    model = make()
    before = state(model)
    scales = {name: {"input": scale} for name, scale in inputs.items()}
    with pytest.raises((ConfigError, CheckpointError), match=said):
        quantize_(model, {"activation_scheme": "static"}, scales=scales)
    assert_untouched(model, before)


def test_scales_for_something_else():
    model = make()
    attention = {"octavo": {"format_version": 1, "kind": "kv_cache"}}
    document = attention | {"layers": {"a": {"q": 1.0, "k": 1.0, "v": 1.0}}}
    with pytest.raises(CheckpointError, match="for linear, got a file for kv_cache: octavo.cal"):
        quantize_(model, {"activation_scheme": "static"}, scales=ScaleSet.from_dict(document))
