"""The quantize kernels against `octavo.numerics`: the same bits, on a GPU or in the interpreter."""

import pytest
import torch

from octavo import ops
from octavo.kernels.device import CPU, Device, describe
from octavo.kernels.quantize.config import QuantizeConfig, default, is_valid, objection
from octavo.numerics import quantize as numerics
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerBlock, PerChannel, PerHead, PerTensor, PerToken
from octavo.testing.asserts import assert_same_bits

pytest.importorskip("triton")
from octavo.kernels.quantize.triton import quantize, quantize_rows

GRANULARITIES = [
    PerTensor(),
    PerHead(),
    PerToken(),
    PerChannel(),
    PerBlock(1, 128),
    PerBlock(128, 128),
    PerBlock(20, 48),
]
SMALL = [(1, 1), (33, 72), (5, 4, 72), (21, 200), (2, 3, 65), (3, 512)]
H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))


def run(x, granularity, fmt=E4M3, *, scale=None, margin=1.0, power_of_two=False):
    return quantize(x, granularity, fmt, scale=scale, margin=margin, power_of_two=power_of_two)


def assert_same(actual, expected):
    assert_same_bits(actual.scale, expected.scale)
    assert_same_bits(actual.data, expected.data)
    assert actual.data.is_contiguous()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_dynamic_and_static_give_the_reference_its_bits(shape, granularity, device):
    x = torch.randn(shape, device=device).bfloat16() * 3
    expected = numerics.quantize(x, granularity, margin=1.25)
    assert_same(run(x, granularity, margin=1.25), expected)
    assert_same(run(x, granularity, scale=expected.scale), expected)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_again_with_other_tensors(granularity, device):
    """A launch of known sizes reads and writes the tensors of its own call."""
    for factor in (1, 3):
        x = torch.randn(4 * 6 * 48 + 1, device=device).bfloat16() * factor
        for part in (x[:-1], x[1:]):  # where a wide load can begin, and where not
            part = part.view(4, 6, 48)
            assert_same(run(part, granularity), numerics.quantize(part, granularity))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerToken(), PerBlock(1, 128)], ids=str)
def test_formats_and_dtypes(dtype, fmt, granularity, device):
    x = torch.randn(9, 130, device=device).to(dtype)
    expected = numerics.quantize(x, granularity, fmt, power_of_two=True)
    assert_same(run(x, granularity, fmt, power_of_two=True), expected)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_unusual_values(granularity, device):
    x = torch.randn(40, 3, 50, device=device)
    x[3, 1, 5:8] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)
    x[7] = 0.0
    x[9] *= 1e-42
    x[11, 2, 4] = 3e38
    assert_same(run(x, granularity), numerics.quantize(x, granularity))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("columns", [48, 1024])
def test_inf_beside_ordinary_values(columns, granularity, device):
    x = torch.randn(6, 2, columns, device=device)
    x[2, 1, 5:8] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)
    assert_same(run(x, granularity), numerics.quantize(x, granularity))


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
def test_saturation_with_a_static_scale(granularity, device):
    x = torch.randn(4, 3, 40, device=device) * 1000
    scale = torch.full(granularity.scale_shape(tuple(x.shape)), 0.5, device=device)
    assert_same(run(x, granularity, scale=scale), numerics.quantize(x, granularity, scale=scale))


@pytest.mark.parametrize("shape", [(1, 1), (33, 72), (5, 4, 200), (3, 5000), (0, 8), (4, 0)])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_one_static_scale_for_every_row(shape, fmt, device):
    """As cuBLAS wants it: data as of a scale per tensor, and a copy of the scale for each row."""
    x = torch.randn(shape, device=device).bfloat16()
    scale = torch.tensor(0.01, device=device)
    made, expected = quantize_rows(x, scale, fmt), numerics.quantize(x, fmt=fmt, scale=scale)
    assert_same_bits(made.data, expected.data)
    assert made.scale.shape == shape[:-1] and isinstance(made.granularity, PerToken)
    if x.numel():
        assert_same_bits(made.scale, torch.full(shape[:-1], 0.01, device=device))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_strided_inputs(granularity, device):
    packed = torch.randn(3, 3, 4, 20, device=device).bfloat16()
    for x in (packed[:, 1], packed[:, :, 2], packed.transpose(1, 3)[..., :2]):
        assert_same(run(x, granularity), numerics.quantize(x.contiguous(), granularity))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("shape", [(0, 72), (4, 0), (0, 4, 8)], ids=str)
