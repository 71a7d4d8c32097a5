"""The scaled_mm kernels against the reference and float64, on a GPU or in the interpreter."""

from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.kernels.device import CPU, Device
from octavo.kernels.scaled_mm.config import (
    MatmulShape,
    StreamConfig,
    TileConfig,
    candidates,
    default,
    is_valid,
    objection,
    torch_objection,
    torch_reluctance,
    work,
)
from octavo.numerics.accumulator import HOPPER_FP8
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerBlock, PerChannel, PerTensor, PerToken
from octavo.numerics.quantize import Quantized, quantize
from octavo.reference import gemm
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.cases import MATMULS, MatmulCase
from octavo.testing.inputs import Draw, make_matmul_inputs

pytest.importorskip("triton")
from octavo.kernels.scaled_mm.triton import _fits_tma, scaled_mm

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
H200 = Device("cuda", "NVIDIA H200", (9, 0), num_sms=132)
L4 = Device("cuda", "L4", (8, 9), num_sms=58)
A100 = Device("cuda", "A100", (8, 0), num_sms=108)
SMALL = TileConfig(block_m=64, block_n=32, block_k=64, group=2)


def check(a, b, bias=None, *, out_dtype=BF16, config=None):
    """Within twice the reference's distance from float64, and what rounding the result costs."""
    actual = scaled_mm(a, b, bias, out_dtype=out_dtype, config=config)
    assert actual.is_contiguous()
    truth = gemm.scaled_mm(a, b, bias, compute=torch.float64)
    assert_within_budget(actual, truth=truth, model=gemm.scaled_mm(a, b, bias))


def check_case(case, device, *, dtype=BF16, **options):
    check(**make_matmul_inputs(case, dtype=dtype, device=device), **options)


@pytest.mark.parametrize("rows", [63, 70])
@pytest.mark.parametrize("case", MATMULS, ids=str)
def test_every_pair_of_granularities(case, rows, device):
    """Few rows stream the weight, more are computed in tiles."""
    check_case(replace(case, rows=rows), device)


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("depth", [0, 1, 63, 200])
@pytest.mark.parametrize(
    "granularities",
    [
        (PerBlock(1, 64), PerBlock(64, 64)),
        (PerBlock(1, 48), PerBlock(5, 48)),
        (PerToken(), PerBlock(128, 300)),
        (None, PerBlock(32, 16)),
        (PerTensor(), PerChannel()),
    ],
    ids=str,
)
def test_depths_that_are_no_multiple_of_anything(granularities, depth, rows, device):
    a, b = granularities
    check_case(MatmulCase(rows=rows, columns=33, depth=depth, a=a, b=b, has_bias=True), device)


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (1, 1), (1, 63), (65, 129), (5, 0)])
@pytest.mark.parametrize("a", [PerToken(), None], ids=str)
def test_rows_and_columns(rows, columns, a, device):
    check_case(MatmulCase(rows=rows, columns=columns, depth=32, a=a, has_bias=True), device)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, is_tma=False, num_parts=1)], ids=str)
def test_tiles(config, device):
    """More tiles than programs, in groups with a last one that is smaller."""
    case = MatmulCase(rows=300, columns=70, depth=96, has_bias=True)
    check_case(case, device, config=config)
    check_case(case, device, config=replace(config, programs_per_sm=0, is_flat=False))


@pytest.mark.parametrize(("num_splits", "is_tma"), [(1, True), (3, False), (3, True)])
@pytest.mark.parametrize("a", [PerToken(), PerBlock(1, 64), None], ids=str)
def test_splits(num_splits, is_tma, a, device):
    config = StreamConfig(block_n=64, block_k=64, num_splits=num_splits, is_tma=is_tma)
    case = MatmulCase(rows=17, columns=70, depth=5 * 64, a=a, has_bias=True)
    check_case(case, device, config=config)
    inputs = make_matmul_inputs(case, device=device)
    results = [scaled_mm(**inputs, out_dtype=F32, config=config) for _ in range(2)]
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("by_bits", [False, True])
def test_a_plain_activation(dtype, fmt, by_bits, device):
    draw = Draw(0, device)
    a, bias = draw.normal(9, 80, dtype=dtype), draw.normal(20, dtype=dtype)
    b = quantize(draw.normal(20, 80), PerChannel(), fmt)
    config = StreamConfig(block_n=32, block_k=64, is_decoded_by_bits=by_bits, num_stages=3)
    check(a, b, bias, out_dtype=dtype, config=config)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("by_bits", [False, True])
