"""Fp8Linear on a GPU: the reference's numbers, without waiting, in graphs."""

import pytest
import torch
from torch import nn

from octavo import quantize_
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_no_waiting, assert_same_bits
from octavo.testing.inputs import Draw

pytestmark = pytest.mark.gpu
SETTINGS = {
    "default": {},
    "per tensor": {"weight": "tensor", "activation": "tensor"},
    "blocks": {"weight": "block 128x128"},
    "blocks by token": {"weight": "block 128x128", "activation": "token"},
    "static": {"scaling": "static"},
    "weight only": {"activation": None},
}
# What another order of sums in float32, and a result in bfloat16, may cost.
BF16_RMS = 2.0**-8


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make_pair(options, depth, columns, *, bias=True):
    """The same layer on a CPU and on the GPU."""
    plain = nn.Linear(depth, columns, bias=bias, dtype=torch.bfloat16)
    plain.weight.copy_(Draw(0).normal(columns, depth))
    settings = LinearSettings(**options)
    scale = 4.5 / 448 if settings.scaling == "static" else None
    layer = Fp8Linear.from_linear(plain, settings, input_scale=scale)
    return layer, Fp8Linear.from_linear(plain.cuda(), settings, input_scale=scale)


@pytest.mark.parametrize("sizes", [(256, 384), (1176, 1283), (63, 33), (16, 16)], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 64, 300])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_it_is_what_it_is_on_a_cpu(options, rows, sizes):
    layer, on_gpu = make_pair(options, *sizes)
    for name, x in on_gpu.state_dict().items():
        assert_same_bits(x, layer.state_dict()[name])
    x = Draw(1).normal(rows, sizes[0], dtype=torch.bfloat16)
    actual = on_gpu(x.cuda())
    assert actual.dtype == torch.bfloat16
    assert relative_rms(actual.cpu(), layer(x)) < BF16_RMS


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_an_empty_batch(options):
    layer = make_pair(options, 256, 384)[1]
    assert layer(torch.zeros(0, 256, dtype=torch.bfloat16, device="cuda")).shape == (0, 384)


@pytest.mark.parametrize("sizes", [(256, 384), (63, 33)], ids=str)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_it_waits_for_nothing_and_runs_in_a_graph(options, sizes):
    layer = make_pair(options, *sizes)[1]
    x = Draw(1).normal(32, sizes[0], dtype=torch.bfloat16).cuda()
    expected = layer(x)
    with assert_no_waiting():
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.mul_(2)
    graph.replay()
    assert relative_rms(out, layer(x)) < 1e-6 and not torch.equal(out, expected)


def test_memory_is_that_of_the_model_and_one_layer():
    size, num_layers = 2048, 8
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(num_layers)))
    model = model.to("cuda", torch.bfloat16)
    layer_bytes = 2 * size * size
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quantize_(model)
    # A layer in FP8 beside its plain weight, and what looking for NaN takes.
    assert torch.cuda.max_memory_allocated() - before < 3 * layer_bytes
    assert before - torch.cuda.memory_allocated() > 0.45 * num_layers * layer_bytes
