"""The matvec kernel against float64, on a GPU or interpreted, within a derived error budget."""

from functools import partial

import pytest
import torch

from octavo import ops
from octavo.kernels.device import CPU, Device, describe
from octavo.kernels.matvec.config import (
    MatvecConfig,
    candidates,
    default,
    is_valid,
    objection,
    work,
)
from octavo.reference.gemm import matvec as reference
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

pytest.importorskip("triton")
from octavo.kernels.matvec.triton import matvec

A100 = Device(type="cuda", name="NVIDIA A100", capability=(8, 0), num_sms=108)
H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [1, 63, 64, 65, 2048, 2049, 2880]
# Several tiles of a row, also of short ones.
SMALL = MatvecConfig(4, 64, 4)


def num_roundings(depth, block_k):
    """How often a value may be rounded on its way into a float32 sum.

    As a product, in the sum over tiles, in that of a tile, and with the bias. A tile's row lies in
    32 lanes, or in fewer with 8 values each, which add up their own values and then, by halves,
    each other's; numpy, in the interpreter, adds 16 in a row and those sums by halves.
    """
    return 1 + -(-depth // block_k) + max(block_k // 32, 16) + 7 + 1


def check_within_budget(actual, x, weight, bias, block_k):
    """float32 sums of the products, then one rounding to the result's dtype."""
    truth = reference(x, weight, bias, compute=torch.float64)
    no_bias = torch.zeros(len(weight), device=x.device)
    magnitude = reference(
        x.abs(), weight.abs(), no_bias if bias is None else bias.abs(), compute=torch.float64
    )
    info = torch.finfo(actual.dtype)
    of_sum = num_roundings(len(x), block_k) * 2.0**-24 * magnitude
    of_result = info.eps / 2 * (truth.abs() + of_sum) + info.smallest_normal * info.eps / 2
    error = (actual.double() - truth).abs()
    worst = error - of_sum - of_result
    assert bool((worst <= 0).all()), f"over the budget by {float(worst.max())}"


def check(x, weight, bias=None, config=SMALL):
    """The kernel within its budget; without a config, with the settings of this machine."""
    actual = matvec(x, weight, bias, config=config)
    assert actual.dtype == x.dtype and actual.shape == (len(weight),) and actual.is_contiguous()
    block_k = (config or default(len(x), describe(x.device))).block_k
    check_within_budget(actual, x, weight, bias, block_k)
    return actual


def draw_operands(columns, depth, device, dtype=torch.bfloat16):
    draw = Draw(0, device)
    shapes = ((depth,), (columns, depth), (columns,))
    return tuple(draw.normal(*shape, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("depth", SIZES)
@pytest.mark.parametrize("columns", [1, 63, 65])
def test_depths(columns, depth, device):
    x, weight, bias = draw_operands(columns, depth, device)
    check(x, weight, config=None)
    check(x, weight, bias, config=None)


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("depth", [1, 65])
def test_columns(columns, depth, device):
    # Few programs, for the interpreter.
    config = SMALL if columns <= 65 else MatvecConfig(32, 64, 4)
    check(*draw_operands(columns, depth, device), config=config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [1, 64, 200, 2880])
def test_dtypes(dtype, depth, device):
    x, weight, bias = draw_operands(7, depth, device, dtype)
    check(x, weight, bias)
    check(x, weight, bias, config=None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_many_magnitudes(dtype, device):
    draw = Draw(0, device)
    x, weight = draw.wide(300, dtype=dtype), draw.wide(9, 300, dtype=dtype)
    check(x / 16, weight / 16)


@pytest.mark.parametrize(
    "config",
    [MatvecConfig(1, 64, 1), MatvecConfig(8, 128, 2), MatvecConfig(16, 32, 8)],
    ids=str,
)
def test_other_settings(config, device):
    check(*draw_operands(9, 200, device), config=config)


def test_parts_of_a_fused_weight(device):
    """Rows apart and columns of a wider weight, read where they lie; x from between others."""
    fused = Draw(0, device).normal(30, 500, dtype=torch.bfloat16)
    x = Draw(1, device).normal(3, 500, dtype=torch.bfloat16)[1]
    bias = Draw(2, device).normal(60, dtype=torch.bfloat16)
    for rows, columns in (
        (slice(10, 20), slice(None)),
        (slice(0, 30, 3), slice(None)),
        (slice(5, 12), slice(8, 400)),
        (slice(5, 12), slice(3, 400)),
        (slice(29, 30), slice(1, 500)),
    ):
        weight = fused[rows, columns]
        some = bias[::2][: len(weight)]
        check(x[columns], weight, some)
        check(x[columns], weight)
    check(x, fused[:1].expand(9, -1))


def test_nothing_is_read_beyond_the_weight(device):
    """What lies around a part is NaN."""
    for depth in (1, 65, 128):
        fused = torch.full((12, 300), torch.nan, device=device)
        around = torch.full((300,), torch.nan, device=device)
        x, weight, bias = draw_operands(5, depth, device, torch.float32)
        fused[3:8, 7 : 7 + depth] = weight
        around[9 : 9 + depth] = x
        check(around[9 : 9 + depth], fused[3:8, 7 : 7 + depth], bias)


def test_nothing_to_add_up(device):
    x, weight, bias = draw_operands(5, 0, device)
    assert_same_bits(matvec(x, weight), torch.zeros_like(bias))
    assert_same_bits(matvec(x, weight, bias), bias)


def test_no_columns(device):
    x, weight, bias = draw_operands(0, 70, device)
    assert matvec(x, weight, bias).shape == (0,)
    assert matvec(x[:0], weight[:, :0]).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unusual_values(dtype, device):
    """NaN and Inf as IEEE has them, and only in their rows."""
    x, weight, bias = draw_operands(12, 130, device, dtype)
    x[77] = 0.0
    x[5] = 1.0
    weight[1, 77] = torch.inf  # times 0
    weight[2, 5] = torch.inf
    weight[3, 5] = -torch.inf
    weight[4, 5:7] = torch.tensor([torch.inf, -torch.inf], device=device) * x[5:7].sign()
    weight[6, 129] = torch.nan
    bias[8] = torch.nan
    bias[9] = -torch.inf
    actual = matvec(x, weight, bias, config=SMALL)
    expected = reference(x, weight, bias).to(dtype)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert actual.isnan().nonzero().flatten().tolist() == [1, 4, 6, 8]
    assert [float(actual[i]) for i in (2, 3, 9)] == [torch.inf, -torch.inf, -torch.inf]
    finite = [0, 5, 7, 10, 11]
    check_within_budget(actual[finite], x, weight[finite], bias[finite], SMALL.block_k)


def test_infinite_x_reaches_every_row(device):
    x, weight, _ = draw_operands(6, 65, device)
    x[64] = torch.inf
    weight[:, 64] = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.0, torch.nan], device=device)
    actual = matvec(x, weight, config=SMALL)
    assert actual.isnan().tolist() == [False, False, True, False, True, True]
    assert actual[[0, 1, 3]].tolist() == [torch.inf, -torch.inf, torch.inf]


def test_results_that_float16_cannot_hold(device):
    """A sum that is in float32's range and not in the result's becomes Inf when it is rounded."""
    x = torch.full((64,), 100.0, device=device, dtype=torch.float16)
    weight = torch.stack([x, -x, x / 1000])
    actual = matvec(x, weight, config=SMALL)
    assert actual[:2].tolist() == [torch.inf, -torch.inf]
    check_within_budget(actual[2:], x, weight[2:], None, SMALL.block_k)


def test_the_bias_is_added_before_the_result_is_rounded(device):
    """257 and −256 are not both bfloat16: rounded before, the sum would be 0 or 2."""
    x = torch.ones(257, device=device, dtype=torch.bfloat16)
    bias = torch.tensor([-256.0], device=device, dtype=torch.bfloat16)
    assert float(matvec(x, x.unsqueeze(0), bias, config=SMALL)) == 1.0


def test_the_budget_is_not_met_by_bfloat16_sums(device):
    x, weight, bias = draw_operands(9, 2880, device)
    total = torch.zeros(9, dtype=torch.bfloat16, device=device)
    for k in range(0, 2880, 64):
        total += reference(x[k : k + 64], weight[:, k : k + 64]).bfloat16()
    with pytest.raises(AssertionError, match="over the budget"):
        check_within_budget(total + bias, x, weight, bias, 64)


def test_the_budget_is_not_met_without_the_last_product(device):
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, bias = draw_operands(9, 65, device, dtype)
        short = matvec(x[:64], weight[:, :64], bias, config=SMALL)
        with pytest.raises(AssertionError, match="over the budget"):
            check_within_budget(short, x, weight, bias, 64)


@pytest.mark.parametrize(
    ("depth", "block_k"),
    [
        (4096, 2048),
        (14336, 2048),
        (2880, 1024),  # 3072 of 2880, as 512 would have
        (512, 512),
        (1536, 512),
        (3072, 1024),
        (0, 2048),
        (1, 512),
    ],
)
def test_the_tile_wastes_least_of_a_row(depth, block_k):
    assert default(depth, H200) == MatvecConfig(4, block_k, 4, is_dependent=True)
    assert default(depth, A100) == MatvecConfig(4, block_k, 4, is_dependent=False)
    assert not default(depth, CPU).is_dependent


@pytest.mark.parametrize("device", [CPU, A100, H200], ids=lambda device: device.name)
@pytest.mark.parametrize("depth", [0, 1, 2880, 4096])
def test_defaults_and_candidates_are_valid(depth, device):
    configs = candidates(depth, device)
    assert configs[0] == default(depth, device)
    assert len(set(configs)) == len(configs) > 5
    assert all(is_valid(config, device) for config in configs)
    assert any(config.is_dependent for config in configs) == device.has_dependents


def test_what_is_not_valid():
    for config in (MatvecConfig(3), MatvecConfig(0), MatvecConfig(num_warps=6)):
        assert not is_valid(config, H200)
    assert not is_valid(MatvecConfig(1024, 2048), H200)
    assert is_valid(MatvecConfig(is_dependent=True), H200)
    assert not is_valid(MatvecConfig(is_dependent=True), A100)


def test_work_is_the_weights():
    assert work(4096, 14336) == (2 * 4096 * 14336, 2 * 4096 * 14336)
    assert work(3, 5, value_bytes=4) == (30, 60)


def test_objections():
    assert objection(H200) is None and objection(A100) is None
    assert "needs a CUDA GPU, got CPU" in objection(CPU)
    assert "8.0 or newer, got 7.5" in objection(Device("cuda", "T4", (7, 5)))


LLAMA_AND_GPT_OSS = [
    *((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)),
    *((4096, 2880), (512, 2880), (2880, 4096), (201, 2881)),
]


@pytest.mark.gpu
def test_a_gpu_chooses_triton():
    request = ops.Request(op="matvec", device=describe("cuda"), dtype=torch.bfloat16)
    assert ops.select(request).impl == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "depth"), LLAMA_AND_GPT_OSS)