def test_every_code_is_decoded(dtype, fmt, by_bits, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(fmt.dtype).view(256, 1)
    b = Quantized(codes, torch.ones((), device=device), PerTensor())
    config = StreamConfig(block_k=32, is_decoded_by_bits=by_bits)
    a = torch.ones(1, 1, dtype=dtype, device=device)
    out = scaled_mm(a, b, None, out_dtype=F32, config=config)
    torch.testing.assert_close(out[0], codes[:, 0].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_formats(formats, rows, device):
    draw = Draw(0, device)
    a = quantize(draw.normal(rows, 96), PerToken(), formats[0])
    check(a, quantize(draw.normal(40, 96), PerChannel(), formats[1]))


@pytest.mark.parametrize("out_dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("bias_dtype", [BF16, F16, F32], ids=str)
def test_bias_and_result(out_dtype, bias_dtype, device):
    """Small whole numbers are exact in every dtype, and in the tensor core's sums."""
    a = Draw(0, device).normal(70, 64).round().clamp(-2, 2)
    b = Draw(1, device).normal(33, 64).round().clamp(-2, 2)
    bias = Draw(2, device).normal(33).round().to(bias_dtype)
    one = torch.ones((), device=device)
    out = scaled_mm(
        Quantized(a.to(E4M3.dtype), one, PerTensor()),
        Quantized(b.to(E4M3.dtype), one, PerTensor()),
        bias,
        out_dtype=out_dtype,
    )
    assert_same_bits(out, (a @ b.t() + bias.float()).to(out_dtype))


@pytest.mark.parametrize("rows", [5, 70])
def test_strided_operands(rows, device):
    inputs = make_matmul_inputs(MatmulCase(rows=rows, columns=20, depth=64), device=device)
    expected = scaled_mm(**inputs, out_dtype=F32)
    a, b = inputs["a"], inputs["b"]
    wide = torch.cat([a.data.view(torch.uint8)] * 3, dim=1).view(a.data.dtype)
    for data in (wide[:, 64:128], wide[:, 64:128].t().contiguous().t()):
        strided = replace(a, data=data)
        assert_same_bits(scaled_mm(strided, b, None, out_dtype=F32), expected)
    odd = torch.cat([b.data.view(torch.uint8)[:, :1], b.data.view(torch.uint8)], dim=1)
    weight = replace(b, data=odd.view(b.data.dtype)[:, 1:])  # rows begin at odd addresses
    assert_same_bits(scaled_mm(a, weight, None, out_dtype=F32), expected)


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("is_plain", [False, True])
def test_nan_and_inf_stay_where_they_are(rows, is_plain, device):
    x = Draw(0, device).normal(rows, 64)
    x[3, 5] = torch.nan
    weight = Draw(1, device).normal(20, 64)
    weight[7, 9] = torch.nan
    a = x.bfloat16() if is_plain else quantize(x, PerToken())
    check(a, quantize(weight, PerChannel()))
    infinite = quantize(weight, PerChannel(), E5M2)
    infinite.data[2, 3] = torch.inf
    check(a, infinite)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(
    "activation", [PerTensor(), PerToken(), PerBlock(1, 64), PerBlock(1, 40)], ids=str
)
@pytest.mark.parametrize("depth", [0, 200])
def test_activations_are_quantized_first(rows, activation, depth, device):
    x = Draw(0, device).normal(rows, depth, dtype=BF16)
    b = quantize(Draw(1, device).normal(70, depth), PerChannel())
    expected = scaled_mm(quantize(x, activation), b, None, out_dtype=F32)
    actual = scaled_mm(x, b, None, out_dtype=F32, activation=activation)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("depth", [0, 200])
def test_activations_with_a_static_scale(rows, depth, device):
    x = Draw(0, device).normal(rows, depth, dtype=BF16)
    scale = torch.tensor(0.007, device=device)
    b = quantize(Draw(1, device).normal(70, depth), PerChannel())
    known = quantize(x, PerTensor(), scale=scale)
    expected = scaled_mm(known, b, None, out_dtype=F32)
    actual = scaled_mm(x, b, None, out_dtype=F32, activation=PerTensor(), scale=scale)
    assert_same_bits(actual, expected)


def test_tokens_find_counters_at_zero(device):
    """Splits need counters, which the quantization in front sets back."""
    x = Draw(0, device).normal(3, 300, dtype=BF16)
    b = quantize(Draw(1, device).normal(70, 300), PerChannel())
    config = StreamConfig(block_n=32, block_k=64, num_splits=3, is_dependent=x.is_cuda)
    expected = scaled_mm(quantize(x, PerToken()), b, None, out_dtype=F32, config=config)
    actual = scaled_mm(x, b, None, out_dtype=F32, activation=PerToken(), config=config)
    assert_same_bits(actual, expected)


def test_long_sums_are_exact(device):
    """Ones: the tensor core's own sum would stand still at 16384 (docs/explanation/numerics.md)."""
    depth = 1 << 15
    assert HOPPER_FP8.matmul(*[torch.ones(1, depth).to(E4M3.dtype)] * 2).item() == 16384
    ones = torch.ones(2, depth, device=device).to(E4M3.dtype)
    one = torch.ones((), device=device)
    a, b = Quantized(ones, one, PerTensor()), Quantized(ones[:1], one, PerTensor())
    assert scaled_mm(a, b, None, out_dtype=F32).tolist() == [[depth]] * 2


SHAPES = [
    MatmulShape(*sizes)
    for sizes in ((1, 6144, 4096), (16, 4096, 14336), (64, 10, 7), (4608, 12288, 3072), (99, 5, 0))
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", [H200, L4, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("width", [0, 16, 48, 64, 128, 384])
@pytest.mark.parametrize("is_fp8", [True, False])
def test_defaults_and_candidates_are_valid(shape, device, width, is_fp8):
    found = candidates(shape, device, width, is_fp8=is_fp8)
    assert found[0] == default(shape, device, width, is_fp8=is_fp8)
    assert len(set(found)) == len(found) > 1
    assert all(is_valid(config, width, is_fp8=is_fp8) for config in found)


def test_rows_that_are_copied_in_bulk_lie_apart():
    x, weight = torch.zeros(4, 32, dtype=E4M3.dtype), torch.zeros(8, 32, dtype=E4M3.dtype)
    assert _fits_tma(x, weight, TileConfig())
    assert not _fits_tma(x[:1].expand(4, 32), weight, TileConfig())
    assert not _fits_tma(x.flatten().as_strided((4, 32), (16, 1)), weight, TileConfig())
    assert not _fits_tma(x, weight[:, 1:], TileConfig())


def test_settings_that_are_not_valid():
    assert not is_valid(TileConfig(block_n=96), 0, is_fp8=True)
    assert not is_valid(TileConfig(block_k=256), 0, is_fp8=True)  # summed up by the tensor core
    assert not is_valid(TileConfig(), 0, is_fp8=False)
    assert not is_valid(StreamConfig(block_k=256), 128, is_fp8=True)
    assert not is_valid(StreamConfig(num_splits=0), 0, is_fp8=True)


def test_work():
    flops, num_bytes = work(MatmulShape(4, 8, 16), a_bytes=1, out_bytes=2)
    assert (flops, num_bytes) == (2 * 4 * 8 * 16, 4 * 16 + 8 * 16 + 2 * 4 * 8)


@pytest.mark.parametrize(
    ("device", "is_fp8", "activation", "message"),
    [
        (CPU, False, None, "needs a CUDA GPU, got CPU"),
        (Device("cuda", "T4", (7, 5)), False, None, "8.0 or newer, got 7.5"),
        (A100, True, None, "FP8 by FP8 needs compute capability 8.9 or newer, got 8.0"),
    ],
)
def test_objections(device, is_fp8, activation, message):
    assert message in objection(device, is_fp8=is_fp8, activation=activation)


def test_no_objection_on_ada():
    assert objection(L4, is_fp8=True, activation=PerToken()) is None


@pytest.mark.parametrize(
    ("device", "is_fp8", "activation"),
    [(H200, True, PerToken()), (L4, True, None), (A100, False, None)],
)
def test_no_objection(device, is_fp8, activation):
    assert objection(device, is_fp8=is_fp8, activation=activation) is None


GOOD = {
    "device": H200,
    "shape": MatmulShape(17, 32, 48),
    "dtypes": (E4M3.dtype, E4M3.dtype),
    "granularities": (PerToken(), PerChannel()),
    "bias_dtype": None,
    "out_dtype": BF16,
}
PER_TENSOR = {"granularities": (PerTensor(), PerTensor())}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": CPU}, "needs a CUDA GPU, got CPU"),
        ({"device": A100}, "8.9 or newer, got 8.0"),
        ({"dtypes": (BF16, E4M3.dtype)}, "FP8 by FP8, got torch.bfloat16 by torch.float8_e4m3fn"),
        ({"dtypes": (E5M2.dtype, E5M2.dtype)}, "does not multiply e5m2 by e5m2"),
        ({"granularities": (PerBlock(1, 128), PerChannel())}, "got block 1x128 by channel"),
        ({"granularities": (PerToken(), PerBlock(128, 128))}, "got token by block 128x128"),
        ({"device": L4}, "one scale for each row needs compute capability 9.0"),
        ({"bias_dtype": F32}, "as the result is, got torch.float32"),
        (PER_TENSOR | {"bias_dtype": BF16, "out_dtype": F16}, "as the result is, got torch.bfloat"),
        (PER_TENSOR | {"bias_dtype": F32, "out_dtype": F32}, "as the result is, got torch.float32"),
        ({"shape": MatmulShape(0, 32, 48)}, "got 0 rows, 32 columns and depth 48"),
        ({"shape": MatmulShape(17, 33, 48)}, "multiples of 16, got 17 rows, 33 columns"),
        ({"shape": MatmulShape(17, 32, 40)}, "and depth 40"),
        ({"shape": MatmulShape(17, 32, 0)}, "and depth 0"),
    ],
)
def test_what_torch_cannot_run(changes, message):
    assert torch_objection(**GOOD) is None
    assert message in torch_objection(**(GOOD | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"bias_dtype": BF16},
        {"shape": None},
        {"dtypes": (E5M2.dtype, E4M3.dtype)},
        {"granularities": (PerToken(), PerTensor())},
        PER_TENSOR | {"device": L4, "out_dtype": F16, "bias_dtype": F16},
        PER_TENSOR | {"out_dtype": F32},
        {"out_dtype": F16, "bias_dtype": F16},
    ],
)
def test_what_torch_can_run(changes):
    assert torch_objection(**(GOOD | changes)) is None


def test_few_rows_are_not_for_torch():
    rows, tensors = (PerToken(), PerChannel()), (PerTensor(), PerTensor())
    assert "64 rows" in torch_reluctance(MatmulShape(64, 4096, 4096), rows)
    assert "64 tiles" in torch_reluctance(MatmulShape(256, 4096, 4096), rows)
    assert "64 tiles" in torch_reluctance(MatmulShape(1024, 1024, 5120), rows)
    assert torch_reluctance(MatmulShape(1025, 1024, 1024), rows) is None
    assert torch_reluctance(MatmulShape(256, 4097, 4096), rows) is None
    assert torch_reluctance(MatmulShape(65, 1024, 5121), rows) is None
    assert torch_reluctance(MatmulShape(512, 1024, 1024), tensors) is None
    assert torch_reluctance(MatmulShape(1, 4096, 4096), tensors) is None
    assert torch_reluctance(None, rows) is None


LARGE = [(8192, 8192, 8192), (4608, 3072, 12288), (14040, 6144, 2048), (4096, 4100, 2040)]
LLAMA = [(6144, 4096), (28672, 4096), (4096, 14336)]


def sampled(a, b, bias, num_rows=64):
    """Some rows of the product in float64, and which."""
    rows = torch.randperm(len(a.data))[:num_rows].to(a.data.device)
    part = Quantized(a.data[rows], a.scale[rows], a.granularity)
    return rows, gemm.scaled_mm(part, b, bias, compute=torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("granularities", [(PerToken(), PerChannel())], ids=str)
def test_large_products_on_a_gpu(shape, impl, granularities):
    rows, columns, depth = shape
    if impl == "torch" and (columns % 16 or depth % 16):
        pytest.skip("torch._scaled_mm takes multiples of 16")
    a = quantize(torch.randn(rows, depth, device="cuda"), granularities[0])
    b = quantize(torch.randn(columns, depth, device="cuda"), granularities[1])
    bias = torch.randn(columns, device="cuda", dtype=BF16)
    out = ops.scaled_mm(a, b, bias, impl=impl)
    chosen, truth = sampled(a, b, bias)
    assert_within_budget(out[chosen], truth=truth, model=truth.float())
    for _ in range(3):
        assert_same_bits(ops.scaled_mm(a, b, bias, impl=impl), out)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "depth"), LLAMA)
