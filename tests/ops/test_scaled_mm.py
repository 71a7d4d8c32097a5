"""scaled_mm: activations that are quantized in front, and which implementation runs."""

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import CPU, Device
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerBlock, PerChannel, PerHead, PerTensor, PerToken
from octavo.numerics.quantize import quantize
from octavo.ops.select import Request, select
from octavo.reference import gemm
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

FP8, BF16 = E4M3.dtype, torch.bfloat16
H200 = Device("cuda", "NVIDIA H200", (9, 0), num_sms=132)
L4 = Device("cuda", "L4", (8, 9), num_sms=58)
A100 = Device("cuda", "A100", (8, 0), num_sms=108)


def draw(rows=5, columns=7, depth=96, granularity=PerChannel()):
    x = Draw(0).normal(rows, depth, dtype=BF16)
    return x, quantize(Draw(1).normal(columns, depth), granularity)


@pytest.mark.parametrize("activation", [PerTensor(), PerToken(), PerBlock(1, 32)], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, torch.float32], ids=str)
def test_an_activation_is_quantized_first(activation, out_dtype):
    x, weight = draw()
    bias = Draw(2).normal(7)
    actual = ops.scaled_mm(x, weight, bias, activation=activation, out_dtype=out_dtype)
    expected = gemm.scaled_mm(quantize(x, activation), weight, bias).to(out_dtype)
    assert_same_bits(actual, expected)
    plain = ops.scaled_mm(x, weight, bias, out_dtype=out_dtype)
    assert not torch.equal(plain, actual)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": PerChannel()}, "a per tensor, token or block, got per channel"),
        ({"activation": PerHead()}, "a per tensor, token or block, got per head"),
        ({"activation": PerBlock(2, 32)}, "blocks of one row for a, got block 2x32"),
        (
            {"activation": PerBlock(1, 16), "b": draw(granularity=PerBlock(1, 32))[1]},
            "blocks of one width along K, got block 1x16 and block 1x32",
        ),
        (
            {"activation": PerToken(), "a": quantize(draw()[0], PerToken())},
            "a is torch.float8_e4m3fn: leave activation and scale out",
        ),
        (
            {"scale": torch.ones(()), "a": quantize(draw()[0], PerToken())},
            "leave activation and scale out",
        ),
        ({"scale": torch.ones(())}, "an activation per tensor for a static scale, got none"),
        (
            {"scale": torch.ones(()), "activation": PerToken()},
            "an activation per tensor for a static scale, got per token",
        ),
        (
            {"scale": torch.ones(5), "activation": PerTensor()},
            "granularity tensor of a [] needs a float32 scale of shape [], got torch.float32 [5]",
        ),
        ({"activation": PerToken(), "a": torch.zeros(5, 96).double()}, "a in bfloat16, float16"),
        ({"impl": "cutlass"}, "impl for scaled_mm, one of torch, triton, reference; got 'cutlass'"),
    ],
)
def test_a_wrong_call_is_refused(changes, message):
    x, weight = draw()
    with pytest.raises(ConfigError) as error:
        ops.scaled_mm(**({"a": x, "b": weight} | changes))
    assert message in str(error.value)


def test_an_implementation_is_told_how_to_quantize():
    calls = []

    def run(a, b, bias, *, out_dtype, activation):
        calls.append((a.dtype, activation))
        return a.new_zeros(len(a), len(b.data), dtype=out_dtype)

    ops.register_impl("scaled_mm", "mine", run)
    try:
        x, weight = draw()
        ops.scaled_mm(x, weight, activation=PerBlock(1, 32), impl="mine")
        ops.scaled_mm(x, weight, impl="mine")
    finally:
        ops.unregister_impl("scaled_mm", "mine")
    assert calls == [(BF16, PerBlock(1, 32)), (BF16, None)]


@pytest.mark.parametrize("activation", [PerToken(), PerBlock(1, 32)], ids=str)
def test_it_compiles_as_one_node(activation):
    weight = draw()[1]

    def function(x):
        return ops.scaled_mm(x + 1, weight, activation=activation) * 2

    run = torch.compile(function, fullgraph=True, backend="aot_eager")
    for rows in (5, 9):
        x = draw(rows)[0]
        assert_same_bits(run(x), function(x))


def request(device=H200, rows=4096, dtype=FP8, granularity="token by channel", **changes):
    options = {"other_dtype": FP8, "sizes": (rows, 6144, 4096), "out_dtype": BF16} | changes
    return Request(op="scaled_mm", device=device, dtype=dtype, granularity=granularity, **options)


ACTIVATION = {"dtype": BF16, "features": frozenset({"activation"})}


@pytest.mark.parametrize(
    ("asked", "impl"),
    [
        (request(), "torch"),
        (request(rows=129), "torch"),
        (request(rows=128), "triton"),
        (request(sizes=(128, 6144, 8192)), "torch"),
        (request(rows=64), "triton"),
        (request(rows=1, granularity="tensor by tensor"), "torch"),
        (request(bias_dtype=BF16), "torch"),
        (request(bias_dtype=torch.float32), "triton"),
        (request(granularity="block 1x128 by block 128x128"), "triton"),
        (request(sizes=(4096, 6144, 4095)), "triton"),
        (request(dtype=BF16, granularity="tensor by channel"), "triton"),
        (request(**ACTIVATION), "torch"),
        (request(rows=16, **ACTIVATION), "triton"),
        (request(sizes=None, out_dtype=None), "torch"),
        (request(dtype=E5M2.dtype, other_dtype=E5M2.dtype), "triton"),
        (request(L4), "triton"),
        (request(L4, granularity="tensor by tensor"), "torch"),
        (request(L4, rows=16, **ACTIVATION), "triton"),
        (request(A100), "reference"),
        (request(A100, dtype=BF16, granularity="tensor by channel"), "triton"),
        (request(CPU), "reference"),
    ],
)
def test_selection(asked, impl):
    assert select(asked).impl == impl


def test_a_reluctant_implementation_runs_when_it_is_asked_for():
    assert select(request(rows=1), "torch").impl == "torch"
    objections = select(request(rows=1)).objections
    assert objections == {"torch": "up to 64 rows the Triton kernel reads the weight faster"}
    with pytest.raises(UnsupportedError, match="FP8 by FP8, got torch.bfloat16"):
        select(request(dtype=BF16), "torch")
