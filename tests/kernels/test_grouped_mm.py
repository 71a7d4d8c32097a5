"""The grouped_mm kernel against the reference and float64, on a GPU or in the interpreter."""

from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.kernels.device import CPU, Device
from octavo.kernels.grouped_mm.config import (
    GroupedConfig,
    GroupedShape,
    candidates,
    default,
    is_valid,
    max_tiles,
    objection,
    work,
)
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerBlock, PerChannel, PerTensor, PerToken
from octavo.numerics.quantize import Quantized, quantize
from octavo.reference import gemm
from octavo.testing.asserts import assert_no_waiting, assert_same_bits, assert_within_budget
from octavo.testing.cases import GROUPED, GroupedCase
from octavo.testing.inputs import Draw, cumulative, make_grouped_inputs

pytest.importorskip("triton")
from octavo.kernels.grouped_mm.triton import grouped_mm

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
H200 = Device("cuda", "NVIDIA H200", (9, 0), num_sms=132)
L4 = Device("cuda", "L4", (8, 9), num_sms=58)
A100 = Device("cuda", "A100", (8, 0), num_sms=108)
TILES = GroupedConfig(block_m=64, block_n=32, block_k=64, num_warps=4)
STREAM = GroupedConfig(block_m=16, block_n=64, block_k=64, is_streamed=True, num_warps=4)
CONFIGS = [TILES, replace(TILES, is_tma=True), STREAM, replace(STREAM, is_tma=True)]


def check(inputs, *, out_dtype=BF16, config=None):
    """Within twice the reference's distance from float64, and what rounding the result costs."""
    actual = grouped_mm(**inputs, out_dtype=out_dtype, config=config)
    assert actual.is_contiguous()
    truth = gemm.grouped_mm(**inputs, compute=torch.float64)
    assert_within_budget(actual, truth=truth, model=gemm.grouped_mm(**inputs))


def check_case(case, device, *, dtype=BF16, **options):
    check(make_grouped_inputs(case, dtype=dtype, device=device), **options)


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_every_pair_of_granularities(case, device):
    check_case(case, device)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "granularities",
    [(PerToken(), PerChannel()), (PerBlock(1, 64), PerBlock(64, 64)), (PerTensor(), PerTensor())],
    ids=str,
)
def test_tiles_and_streams(granularities, config, device):
    """An expert with more rows than a tile, and one with all but one row."""
    a, b = granularities
    case = GroupedCase(counts=(0, 70, 1), columns=70, depth=160, a=a, b=b, has_bias=True)
    check_case(case, device, config=config)
    check_case(replace(case, num_tokens=5, has_bias=False), device, config=config)


COUNTS = [(), (0,), (1,), (0, 0, 1), (63,), (64, 65), (1,) * 9, (0, 130, 0, 0, 1)]


