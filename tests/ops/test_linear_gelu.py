"""linear_gelu as an op: what it means, what it takes and what it refuses."""

import pytest
import torch
from torch.nn import functional as F

from octavo import ConfigError, UnsupportedError, ops
from octavo.kernels.device import CPU, Device
from octavo.kernels.linear_gelu.config import work
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
V100 = Device(type="cuda", name="NVIDIA V100", capability=(7, 0))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_inputs(rows=5, columns=6, depth=40, dtype=torch.bfloat16):
    draw = Draw(0)
    return {
        "x": draw.normal(rows, depth, dtype=dtype),
        "weight": draw.normal(columns, depth, dtype=dtype),
        "bias": draw.normal(columns, dtype=dtype),
    }


def call(**changes):
    return ops.linear_gelu(**(make_inputs() | changes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 63, 65])
def test_it_is_a_linear_layer_and_gelu(rows, dtype):
    """In float64, to within a float32 sum, GELU's slope of at most 1.13, and one rounding."""
    inputs = make_inputs(rows, columns=33, depth=300, dtype=dtype)
    x, weight, bias = (t.double() for t in inputs.values())
    truth = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    magnitude = x.abs() @ weight.abs().t() + bias.abs()
    of_sum = 1.13 * 302 * 2.0**-24 * magnitude
    of_gelu = 8 * 2.0**-24 * F.linear(x, weight, bias).abs()
    of_result = torch.finfo(dtype).eps / 2 * (truth.abs() + of_sum)
    error = (ops.linear_gelu(**inputs).double() - truth).abs()
    assert bool((error <= of_sum + of_gelu + of_result + torch.finfo(dtype).smallest_normal).all())


def test_nothing_is_rounded_in_between():
    """1 + 2⁻⁹ is no bfloat16: rounded first, it would be GELU of 1."""
    x = torch.tensor([[1.0, 2.0**-9]]).bfloat16()
    weight, bias = torch.ones(1, 2).bfloat16(), torch.zeros(1).bfloat16()
    expected = F.gelu(torch.tensor([[1 + 2.0**-9]]), approximate="tanh").bfloat16()
    assert_same_bits(ops.linear_gelu(x, weight, bias), expected)
    assert expected != F.gelu(torch.ones(1).bfloat16(), approximate="tanh")


@pytest.mark.parametrize("leading", [(5,), (1, 5), (5, 1, 1)], ids=str)
def test_the_result_has_the_leading_dimensions_of_x(leading):
    out = call(x=make_inputs()["x"].view(*leading, 40))
    assert out.shape == (*leading, 6) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert_same_bits(out.view(5, 6), call())
    assert_same_bits(call(x=make_inputs()["x"][0]), call(x=make_inputs()["x"][:1])[0])


def test_views():
    """Parts of a fused weight, an x whose values lie apart, and a bias between others."""
    inputs = make_inputs()
    wide = torch.cat([inputs["weight"] + 1, inputs["weight"]], dim=1)
    assert_same_bits(call(weight=wide[:, 40:]), call())
    assert_same_bits(call(x=inputs["x"].t().contiguous().t()), call())
    assert_same_bits(call(bias=inputs["bias"].repeat_interleave(2)[::2]), call())


def test_of_nothing():
    assert call(x=torch.zeros(0, 40).bfloat16()).shape == (0, 6)
    assert call(x=torch.zeros(2, 0, 40).bfloat16()).shape == (2, 0, 6)
    bias = make_inputs()["bias"]
    empty = {"x": torch.zeros(2, 3, 0).bfloat16(), "weight": torch.zeros(6, 0).bfloat16()}
    expected = F.gelu(bias.float(), approximate="tanh").bfloat16()
    assert_same_bits(call(**empty), expected.expand(2, 3, -1))
    assert call(weight=torch.zeros(0, 40).bfloat16(), bias=bias[:0]).shape == (5, 0)


def test_what_is_not_finite():
    # Not larger: torch's own GELU doubles values on the way, on some CPUs.
    x = torch.tensor([[torch.nan], [torch.inf], [1.5e38], [-1.5e38]]).bfloat16()
    out = ops.linear_gelu(x, torch.ones(1, 1).bfloat16(), torch.zeros(1).bfloat16()).flatten()
    assert out[0].isnan() and out[1] == torch.inf and out[2] == x[2, 0] and out[3] == 0


def test_which_one_runs_where():
    def chosen(device, dtype=torch.bfloat16, sizes=(5, 16, 8)):
        request = ops.Request(op="linear_gelu", device=device, dtype=dtype, sizes=sizes)
        return ops.select(request)

    assert (
        chosen(CPU).impl == "reference" and "GPUs alone, got CPU" in chosen(CPU).objections["torch"]
    )
    assert chosen(H200).impl == chosen(H200, torch.float16).impl == "torch"
    assert "got torch.float32" in chosen(H200, torch.float32).objections["torch"]
    for sizes in ((5, 20, 8), (5, 16, 9)):
        assert "unless 8 divides" in chosen(H200, sizes=sizes).objections["torch"]
    assert "depth of 0" in chosen(H200, sizes=(5, 16, 0)).objections["torch"]
    assert "got 7.0" in chosen(V100).objections["torch"]
    with pytest.raises(UnsupportedError, match="CUDA GPUs alone"):
        call(impl="torch")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"x": torch.zeros(())}, r"x \[..., K\] and a weight \[N, K\], got \[\]"),
        ({"x": torch.zeros(2, 39).bfloat16()}, r"got \[2, 39\] and \[6, 40\]"),
        ({"weight": torch.zeros(40).bfloat16()}, r"got \[5, 40\] and \[40\]"),
        ({"bias": torch.zeros(5).bfloat16()}, r"expected a bias \[6\], got \[5\]"),
        ({"bias": torch.zeros(6)}, "bias in torch.bfloat16 like x, got torch.float32"),
        ({"weight": torch.zeros(6, 40)}, "weight in torch.bfloat16 like x, got torch.float32"),
        ({"x": torch.zeros(2, 40).int()}, "torch.int32"),
        ({"bias": torch.zeros(6, device="meta").bfloat16()}, "bias on cpu like x, got it on meta"),
    ],
)
def test_what_it_refuses(changes, match):
    with pytest.raises(ConfigError, match=match):
        call(**changes)


def test_its_work():
    """Of each product two operations; each value of the operands and the result once."""
    assert work(2, 3, 5) == (2 * 2 * 3 * 5, 2 * (2 * 5 + 3 * 5 + 3 + 2 * 3))