@pytest.mark.parametrize("rows", [1, 7, 16, 64])
@pytest.mark.parametrize("activation", [None, PerToken(), PerTensor(), PerBlock(1, 128)], ids=str)
def test_few_rows_on_a_gpu(rows, columns, depth, activation):
    x = torch.randn(rows, depth, device="cuda", dtype=BF16)
    b = quantize(torch.randn(columns, depth, device="cuda"), PerChannel())
    out = ops.scaled_mm(x, b, activation=activation, impl="triton")
    a = x if activation is None else quantize(x, activation)
    truth = gemm.scaled_mm(a, b, compute=torch.float64)
    assert_within_budget(out, truth=truth, model=truth.float())
    for _ in range(10):
        assert_same_bits(ops.scaled_mm(x, b, activation=activation, impl="triton"), out)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel()], ids=str)
def test_a_static_scale_on_a_gpu(rows, granularity, impl):
    x = Draw(0, "cuda").normal(rows, 512, dtype=BF16)
    scale = torch.tensor(0.007, device="cuda")
    b = quantize(Draw(1, "cuda").normal(96, 512), granularity)
    out = ops.scaled_mm(x, b, activation=PerTensor(), scale=scale, impl=impl)
    truth = gemm.scaled_mm(quantize(x, PerTensor(), scale=scale), b, compute=torch.float64)
    assert_within_budget(out, truth=truth, model=truth.float())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 300])