@pytest.mark.parametrize("config", [None, TILES, STREAM], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_routings(counts, config, device):
    """Experts without rows, one row in all, tiles that are full, and an expert with nearly all."""
    check_case(GroupedCase(counts=counts, columns=33, depth=64), device, config=config)


@pytest.mark.parametrize("config", [TILES, STREAM], ids=str)
@pytest.mark.parametrize("counts", [(), (0, 0), (3, 0, 70)], ids=str)
def test_rows_of_no_expert_are_zero(counts, config, device):
    """Also where a scale or a bias is NaN."""
    case = GroupedCase(counts=counts, num_others=67, columns=33, depth=64, has_bias=True)
    inputs = make_grouped_inputs(case, device=device)
    inputs["a"].scale[sum(counts) :] = torch.nan
    inputs["bias"][-1:] = torch.nan
    out = grouped_mm(**inputs, out_dtype=F32, config=config)
    assert_same_bits(out[sum(counts) :], torch.zeros_like(out[sum(counts) :]))


@pytest.mark.parametrize("depth", [0, 1, 63, 200])
@pytest.mark.parametrize(
    "granularities",
    [
        (PerBlock(1, 48), PerBlock(5, 48)),
        (PerToken(), PerBlock(128, 300)),
        (None, PerBlock(32, 16)),
    ],
    ids=str,
)
def test_depths_that_are_no_multiple_of_anything(granularities, depth, device):
    a, b = granularities
    case = GroupedCase(columns=33, depth=depth, a=a, b=b, has_bias=True)
    check_case(case, device)
    if a is not None:
        check_case(
            case, device, config=default(GroupedShape(9000, 33, depth, 4), H200, 48, is_fp8=True)
        )


@pytest.mark.parametrize("columns", [0, 1, 63, 129])
@pytest.mark.parametrize("a", [PerToken(), None], ids=str)
def test_columns(columns, a, device):
    check_case(GroupedCase(columns=columns, depth=32, a=a, has_bias=True), device)


@pytest.mark.parametrize("num_experts", [1, 2, 7, 130])
def test_numbers_of_experts(num_experts, device):
    counts = tuple(index % 3 for index in range(num_experts))
    check_case(GroupedCase(counts=counts, columns=17, depth=32), device)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("by_bits", [False, True])
def test_a_plain_activation(dtype, fmt, by_bits, device):
    draw = Draw(0, device)
    inputs = {
        "a": draw.normal(9, 80, dtype=dtype),
        "b": quantize(draw.normal(3, 20, 80), PerChannel(), fmt),
        "ends": cumulative((4, 0, 5), device=device)[1:],
        "tokens": None,
        "bias": draw.normal(3, 20, dtype=dtype),
    }
    config = replace(STREAM, block_n=32, is_decoded_by_bits=by_bits)
    check(inputs, out_dtype=dtype, config=config)


@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("config", [TILES, STREAM], ids=str)
def test_formats(formats, config, device):
    inputs = make_grouped_inputs(GroupedCase(depth=96), device=device)
    inputs["a"] = quantize(inputs["a"].dequantize(), PerToken(), formats[0])
    inputs["b"] = quantize(inputs["b"].dequantize(), PerChannel(), formats[1])
    check(inputs, config=config)


@pytest.mark.parametrize("config", [TILES, STREAM], ids=str)
def test_an_expert_is_a_scaled_mm(config, device):
    """Small whole numbers are exact: each expert's rows have the bits of a product by itself."""
    draw, one = Draw(0, device), torch.ones((), device=device)
    a = Quantized(draw.normal(40, 64).round().clamp(-2, 2).to(E4M3.dtype), one, PerTensor())
    b = Quantized(draw.normal(3, 20, 64).round().clamp(-2, 2).to(E4M3.dtype), one, PerTensor())
    ends = cumulative((30, 0, 10), device=device)[1:]
    out = grouped_mm(a, b, ends, None, None, out_dtype=F32, config=config)
    for expert, rows in ((0, slice(0, 30)), (2, slice(30, 40))):
        assert_same_bits(out[rows], a.data[rows].float() @ b.data[expert].float().t())


@pytest.mark.parametrize("config", [TILES, STREAM], ids=str)
@pytest.mark.parametrize("is_plain", [False, True])
def test_nan_and_inf_stay_where_they_are(is_plain, config, device):
    """A NaN of a token is in its rows alone, one of a weight in its expert's column alone."""
    if is_plain and config is TILES:
        pytest.skip("a plain activation is streamed")
    inputs = make_grouped_inputs(GroupedCase(counts=(5, 9), num_tokens=7), device=device)
    x, weight = inputs["a"].dequantize(), inputs["b"].dequantize()
    x[3, 5], weight[1, 7, 9] = torch.nan, torch.nan
    inputs["a"] = x.bfloat16() if is_plain else quantize(x, PerToken())
    inputs["b"] = quantize(weight, PerChannel())
    check(inputs, config=config)
    inputs["b"] = quantize(weight, PerChannel(), E5M2)
    inputs["b"].data[0, 2, 3] = torch.inf
    check(inputs, config=config)


def test_long_sums_are_exact(device):
    """Ones: the tensor core's own sum would stand still at 16384 (docs/explanation/numerics.md)."""
    depth, one = 1 << 15, torch.ones((), device=device)
    ones = torch.ones(2, depth, device=device).to(E4M3.dtype)
    a, b = Quantized(ones, one, PerTensor()), Quantized(ones[:1].unsqueeze(0), one, PerTensor())
    ends = torch.tensor([2], dtype=torch.int32, device=device)
    for config in (None, replace(TILES, block_k=128)):
        out = grouped_mm(a, b, ends, None, None, out_dtype=F32, config=config)
        assert out.tolist() == [[depth]] * 2


def test_strided_operands(device):
    inputs = make_grouped_inputs(GroupedCase(depth=64, has_bias=True), device=device)
    expected = grouped_mm(**inputs, out_dtype=F32)
    a, b = inputs["a"], inputs["b"]
    wide = torch.cat([a.data.view(torch.uint8)] * 3, dim=1).view(a.data.dtype)
    turned = b.data.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2)
    for changes in (
        {"a": replace(a, data=wide[:, 64:128])},
        {"b": replace(b, data=turned.view(b.data.dtype))},
        {"bias": inputs["bias"].t().contiguous().t()},
    ):
        assert_same_bits(grouped_mm(**(inputs | changes), out_dtype=F32), expected)


