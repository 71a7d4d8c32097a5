"""scaled_mm for every pair of granularities, and matvec, against float64."""

from dataclasses import replace

import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics.formats import E5M2
from octavo.numerics.granularity import PerBlock, PerChannel, PerTensor, PerToken
from octavo.numerics.quantize import Quantized, quantize
from octavo.reference.gemm import matvec, scaled_mm
from octavo.testing.cases import MATMULS, MatmulCase
from octavo.testing.inputs import Draw, make_matmul_inputs


def truth_of(a, b, bias) -> torch.Tensor:
    a = a.double() if isinstance(a, torch.Tensor) else a.dequantize(torch.float64)
    product = a @ b.dequantize(torch.float64).t()
    return product if bias is None else product + bias.double()


def check(case: MatmulCase, dtype: torch.dtype = torch.bfloat16) -> None:
    inputs = make_matmul_inputs(case, dtype=dtype)
    truth = truth_of(**inputs)
    precise = scaled_mm(**inputs, compute=torch.float64)
    size = float(truth.abs().max()) if truth.numel() else 0.0
    assert precise.shape == (case.rows, case.columns)
    torch.testing.assert_close(precise, truth, rtol=0, atol=1e-13 * size)
    single = scaled_mm(**inputs)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), truth, rtol=0, atol=1e-6 * size)


@pytest.mark.parametrize("case", MATMULS, ids=str)
def test_every_pair_of_granularities(case):
    check(case)


@pytest.mark.parametrize("depth", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize(
    "granularities",
    [
        (PerBlock(1, 64), PerBlock(64, 64)),
        (PerToken(), PerBlock(128, 128)),
        (PerBlock(1, 128), PerChannel()),
        (None, PerBlock(32, 16)),
    ],
    ids=str,
)
def test_depths_that_are_no_multiple_of_a_block(depth, granularities):
    a, b = granularities
    check(MatmulCase(depth=depth, a=a, b=b, has_bias=True))


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (1, 1), (1, 63), (63, 1), (65, 129), (5, 0)])
@pytest.mark.parametrize(
    "granularities",
    [(PerToken(), PerChannel()), (PerBlock(1, 64), PerBlock(64, 64)), (PerTensor(), PerTensor())],
    ids=str,
)
def test_rows_and_columns(rows, columns, granularities):
    a, b = granularities
    check(MatmulCase(rows=rows, columns=columns, a=a, b=b, has_bias=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_plain_activation(dtype):
    check(MatmulCase(a=None, has_bias=True), dtype)


def test_e5m2():
    draw = Draw(0)
    a, b = (
        quantize(draw.normal(5, 96), PerToken(), E5M2),
        quantize(draw.normal(7, 96), PerChannel()),
    )
    truth = truth_of(a, b, None)
    torch.testing.assert_close(scaled_mm(a, b, compute=torch.float64), truth, rtol=0, atol=1e-12)


def test_blocks_of_other_widths_do_not_fit():
    a = quantize(torch.ones(2, 64), PerBlock(1, 32))
    b = quantize(torch.ones(3, 64), PerBlock(1, 64))
    with pytest.raises(ConfigError, match="one width along K, got 32 and 64"):
        scaled_mm(a, b)


def test_each_row_has_its_own_scale():
    """A scale of zero rows out exactly its row or column."""
    case = MatmulCase(rows=4, columns=3)
    inputs = make_matmul_inputs(case)
    full = scaled_mm(**inputs)
    a, b = inputs["a"], inputs["b"]
    no_row = a.scale.clone()
    no_row[1] = 0
    no_column = b.scale.clone()
    no_column[2] = 0
    out = scaled_mm(replace(a, scale=no_row), replace(b, scale=no_column))
    expected = full.clone()
    expected[1] = expected[:, 2] = 0
    assert torch.equal(out, expected)


def test_products_of_a_block_are_scaled_after_they_are_added():
    """Two blocks that cancel before scaling would not after it."""
    data = torch.tensor([[448.0, -448.0, 1.0, 1.0]]).to(torch.float8_e4m3fn)
    ones = torch.ones(1, 4).to(torch.float8_e4m3fn)
    a = Quantized(data, torch.tensor([[1e30, 2.0]]), PerBlock(1, 2))
    b = Quantized(ones, torch.ones(()), PerTensor())
    assert float(scaled_mm(a, b)) == 4.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("depth", [0, 1, 63, 64, 65, 2880])
def test_matvec(depth, dtype):
    """Each sum of products and bias is off by at most K + 1 roundings of float32."""
    draw = Draw(0)
    x, weight = draw.normal(depth, dtype=dtype), draw.normal(9, depth, dtype=dtype)
    bias = draw.normal(9, dtype=dtype)
    truth = weight.double() @ x.double() + bias.double()
    torch.testing.assert_close(
        matvec(x, weight, bias, compute=torch.float64), truth, rtol=0, atol=1e-12
    )
    single = matvec(x, weight, bias)
    assert single.dtype == torch.float32 and single.shape == (9,)
    magnitude = weight.double().abs() @ x.double().abs() + bias.double().abs()
    assert ((single.double() - truth).abs() <= (depth + 1) * 2.0**-24 * magnitude).all()
    assert torch.equal(matvec(x, weight), matvec(x, weight, torch.zeros_like(bias)))


def test_matvec_of_what_is_not_finite():
    x = torch.tensor([0.0, 1.0, torch.inf])
    weight = torch.tensor(
        [[torch.inf, 0, 1], [0, torch.inf, 1], [0, -torch.inf, 1], [1, 1, 0], [0, 0, torch.nan]]
    )
    for dtype in (torch.bfloat16, torch.float32):
        out = matvec(x.to(dtype), weight.to(dtype))
        assert out.isnan().tolist() == [True, False, True, True, True]
        assert float(out[1]) == torch.inf


def test_matvec_does_not_follow_the_precision_of_products():
    """What torch may do to float32 matrix products is no part of the meaning."""
    draw = Draw(0)
    x, weight = draw.normal(300), draw.normal(9, 300)
    expected = matvec(x, weight)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(matvec(x, weight), expected)
    finally:
        torch.set_float32_matmul_precision(before)
