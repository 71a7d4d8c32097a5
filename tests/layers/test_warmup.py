"""octavo.warmup: the calls of linear layers, by a GPU made up."""

from importlib import import_module

import pytest
import torch

import octavo
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import Device
from octavo.layers.linear import Fp8Linear
from octavo.layers.warmup import linear_layers, parse_shapes, warmup
from octavo.numerics.granularity import PerBlock, PerChannel, PerTensor, PerToken
from octavo.recipe import LinearSettings

SHAPES = [(5, 32, 48), (7, 32, 48), (5, 48, 32)]


@pytest.fixture
def calls(monkeypatch):
    """The products that were asked for, on a CPU that says it is a GPU."""
    module, seen = import_module("octavo.ops.warm_up"), []
    run = module.scaled_mm

    def record(a, b, bias=None, *, activation=None, scale=None):
        data = a if isinstance(a, torch.Tensor) else a.data
        seen.append((tuple(data.shape), tuple(b.data.shape), b.granularity, activation))
        return run(a, b, bias, activation=activation, scale=scale)

    fake = Device(type="cpu", name="NVIDIA H200", capability=(9, 0), num_sms=132)
    monkeypatch.setattr(module, "default_device", lambda: fake)
    monkeypatch.setattr(module, "scaled_mm", record)
    return seen


def test_every_shape_is_run(calls):
    told = []
    names = warmup(SHAPES, on_call=told.append)
    assert told == names and len(names) == 3 * 5  # quantize, and four products
    assert {(a, b) for a, b, *_ in calls} == {
        ((5, 32), (48, 32)),
        ((7, 32), (48, 32)),
        ((5, 48), (32, 48)),
    }
    assert {activation for *_, activation in calls} == {None, PerToken()}
    assert octavo.warmup is warmup


@pytest.mark.parametrize(
    ("linear", "weight", "activations"),
    [
        ("fp8", PerChannel(), {None, PerToken()}),
        ({"weight": "tensor", "activation": "tensor"}, PerTensor(), {None, PerTensor()}),
        ({"weight_block_size": [128, 128]}, PerBlock(128, 128), {None, PerBlock(1, 128)}),
        ({"activation": None}, PerChannel(), {None}),
        (LinearSettings(scaling="static"), PerChannel(), {None, PerTensor()}),
    ],
)
def test_settings_are_those_of_a_recipe(calls, linear, weight, activations):
    warmup([(3, 128, 256)], linear)
    assert {b for _, _, b, _ in calls} == {weight}
    assert {activation for *_, activation in calls} == activations


@pytest.mark.parametrize("linear", ["fp8", {"scaling": "static"}, {"activation": None}])
def test_a_layer_runs_what_was_compiled(calls, monkeypatch, linear):
    """Sizes that it pads included."""
    settings = LinearSettings.read(linear)
    warmup([(3, 30, 50)], linear)
    compiled = {(a, b, how) for a, b, _, how in calls}
    plain = torch.nn.Linear(30, 50).bfloat16()
    layer = Fp8Linear.from_linear(
        plain, settings, input_scale=1.0 if settings.scaling == "static" else None
    )
    calls.clear()
    ops = import_module("octavo.ops")
    run = ops.scaled_mm

    def record(a, b, bias=None, *, activation=None, **options):
        data = a if isinstance(a, torch.Tensor) else a.data
        calls.append((tuple(data.shape), tuple(b.data.shape), activation))
        return run(a, b, bias, activation=activation, **options)

    monkeypatch.setattr("octavo.layers.linear.ops.scaled_mm", record)
    layer(torch.ones(3, 30, dtype=torch.bfloat16))
    assert len(calls) == 1 and set(calls) <= compiled


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_raises():
    with pytest.raises(UnsupportedError, match="the GPU they will run on, got CPU"):
        warmup(SHAPES)
    with pytest.raises(UnsupportedError, match="the GPU they will run on, got CPU"):
        warmup(SHAPES, device="cpu")


@pytest.mark.parametrize(
    "shapes", [[(1, 2)], [(0, 16, 16)], [(1, 16, 16.0)], [(True, 16, 16)], [3]]
)
def test_wrong_shapes_raise(shapes):
    with pytest.raises(ConfigError, match=r"expected a shape \(M, K, N\)"):
        warmup(shapes)


def test_what_a_gpu_cannot_run_is_not_compiled_for(calls, monkeypatch):
    a100 = Device(type="cuda", name="A100", capability=(8, 0), num_sms=108)
    monkeypatch.setattr(import_module("octavo.ops.check"), "describe", lambda device: a100)
    with pytest.raises(UnsupportedError, match="warmup: .*got A100 .*weights alone"):
        warmup(SHAPES)
    assert len(warmup(SHAPES, {"activation": None})) == 2 * 3 and len(calls) == 2 * 3


def test_nothing_to_do_raises():
    with pytest.raises(ConfigError, match="got none"):
        warmup([])
    with pytest.raises(ConfigError, match="expected 'fp8' or settings"):
        linear_layers(SHAPES, None)


def test_shapes_of_a_text():
    assert parse_shapes("4608x3072x12288, 1x16x16") == [(4608, 3072, 12288), (1, 16, 16)]
    for text in ("", "1x2", "1x2x3x4", "axbxc", "1x2x3,", "-1x2x3"):
        with pytest.raises(ConfigError, match="expected shapes MxKxN"):
            parse_shapes(text)
    with pytest.raises(ConfigError, match="sizes from 1 on"):
        parse_shapes("0x16x16")


@pytest.mark.gpu
def test_it_compiles_on_a_gpu():
    assert len(warmup([(64, 256, 512)])) == 5
