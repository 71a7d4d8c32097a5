"""matvec as an op: what it means, what it takes and what it refuses."""

import pytest
import torch

from octavo import ConfigError, UnsupportedError, ops
from octavo.kernels.device import CPU, Device
from octavo.reference.gemm import matvec as reference
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_inputs(columns=6, depth=40, dtype=torch.bfloat16, device="cpu"):
    draw = Draw(0, device)
    return {
        "x": draw.normal(1, depth, dtype=dtype),
        "weight": draw.normal(columns, depth, dtype=dtype),
        "bias": draw.normal(columns, dtype=dtype),
    }


def call(**changes):
    return ops.matvec(**(make_inputs() | changes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_a_linear_layer(dtype):
    """In float64, to within a float32 sum and one rounding."""
    inputs = make_inputs(columns=33, depth=300, dtype=dtype)
    truth = torch.nn.functional.linear(*(x.double() for x in inputs.values()))
    eps = torch.finfo(dtype).eps / 2 + 300 * 2.0**-24
    torch.testing.assert_close(ops.matvec(**inputs).double(), truth, rtol=eps, atol=300 * eps / 8)
    without = ops.matvec(inputs["x"], inputs["weight"])
    expected = reference(inputs["x"][0], inputs["weight"]).to(dtype)
    assert_same_bits(without, expected.unsqueeze(0))


@pytest.mark.parametrize("leading", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_the_result_has_the_leading_dimensions_of_x(leading):
    inputs = make_inputs()
    out = call(x=inputs["x"].view(*leading, 40))
    assert out.shape == (*leading, 6) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert_same_bits(out.view(1, 6), call())


def test_views():
    """A part of a fused weight, and an x whose values lie apart."""
    inputs = make_inputs()
    fused = torch.cat([inputs["weight"], inputs["weight"] + 1])
    assert_same_bits(call(weight=fused[:6]), call())
    wide = torch.cat([inputs["weight"] + 1, inputs["weight"]], dim=1)
    assert_same_bits(call(weight=wide[:, 40:]), call())
    apart = inputs["x"].t().repeat(1, 3)[:, 1:2].t()
    assert apart.stride(1) == 3
    assert_same_bits(call(x=apart), call())
    assert_same_bits(call(bias=inputs["bias"].repeat_interleave(2)[::2]), call())


def test_one_column_of_values_needs_no_order():
    """Where a row has one value, or the weight one row, its strides say nothing."""
    weight = Draw(0).normal(1, 6).t()
    assert weight.stride(0) == 1
    out = ops.matvec(torch.full((1, 1), 2.0), weight)
    assert_same_bits(out, 2 * weight.t().contiguous())


def test_of_nothing():
    bias = make_inputs()["bias"]
    empty = {"x": torch.zeros(1, 0).bfloat16(), "weight": torch.zeros(6, 0).bfloat16()}
    assert_same_bits(call(**empty), bias.unsqueeze(0))
    assert_same_bits(call(**empty, bias=None), torch.zeros(1, 6).bfloat16())
    no_columns = {"weight": torch.zeros(0, 40).bfloat16(), "bias": bias[:0]}
    assert call(**no_columns).shape == (1, 0)


def test_which_one_runs_where():
    def request(device):
        return ops.Request(op="matvec", device=device, dtype=torch.bfloat16)

    assert ops.select(request(H200)).impl == "triton"
    assert ops.select(request(CPU)).impl == "reference"
    turing = ops.select(request(Device("cuda", "T4", (7, 5))))
    assert turing.impl == "reference" and "8.0 or newer" in turing.objections["triton"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 40)}, r"x as one row, \[K\] or \[1, K\], got \[2, 40\]: torch.nn"),
        ({"x": torch.zeros(1, 3, 40)}, r"one row.*got \[1, 3, 40\]"),
        ({"x": torch.zeros(0, 40)}, r"one row.*got \[0, 40\]"),
        ({"x": torch.zeros(())}, r"one row.*got \[\]"),
        (
            {"x": torch.zeros(1, 40).double()},
            "x in bfloat16, float16 or float32, got torch.float64",
        ),
        ({"x": torch.zeros(1, 41)}, r"a weight \[N, 41\] for x \[1, 41\], got \[6, 40\]"),
        ({"weight": torch.zeros(40)}, r"a weight \[N, 40\].*got \[40\]"),
        ({"weight": torch.zeros(2, 6, 40)}, r"a weight \[N, 40\].*got \[2, 6, 40\]"),
        ({"weight": torch.zeros(6, 40)}, "weight in torch.bfloat16 like x, got torch.float32"),
        ({"weight": torch.zeros(6, 40).to(torch.float8_e4m3fn)}, "got torch.float8_e4m3fn"),
        (
            {"weight": torch.zeros(40, 6).bfloat16().t()},
            r"side by side, got strides \[1, 6\]: call",
        ),
        ({"bias": torch.zeros(5)}, r"a bias \[6\], got \[5\]"),
        ({"bias": torch.zeros(1, 6)}, r"a bias \[6\], got \[1, 6\]"),
        ({"bias": torch.zeros(6)}, "bias in torch.bfloat16 like x, got torch.float32"),
        (
            {"weight": torch.zeros(6, 40, device="meta", dtype=torch.bfloat16)},
            "weight on cpu like x, got it on meta",
        ),
        ({"impl": "cuda"}, "impl for matvec, one of triton, reference; got 'cuda'"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        call(**changes)


def test_asked_for_by_name_it_runs_or_raises():
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="needs a CUDA GPU"):
            call(impl="triton")
    assert_same_bits(call(impl="reference"), call())


def test_who_registers_an_implementation_gets_vectors():
    seen = []

    def run(x, weight, bias):
        seen.append((x.shape, weight.shape, bias.shape))
        return bias.repeat_interleave(2)[::2]  # not contiguous

    ops.register_impl("matvec", "mine", run)
    try:
        out = call(x=make_inputs()["x"].view(1, 1, 40), impl="mine")
    finally:
        ops.unregister_impl("matvec", "mine")
    assert seen == [((40,), (6, 40), (6,))]
    assert out.shape == (1, 1, 6) and out.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype):
    """The sums of another order differ by little, of which rounding may make a last digit."""
    inputs = make_inputs(columns=700, depth=2880, dtype=dtype)
    cpu = ops.matvec(**inputs)
    for impl in (None, "triton", "reference"):
        cuda = ops.matvec(**{name: x.cuda() for name, x in inputs.items()}, impl=impl)
        assert (cuda.dtype, cuda.shape) == (cpu.dtype, cpu.shape)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=eps, atol=1e-3)