def test_nothing_to_quantize(shape, granularity, device):
    x = torch.zeros(shape, device=device)
    assert_same(run(x, granularity), numerics.quantize(x, granularity))


@pytest.mark.parametrize(
    "config",
    [
        QuantizeConfig(1, 64, 1, num_chunks=3),
        QuantizeConfig(2, 128, 1, num_chunks=2),
        QuantizeConfig(4, 64, 1, num_chunks=2),  # too few for a row: read twice
        QuantizeConfig(4, 64, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [192, 150])
def test_rows_in_several_tiles(columns, config, device):
    x = torch.randn(7, columns, device=device).bfloat16()
    options = {"scale": None, "margin": 1.0, "power_of_two": False}
    actual = quantize(x, PerToken(), E4M3, **options, config=config)
    assert_same(actual, numerics.quantize(x, PerToken()))


def test_a_single_number(device):
    x = torch.tensor(3.0, device=device)
    assert_same(run(x, PerTensor()), numerics.quantize(x))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (4096, 3072), (14040, 12288), (7, 30000)], ids=str)
def test_defaults_are_valid(shape, granularity):
    assert is_valid(default(shape, granularity), granularity)


def test_a_tile_smaller_than_its_block_is_not_valid():
    assert not is_valid(QuantizeConfig(16, 128, 1), PerBlock(128, 128))
    assert not is_valid(QuantizeConfig(1, 64, 1), PerBlock(1, 128))
    assert not is_valid(QuantizeConfig(1, 96, 1), PerToken())


@pytest.mark.parametrize(
    ("device", "granularity", "message"),
    [
        (CPU, PerTensor(), "needs a CUDA GPU, got CPU"),
        (Device("cuda", "A100", (8, 0)), PerTensor(), "8.9 or newer, got 8.0"),
        (H200, PerBlock(256, 256), "must fit 32768 values, got block 256x256"),
    ],
)
def test_objections(device, granularity, message):
    assert message in objection(device, granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_no_objection_where_there_is_fp8(granularity):
    assert objection(H200, granularity) is None
    assert objection(Device("cuda", "L4", (8, 9)), granularity) is None


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_quotients_are_rounded_once(fmt):
    """At and around the midpoints of the format, for scales of every size."""
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    values = codes[codes.isfinite()].unique()
    middles = torch.cat([values, (values[1:] + values[:-1]) / 2]).cuda()
    scale = torch.exp2(torch.empty(20_000, device="cuda").uniform_(-100, 100))
    x = (middles * scale[:, None]).clamp(-3e38, 3e38)
    for step in range(-2, 3):
        near = (x.view(torch.int32) + step).view(torch.float32)
        assert_same(
            run(near, PerToken(), fmt, scale=scale),
            numerics.quantize(near, PerToken(), fmt, scale=scale),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize(
    "shape", [(4608, 3072), (24480, 1152), (3 * 8160, 16, 72), (5000, 2048)], ids=str
)
def test_real_sizes_on_a_gpu(shape, granularity):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    actual = ops.quantize(x, granularity, impl="triton")
    assert_same(actual, numerics.quantize(x, granularity))
    for _ in range(5):
        assert_same(ops.quantize(x, granularity, impl="triton"), actual)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", [PerTensor(), PerToken(), PerBlock(1, 128)], ids=str)
def test_more_elements_than_32_bits_count(granularity):
    x = torch.zeros(2**31 // 4096 + 5, 4096, device="cuda", dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, 4096, device="cuda")
    actual = ops.quantize(x, granularity, impl="triton")
    tail = x[-3:]
    scale = actual.scale if actual.scale.dim() == 0 else actual.scale[-3:]
    expected = numerics.quantize(tail, granularity, scale=scale)
    assert_same_bits(actual.data[-3:], expected.data)
    assert not actual.data[:-3].view(torch.uint8).any()


@pytest.mark.gpu
def test_a_gpu_chooses_triton():
    x = torch.randn(8, 64, device="cuda")
    request = ops.Request(
        op="quantize", device=describe(x.device), dtype=x.dtype, granularity="token"
    )
    assert ops.select(request).impl == "triton"


@pytest.mark.gpu
def test_dynamic_quantization_in_a_cuda_graph():
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.quantize(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ops.quantize(x)
    for size in (1.0, 100.0, 0.01):
        x.copy_(torch.randn_like(x) * size)
        graph.replay()
        assert_same(result, numerics.quantize(x))
