"""The quantize_qkv kernels against `octavo.reference`: the same bits, on a GPU or interpreted."""

import copy
from functools import partial

import pytest
import torch

from octavo import ops
from octavo.kernels.device import CPU, Device, describe
from octavo.kernels.quantize_qkv.config import (
    QuantizeQkvConfig,
    candidates,
    default,
    is_valid,
    objection,
    work,
)
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales
from octavo.numerics.rotary import Rotary
from octavo.reference.qkv import quantize_qkv as reference
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw, cumulative
from octavo_testkit.kernels.qkv_inputs import draw_packed, draw_rotary, static_scales

pytest.importorskip("triton")
from octavo.kernels.quantize_qkv.triton import quantize_qkv

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
# Few programs, for the interpreter, and yet several for every scale.
SMALL = QuantizeQkvConfig(16, 256, 64, 128, 4, 2)
GRANULARITIES = [PerTensor(), PerHead()]


def check(q, k, v, fmt=E4M3, *, history=None, config=SMALL, **options):
    """The kernels give the reference's bits, strides and histories."""
    theirs = copy.deepcopy(history)
    rings = None if history is None else tuple(one.ring for one in history)
    expected_rings = None if history is None else tuple(one.ring for one in theirs)
    actual = quantize_qkv(q, k, v, fmt, rings=rings, config=config, **options)
    expected = reference(q, k, v, fmt, rings=expected_rings, **options)
    for name in "qkv":
        assert_same_bits(getattr(actual.scales, name), getattr(expected.scales, name))
        assert_same_bits(getattr(actual, name), getattr(expected, name))
        assert getattr(actual, name).stride() == getattr(expected, name).stride()
    assert actual.value_layout == expected.value_layout
    if history is not None:
        for ours, one in zip(rings, expected_rings, strict=True):
            for buffer, other in zip(ours, one, strict=True):
                assert_same_bits(buffer, other)


