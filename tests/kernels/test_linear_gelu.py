"""cuBLAS's product with GELU at its end against float64, on a GPU."""

import pytest
import torch

from octavo import UnsupportedError, ops
from octavo.reference.gemm import linear_gelu as reference
from octavo.testing.inputs import Draw

pytestmark = pytest.mark.gpu
# The largest slope of GELU is 1.13; tanh of the GPU is off by 2⁻¹¹ of 1, times half the sum.
SLOPE, TANH = 1.13, 2.0**-11


def check(x, weight, bias):
    """A float32 sum, GELU of it, then one rounding to the result's dtype."""
    out = ops.linear_gelu(x, weight, bias, impl="torch")
    assert out.shape == (*x.shape[:-1], len(weight)) and out.dtype == x.dtype
    rows = x.reshape(-1, x.shape[-1])
    truth = reference(rows, weight, bias, compute=torch.float64)
    total = rows.double() @ weight.double().t() + bias.double()
    magnitude = rows.double().abs() @ weight.double().abs().t() + bias.double().abs()
    of_sum = SLOPE * (x.shape[-1] + 2) * 2.0**-24 * magnitude
    of_tanh = TANH * total.abs() / 2
    info = torch.finfo(x.dtype)
    of_result = info.eps / 2 * (truth.abs() + of_sum + of_tanh) + info.smallest_normal
    worst = (out.reshape(truth.shape).double() - truth).abs() - of_sum - of_tanh - of_result
    assert not len(rows) or bool((worst <= 0).all()), f"over the budget by {float(worst.max())}"
    return out


def draw_operands(rows, columns, depth, dtype=torch.bfloat16):
    draw = Draw(0, "cuda")
    weight = draw.normal(columns, depth, dtype=dtype) / max(1, depth) ** 0.5
    return draw.normal(rows, depth, dtype=dtype), weight, draw.normal(columns, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 4096])
@pytest.mark.parametrize(("columns", "depth"), [(8, 8), (64, 64), (1000, 304), (256, 72)])
def test_sizes(rows, columns, depth, dtype):
    check(*draw_operands(rows, columns, depth, dtype))


def test_a_layer_of_qwen_image():
    check(*draw_operands(4096, 12288, 3072))


def test_leading_dimensions_and_views():
    x, weight, bias = draw_operands(128, 96, 64)
    expected = check(x, weight, bias)
    batched = check(x.view(2, 64, 64), weight, bias)
    assert torch.equal(batched.view(128, 96), expected)
    wide = torch.cat([weight + 1, weight], dim=1)
    check(x, wide[:, 64:], bias)
    check(x[::2], weight[::3], bias[::3])
    check(x.t().contiguous().t(), weight, bias)
    check(x.t(), *draw_operands(128, 96, 128)[1:])
    for shift in (1, 3, 8):  # neither rows nor their beginnings at multiples of 16 bytes
        wide = torch.cat([x[:, :shift], x], dim=1)
        check(wide[:, shift:], weight, bias)
        check(x, torch.cat([weight[:, :shift], weight], dim=1)[:, shift:], bias)
        check(x, weight, torch.cat([bias[:shift], bias])[shift:])


def test_sizes_that_would_be_rounded_first_take_the_reference():
    for columns, depth in ((63, 64), (64, 65), (1, 1)):
        x, weight, bias = draw_operands(5, columns, depth)
        with pytest.raises(UnsupportedError, match="unless 8 divides"):
            ops.linear_gelu(x, weight, bias, impl="torch")
        expected = reference(x, weight, bias).bfloat16()
        assert torch.equal(ops.linear_gelu(x, weight, bias), expected)


def test_nothing():
    x, weight, bias = draw_operands(4, 96, 64)
    assert check(x[:0], weight, bias).shape == (0, 96)
    expected = torch.nn.functional.gelu(bias.float(), approximate="tanh").bfloat16()
    assert torch.equal(ops.linear_gelu(x[:, :0], weight[:, :0], bias), expected.expand(4, -1))


def test_what_is_not_finite():
    """NaN stays, and so does what is too large; GELU of very negative sums is 0."""
    values = [torch.nan, torch.inf, 1e38, -1e38, -100.0, 100.0]
    x = torch.zeros(6, 64, device="cuda")
    x[:, 0] = torch.tensor(values)
    weight = torch.zeros(32, 64, device="cuda")
    weight[:, 0] = 1
    out = ops.linear_gelu(x.bfloat16(), weight.bfloat16(), torch.zeros(32).bfloat16().cuda())
    assert out[0].isnan().all() and (out[1] == torch.inf).all()
    assert torch.equal(out[2], x[2, 0].bfloat16().expand(32)) and not out[3:5].any()
    assert (out[5] == 100).all()


def test_nothing_is_rounded_in_between():
    """Sums that are no bfloat16, and whose GELU would be another if they were rounded first."""
    x, weight, bias = draw_operands(512, 256, 256)
    out = ops.linear_gelu(x, weight, bias)
    truth = reference(x, weight, bias, compute=torch.float64)
    stock = torch.nn.functional.gelu(
        torch.nn.functional.linear(x, weight, bias), approximate="tanh"
    )
    errors = [(each.double() - truth).norm() for each in (out, stock)]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_in_a_compiled_graph():
    x, weight, bias = draw_operands(128, 96, 64)
    function = torch.compile(lambda x: ops.linear_gelu(x * 2, weight, bias) + 1, fullgraph=True)
    expected = ops.linear_gelu(x * 2, weight, bias) + 1
    torch.testing.assert_close(function(x), expected, rtol=2**-8, atol=2**-8)