@pytest.mark.parametrize(
    "granularities",
    [(PerTensor(), PerTensor()), (PerToken(), PerTensor()), (PerTensor(), PerChannel())],
    ids=str,
)
def test_torch_runs_what_it_does_not_object_to(rows, granularities):
    draw = Draw(0, "cuda")
    wide = quantize(draw.normal(rows, 200), granularities[0])
    a = replace(wide, data=wide.data[:, 3:163])
    b = quantize(draw.normal(48, 160), granularities[1])
    out = ops.scaled_mm(a, b, impl="torch")
    truth = gemm.scaled_mm(a, b, compute=torch.float64)
    assert_within_budget(out, truth=truth, model=gemm.scaled_mm(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_accumulation_is_two_level_on_a_gpu(impl):
    """All of 131072 products of one sign: one level would lose most of them."""
    depth = 131072
    a = Quantized(
        torch.rand(256, depth, device="cuda").to(E4M3.dtype),
        torch.ones((), device="cuda"),
        PerTensor(),
    )
    b = replace(a, data=(1 + torch.randn(256, depth, device="cuda")).to(E4M3.dtype))
    out = ops.scaled_mm(a, b, out_dtype=F32, impl=impl).double()
    truth = gemm.scaled_mm(a, b, compute=torch.float64)
    assert float(((out - truth) / truth).abs().max()) < 2**-10


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    rows, depth = 2**31 // 4096 + 5, 4096
    a = torch.zeros(rows, depth, device="cuda", dtype=E4M3.dtype)
    tail = quantize(torch.randn(3, depth, device="cuda"), PerTensor())
    a[-3:] = tail.data
    b = quantize(torch.randn(64, depth, device="cuda"), PerChannel())
    out = ops.scaled_mm(replace(tail, data=a), b, impl="triton")
    truth = gemm.scaled_mm(tail, b, compute=torch.float64)
    assert_within_budget(out[-3:], truth=truth, model=truth.float())
    assert not out[:-3].any()
    x = a.view(torch.uint8)[:, :64].to(BF16)  # plain, and a result of many elements
    wide = quantize(torch.ones(4112, 64, device="cuda"), PerTensor())
    out = ops.scaled_mm(x, wide, impl="triton")
    assert out.numel() > 2**31
    torch.testing.assert_close(out[-3:].float()[:, 0], x[-3:].float().sum(1), rtol=2**-7, atol=0)


@pytest.mark.gpu
def test_a_cuda_graph_of_a_linear_layer():
    x = torch.randn(4, 4096, device="cuda", dtype=BF16)
    b = quantize(torch.randn(4096, 4096, device="cuda"), PerChannel())
    ops.scaled_mm(x, b, activation=PerToken())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.scaled_mm(x, b, activation=PerToken())
    for size in (1.0, 100.0, 0.01):
        x.copy_(torch.randn_like(x) * size)
        graph.replay()
        truth = gemm.scaled_mm(quantize(x, PerToken()), b, compute=torch.float64)
        assert_within_budget(out, truth=truth, model=truth.float())