def test_real_sizes_on_a_gpu(columns, depth, dtype):
    x, weight, bias = draw_operands(columns, depth, "cuda", dtype)
    first = check(x, weight, bias, config=None)
    for _ in range(5):
        assert_same_bits(ops.matvec(x, weight, bias, impl="triton"), first)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [2880, 4096])
def test_candidates_on_a_gpu(depth):
    operands = draw_operands(514, depth, "cuda")
    for config in candidates(depth, describe("cuda")):
        check(*operands, config=config)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    depth = 4096
    columns = 2**31 // depth + 5
    weight = torch.zeros(columns, depth, device="cuda", dtype=torch.bfloat16)
    x, last, _ = draw_operands(3, depth, "cuda")
    weight[-3:] = last
    actual = ops.matvec(x, weight, impl="triton")
    assert_same_bits(actual[-3:], matvec(x, last))
    assert not actual[:-3].any()


@pytest.mark.gpu
def test_a_part_of_a_fused_weight_is_not_copied():
    fused = Draw(0, "cuda").normal(4096, 4096, dtype=torch.bfloat16)
    x = Draw(1, "cuda").normal(2048, dtype=torch.bfloat16)
    weight = fused[:, 2048:]
    check(x, weight, config=None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.matvec(x, weight, impl="triton")
    assert torch.cuda.max_memory_allocated() - before < 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_sizes_of_one_unit_on_a_gpu(size):
    """Triton makes constants of arguments that are 1, unless it is told not to."""
    for columns in (1, size):
        check(*draw_operands(columns, size, "cuda"), config=None)


@pytest.mark.gpu
def test_each_waits_for_the_one_in_front():
    """A chain in which every product needs the whole of the last one, launched without a gap."""
    depth = 2048
    weights = [w / depth**0.5 for w in Draw(0, "cuda").normal(24, depth, depth)]
    first = Draw(1, "cuda").normal(depth)
    expected = first
    for weight in weights:
        expected = matvec(expected, weight)
        torch.cuda.synchronize()
    for _ in range(20):
        x = first
        for weight in weights:
            x = matvec(x, weight)
        assert_same_bits(x, expected)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Written by torch, read by one product and then by another, and the same by replay."""
    x, weight, bias = draw_operands(640, 640, "cuda")
    run = partial(ops.matvec, impl="triton")

    def step():
        return run(run(x * 2, weight, bias), weight)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for seed in range(3):
        x.copy_(Draw(seed, "cuda").normal(640))
        graph.replay()
        hidden = matvec(x * 2, weight, bias)
        torch.cuda.synchronize()
        assert_same_bits(result, matvec(hidden, weight))