SHAPES = [
    GroupedShape(*sizes)
    for sizes in (
        (8, 1536, 2048, 128),
        (65536, 1536, 2048, 128),
        (0, 5, 0, 0),
        (256, 5760, 2880, 32),
    )
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", [H200, L4, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("width", [0, 16, 48, 128, 384])
@pytest.mark.parametrize("is_fp8", [True, False])
def test_defaults_and_candidates_are_valid(shape, device, width, is_fp8):
    found = candidates(shape, device, width, is_fp8=is_fp8)
    assert found[0] == default(shape, device, width, is_fp8=is_fp8)
    assert len(set(found)) == len(found) > 1
    assert all(is_valid(config, device, is_fp8=is_fp8) for config in found)


@pytest.mark.parametrize(
    ("changes", "is_fp8"),
    [
        ({"block_n": 96}, True),
        ({"block_k": 256}, True),  # summed up by the tensor core
        ({"num_warps": 3}, True),
        ({"num_stages": 9}, True),
        ({"block_m": 32}, True),  # too few rows for 8 warps
        ({}, False),
    ],
)
def test_settings_that_are_not_valid(changes, is_fp8):
    assert is_valid(GroupedConfig(), H200, is_fp8=True)
    assert not is_valid(replace(GroupedConfig(), **changes), H200, is_fp8=is_fp8)


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("counts", [*COUNTS, (1, 17, 63, 0)], ids=str)
def test_the_grid_is_enough_for_any_routing(counts, block_m):
    for num_others in (0, 1, 100):
        rows = sum(counts) + num_others
        needed = sum(-(-count // block_m) for count in (*counts, num_others))
        assert needed <= max_tiles(GroupedShape(rows, 1, 1, len(counts)), block_m)


def test_work():
    flops, num_bytes = work(GroupedShape(4, 8, 16, 10), num_hit=3, a_bytes=1, out_bytes=2)
    assert (flops, num_bytes) == (2 * 4 * 8 * 16, 4 * 16 + 3 * 8 * 16 + 2 * 4 * 8)


@pytest.mark.parametrize(
    ("device", "is_fp8", "message"),
    [
        (CPU, False, "needs a CUDA GPU, got CPU"),
        (A100, True, "FP8 by FP8 needs compute capability 8.9 or newer, got 8.0"),
    ],
)
def test_objections(device, is_fp8, message):
    assert message in objection(device, is_fp8=is_fp8)


@pytest.mark.parametrize(("device", "is_fp8"), [(H200, True), (L4, True), (A100, False)])
def test_no_objection(device, is_fp8):
    assert objection(device, is_fp8=is_fp8) is None


def routed(num_tokens, num_experts, top_k, skew=1.0):
    """Rows sorted by expert, unevenly: where each expert's end, and which token each row is."""
    draw = Draw(0)
    logits = draw.normal(num_tokens, num_experts) + skew * draw.normal(num_experts)
    experts, order = logits.topk(top_k).indices.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts), right=True, out_int32=True)
    return ends.cuda(), (order // top_k).cuda()


# (experts, top k, columns, depth): the two products of Qwen3-30B-A3B, and the first of gpt-oss-20b.
MODELS = [(128, 8, 1536, 2048), (128, 8, 2048, 768), (32, 4, 5760, 2880)]


def check_rows(actual, inputs):
    """As `check` for some of the rows, since float64 products of all take long."""
    chosen = torch.arange(0, len(actual), max(1, len(actual) // 61), device=actual.device)
    experts = torch.searchsorted(inputs["ends"], chosen.int(), right=True)
    a, b = inputs["a"], inputs["b"]
    tokens = inputs["tokens"][chosen]
    x = a.dequantize(torch.float64)[tokens] if isinstance(a, Quantized) else a[tokens].double()
    truth = torch.stack(
        [
            replace(b, data=b.data[expert], scale=b.scale[expert]).dequantize(torch.float64) @ row
            for expert, row in zip(experts.tolist(), x, strict=True)
        ]
    )
    assert_within_budget(actual[chosen], truth=truth, model=truth.float())


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 2048])
@pytest.mark.parametrize(
    "granularities",
    [(PerToken(), PerChannel()), (PerBlock(1, 128), PerBlock(128, 128)), (None, PerChannel())],
    ids=str,
)
def test_models_on_a_gpu(model, num_tokens, granularities):
    num_experts, top_k, columns, depth = model
    x = torch.randn(num_tokens, depth, device="cuda", dtype=BF16)
    ends, tokens = routed(num_tokens, num_experts, top_k)
    weight = torch.randn(num_experts, columns, depth, device="cuda", dtype=BF16)
    a = x if granularities[0] is None else ops.quantize(x, granularities[0])
    inputs = {"a": a, "b": ops.quantize(weight, granularities[1]), "ends": ends, "tokens": tokens}
    with assert_no_waiting():
        out = ops.grouped_mm(**inputs, impl="triton")
    check_rows(out, inputs)
    for _ in range(10):  # the last ones are taped
        assert_same_bits(ops.grouped_mm(**inputs, impl="triton"), out)


@pytest.mark.gpu
@pytest.mark.parametrize("is_tma", [False, True])
@pytest.mark.parametrize("config", [GroupedConfig(), STREAM], ids=str)
def test_copies_of_tiles_on_a_gpu(config, is_tma):
    """Bulk copies and pointers to every value give the same bits."""
    ends, tokens = routed(2048, 128, 8, skew=3.0)
    a = ops.quantize(torch.randn(2048, 2048, device="cuda"), PerToken())
    b = ops.quantize(torch.randn(128, 1536, 2048, device="cuda", dtype=BF16), PerChannel())
    inputs = {"a": a, "b": b, "ends": ends, "tokens": tokens}
    out = grouped_mm(**inputs, bias=None, out_dtype=BF16, config=replace(config, is_tma=is_tma))
    check_rows(out, inputs)


@pytest.mark.gpu
def test_accumulation_is_two_level_on_a_gpu():
    """All of 131072 products of one sign: one level would lose most of them."""
    depth, one = 131072, torch.ones((), device="cuda")
    a = Quantized(torch.rand(256, depth, device="cuda").to(E4M3.dtype), one, PerTensor())
    weight = (1 + torch.randn(2, 128, depth, device="cuda")).to(E4M3.dtype)
    inputs = (a, Quantized(weight, one, PerTensor()), cumulative((16, 240), device="cuda")[1:])
    out = ops.grouped_mm(*inputs, out_dtype=F32, impl="triton").double()
    truth = gemm.grouped_mm(*inputs, compute=torch.float64)
    assert float(((out - truth) / truth).abs().max()) < 2**-10


@pytest.mark.gpu
def test_a_cuda_graph_follows_the_routing():
    """Ends and tokens are read on the device: one graph serves every routing of as many rows."""
    num_tokens, num_experts, top_k = 8, 32, 4
    x = torch.randn(num_tokens, 512, device="cuda", dtype=BF16)
    b = ops.quantize(torch.randn(num_experts, 256, 512, device="cuda"), PerChannel())
    ends, tokens = routed(num_tokens, num_experts, top_k)

    def call():
        return ops.grouped_mm(ops.quantize(x, PerToken()), b, ends, tokens=tokens, impl="triton")

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for counts in ((32, *[0] * 31), (*[0] * 31, 32), (*[1] * 31, 1), (0, 20, *[0] * 29, 9)):
        x.copy_(torch.randn_like(x))
        ends.copy_(cumulative(counts, device="cuda")[1:])
        graph.replay()
        inputs = {"a": quantize(x, PerToken()), "b": b, "ends": ends, "tokens": tokens}
        truth = gemm.grouped_mm(**inputs, compute=torch.float64)
        assert_within_budget(out, truth=truth, model=truth.float())