ROTARY = {
    "none": lambda rows, device: None,
    "halves": lambda rows, device: draw_rotary(rows, 72, device),
    "interleaved": lambda rows, device: draw_rotary(rows, 72, device, is_interleaved=True),
    "partial": lambda rows, device: draw_rotary(rows, 36, device),
    "partial-interleaved": lambda rows, device: draw_rotary(rows, 20, device, is_interleaved=True),
    "bf16": lambda rows, device: draw_rotary(rows, 72, device, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("scaling", ["static", "tensor", "head"])
@pytest.mark.parametrize("kind", ROTARY)
def test_rotary(kind, scaling, device):
    q, k, v = draw_packed(21, 2, 1, 72, device)
    options = {"granularity": PerHead() if scaling == "head" else PerTensor()}
    if scaling == "static":
        options = {"scales": static_scales(device)}
    check(q, k, v, rotary=ROTARY[kind](21, device), **options)


def shifted(x):
    """The same values, not where a wide load could begin."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("scaling", ["static", "dynamic"])
def test_again_with_other_tensors(scaling, device):
    """A launch of known sizes reads and writes the tensors of its own call."""
    options = {"scales": static_scales(device)} if scaling == "static" else {}
    for factor in (1, 3):
        q, k, v = (x * factor for x in draw_packed(9, 2, 1, 64, device))
        rotary = draw_rotary(9, 64 // factor // 2 * 2, device)
        check(q, k, v, rotary=rotary, **options)
        check(q.flip(0), k.flip(1), v.flip(0), rotary=rotary, **options)
        check(*map(shifted, (q, k, v)), rotary=rotary, **options)
        check(q, shifted(k), v, rotary=Rotary(shifted(rotary.cos), rotary.sin), **options)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_one_table_for_every_sequence(is_interleaved, device):
    q, k, v = (x.view(3, 7, -1, 40) for x in draw_packed(21, 2, 1, 40, device))
    check(q, k, v, rotary=draw_rotary(7, 40, device, is_interleaved=is_interleaved))


def test_tables_with_strides(device):
    """Columns of a table that repeats its halves, and every second one."""
    q, k, v = draw_packed(5, 2, 2, 40, device)
    table = draw_rotary(5, 80, device)
    check(q, k, v, rotary=Rotary(table.cos[:, :20], table.sin[:, 20:]))
    check(q, k, v, rotary=Rotary(table.cos[:, ::2], table.sin.t().contiguous().t()[:, ::2]))


@pytest.mark.parametrize("shapes", [((), (), ()), ((4,), (2,), (2,)), ((), (2,), ())], ids=str)
@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_static_scales(shapes, layout, device):
    q, k, v = (x[None] for x in draw_packed(19, 4, 2, 72, device))
    check(q * 30, k, v, scales=static_scales(device, shapes), value_layout=layout)


@pytest.mark.parametrize(
    ("lengths", "num_tokens"),
    [((5, 0, 17, 0), 25), ((1,), 1), ((16, 16), 32), ((), 3), ((0, 0), 0), ((1,) * 18, 18)],
    ids=str,
)
def test_packed_values(lengths, num_tokens, device):
    """Empty sequences, tokens after the last one, more sequences than one look sees."""
    q, k, v = draw_packed(num_tokens, 2, 2, 24, device)
    ends = cumulative(lengths, device=device)
    options = {"value_layout": "transposed", "cu_seqlens": ends}
    check(q, k, v, scales=static_scales(device), **options)
    if len(lengths) == 4:
        check(q, k, v, granularity=PerHead(), **options)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 37])
def test_padding_is_not_looked_at(num_tokens, granularity, device):
    """Large values, NaN and Inf behind the last token are in no scale, history or count."""
    shapes = [granularity.scale_shape((37, n, 72)) for n in (4, 2, 2)]
    q, k, v = draw_packed(37, 4, 2, 72, device)
    for x, strange in zip((q, k, v), (1e4, float("nan"), float("inf")), strict=True):
        x[num_tokens:] = strange
    ends = cumulative((num_tokens, 0), device=device)
    options = {"value_layout": "transposed", "cu_seqlens": ends, "num_tokens": ends[-1:]}
    history = tuple(AmaxHistory(shape).to(device) for shape in shapes)
    rotary = draw_rotary(37, 72, device)
    check(q, k, v, history=history, granularity=granularity, rotary=rotary, **options)
    assert all(one.num_nonfinite == 0 and one.values.max() < 100 for one in history)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize(
    ("shape", "head_dim"),
    [((2, 1), 72), ((1, 63), 33), ((3, 16), 40), ((0, 5), 32), ((2, 0), 32)],
    ids=str,
)
def test_dense_values(shape, head_dim, granularity, device):
    draw = Draw(0, device)
    q, k, v = (draw.normal(*shape, heads, head_dim) for heads in (2, 2, 2))
    check(q, k, v, granularity=granularity, value_layout="transposed")


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_histories_go_round(granularity, device):
    """Rings of several lengths, a large pass that is forgotten, NaN and Inf that are counted."""
    shapes = [granularity.scale_shape((heads, 72)) for heads in (2, 1, 1)]
    lengths = (1, 2, 3)
    history = tuple(
        AmaxHistory(shape, length).to(device) for shape, length in zip(shapes, lengths, strict=True)
    )
    history[1].num_passes.fill_(2**33 + 1)
    for step, size in enumerate((8.0, 1.0, 2.0, 0.5)):
        q, k, v = (x * size for x in draw_packed(18, 2, 1, 72, device))
        q[step, 1, 3] = torch.nan
        k[17, 0, 71] = -torch.inf
        v[3, 0, : step + 1] = torch.inf
        rotary = draw_rotary(18, 72, device) if step % 2 else None
        check(q, k, v, granularity=granularity, history=history, rotary=rotary)
    assert int(history[1].num_passes) == 2**33 + 5
    assert int(history[2].num_nonfinite) == 10


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_formats_and_dtypes(dtype, fmt, device):
    q, k, v = (x[None] for x in draw_packed(9, 2, 1, 64, device, dtype))
    check(q, k, v, fmt, rotary=draw_rotary(9, 64, device), value_layout="transposed")


def test_dtypes_of_their_own(device):
    q, k, v = draw_packed(9, 2, 1, 64, device)
    check(q.float(), k, v.half())


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_unusual_values(granularity, device):
    q, k, v = (x.float()[None] for x in draw_packed(12, 3, 1, 50, device))
    for x in (q, k, v):
        x[0, 3, 0, 5:8] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)
        x[0, 7] = -0.0
        x[0, 9] *= 1e-42
    k[0, 11, 0, 4] = 3e38
    v *= 1e-41
    check(q, k, v, granularity=granularity, value_layout="transposed")
    check(q, k, v, granularity=granularity, rotary=draw_rotary(12, 50, device))
    tiny = QkvScales(*(torch.full((), size, device=device) for size in (2**-126, 1e-3, 2.0**126)))
    check(q, k, v, scales=tiny)


def test_strided_inputs(device):
    draw = Draw(0, device)
    heads_first = [draw.normal(2, 3, 5, 40).transpose(1, 2) for _ in range(3)]
    check(*heads_first, value_layout="transposed")
    check(*heads_first, granularity=PerHead(), rotary=draw_rotary(5, 40, device))
    check(*(draw.normal(40, 5, 3).permute(1, 2, 0) for _ in range(3)))
    check(*(draw.normal(1, 3, 40).expand(4, -1, -1) for _ in range(3)))
    check(*(draw.normal(2, 3, 4, 2, 40)[:, ::2] for _ in range(3)))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_no_tokens(granularity, device):
    q, k, v = draw_packed(0, 2, 1, 40, device)
    shapes = [granularity.scale_shape(x.shape) for x in (q, k, v)]
    history = tuple(AmaxHistory(shape, 2).to(device) for shape in shapes)
    for one in history:
        one.push(torch.full_like(one.values[0], 3.0))
    check(q, k, v, granularity=granularity, history=history)
    check(q, k, v, granularity=granularity, rotary=draw_rotary(0, 40, device))


def test_other_lengths_of_keys(device):
    draw = Draw(0, device)
    q, k, v = draw.normal(2, 3, 4, 40), draw.normal(2, 6, 2, 40), draw.normal(2, 6, 2, 40)
    check(q, k, v, rotary=draw_rotary(3, 40, device), value_layout="transposed")


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 24480])
@pytest.mark.parametrize("num_scales", [1, 9, 16, 128])
def test_defaults_are_valid(num_tokens, num_scales):
    assert is_valid(default(num_tokens, num_scales))


def test_candidates_are_valid():
    assert all(is_valid(config) for config in candidates())
    assert not is_valid(QuantizeQkvConfig(16, 96, 64, 64, 4, 2))
    assert not is_valid(QuantizeQkvConfig(16, 128, 8, 64, 4, 2))


def test_work_counts_every_value_once():
    assert work(3, 5, 4, 2, 64)[1] == (3 * 4 + 2 * 5 * 2) * 64 * 3


@pytest.mark.parametrize(
    ("device", "head_dim", "features", "message"),
    [
        (CPU, 64, (), "needs a CUDA GPU, got CPU"),
        (Device("cuda", "A100", (8, 0)), 64, (), "8.9 or newer, got 8.0"),
        (H200, 72, ("norm",), "norms of queries and keys need head_dim 32, 64, 128, got 72"),
        (H200, 512, (), "head_dim must be 1 to 256, got 512"),
        (H200, 33, ("interleaved",), "need an even head_dim, got 33"),
    ],
)
def test_objections(device, head_dim, features, message):
    assert message in objection(device, head_dim, frozenset(features))


def test_no_objection_on_an_h200():
    assert objection(H200, 128, frozenset({"norm", "rotary", "interleaved"})) is None
    for features in ((), ("rotary", "transposed", "packed", "dynamic"), ("interleaved",)):
        assert objection(H200, 72, frozenset(features)) is None


@pytest.mark.gpu
def test_a_gpu_chooses_triton():
    request = ops.Request(
        op="quantize_qkv", device=describe("cuda"), dtype=torch.bfloat16, head_dim=72
    )
    assert ops.select(request).impl == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("kind", ["none", "halves", "interleaved", "partial"])
def test_real_sizes_on_a_gpu(kind, granularity):
    num_tokens = 24480
    q, k, v = draw_packed(num_tokens, 16, 16, 72, "cuda")
    ends = cumulative((num_tokens // 3,) * 3, device="cuda")
    rotary = ROTARY[kind](num_tokens, "cuda")
    options = {"rotary": rotary, "value_layout": "transposed", "cu_seqlens": ends}
    check(q, k, v, config=None, granularity=granularity, **options)
    run = partial(ops.quantize_qkv, q, k, v, granularity=granularity, impl="triton", **options)
    first = run()
    for _ in range(5):
        again = run()
        for name in "qkv":
            assert_same_bits(getattr(again, name), getattr(first, name))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_head_dims_on_a_gpu(head_dim):
    q, k, v = (x[None] for x in draw_packed(777, 8, 2, head_dim, "cuda"))
    rotary = draw_rotary(777, head_dim, "cuda")
    check(q, k, v, config=None, rotary=rotary, value_layout="transposed")
    check(q * 100, k, v, config=None, scales=static_scales("cuda", ((8,), (2,), (2,))))


@pytest.mark.gpu
@pytest.mark.parametrize("config", candidates()[::4], ids=str)
def test_candidates_on_a_gpu(config):
    q, k, v = (x[None] for x in draw_packed(300, 16, 16, 72, "cuda"))
    check(q, k, v, config=config, rotary=draw_rotary(300, 72, "cuda"), value_layout="transposed")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [2.0**-126, 3e-20, 7e-4, 1.0, 1 / 448, 3.0, 1e20, 2.0**126])
def test_every_quotient_is_rounded_once(scale):
    """Every bf16 number, and float32 numbers beside the midpoints of FP8, by several scales."""
    numbers = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.bfloat16).float()
    fp8 = torch.arange(256, device="cuda").to(torch.uint8)
    midpoints = []
    for fmt in (E4M3, E5M2):
        values = fp8.view(fmt.dtype).float()
        values = values[values.isfinite()].sort().values.double()
        midpoints.append((values[1:] + values[:-1]) / 2 * scale)
    near = torch.cat(midpoints).float().view(torch.int32)
    near = torch.cat([near + step for step in range(-4, 5)]).view(torch.float32)
    x = torch.cat([numbers, near])
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 1, 64)
    scales = QkvScales(*(torch.full((), scale, device="cuda") for _ in "qkv"))
    for fmt in (E4M3, E5M2):
        check(x, x, x, fmt, config=None, scales=scales)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    num_tokens = 2**31 // 2048 + 5
    x = torch.zeros(num_tokens, 16, 128, device="cuda", dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, 16, 128, device="cuda")
    result = ops.quantize_qkv(x, x, x[None, :, :1].squeeze(0).expand_as(x), impl="triton")
    scales = QkvScales(*(getattr(result.scales, name) for name in "qkv"))
    expected = reference(x[-3:], x[-3:], x[-3:, :1].expand(-1, 16, -1), E4M3, scales=scales)
    for name in "qkv":
        assert_same_bits(getattr(result, name)[-3:], getattr(expected, name))
        assert not getattr(result, name)[:-3].view(torch.uint8).any()


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_histories_in_a_cuda_graph(granularity):
    """20 replays: rings go round and counters count, as the reference does."""
    q, k, v = (x.contiguous() for x in draw_packed(600, 4, 2, 72, "cuda"))
    shapes = [granularity.scale_shape(x.shape) for x in (q, k, v)]
    ours, theirs = (tuple(AmaxHistory(shape).cuda() for shape in shapes) for _ in range(2))
    ends = cumulative((100, 0, 500), device="cuda")
    options = {"rotary": draw_rotary(600, 72, "cuda"), "granularity": granularity}
    options |= {"value_layout": "transposed", "cu_seqlens": ends}
    run = partial(ops.quantize_qkv, q, k, v, history=ours, impl="triton", **options)
    run()
    for one in ours:
        one.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for step in range(20):
        for x in (q, k, v):
            x.copy_(torch.randn_like(x) * (1 + step * 7 % 5))
        v[step, 0, 0] = torch.inf
        graph.replay()
        rings = tuple(one.ring for one in theirs)
        expected = reference(q, k, v, E4M3, rings=rings, **options)
        for name in "qkv":
            assert_same_bits(getattr(result.scales, name), getattr(expected.scales, name))
            assert_same_bits(getattr(result, name), getattr(expected, name))
        for one, other in zip(ours, theirs, strict=True):
            for buffer, wanted in zip(one.ring, other.ring, strict=True):
                assert_same_bits(buffer, wanted)
