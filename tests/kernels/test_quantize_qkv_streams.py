"""The quantize_qkv kernels with two streams of tokens: the bits of both concatenated."""

import copy
from functools import partial

import pytest
import torch

from octavo import ops
from octavo.kernels.quantize_qkv.config import QuantizeQkvConfig
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qk_norm import QkNorm
from octavo.reference.qkv import quantize_qkv as reference
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw
from octavo_testkit.kernels.qkv_inputs import draw_packed, draw_rotary, static_scales

pytest.importorskip("triton")
from octavo.kernels.quantize_qkv.triton import quantize_qkv

# Few programs, for the interpreter, and yet several for every scale.
SMALL = QuantizeQkvConfig(32, 256, 64, 128, 4, 2)
HEADS = (2, 1, 1)


def joint(shape, seed, device):
    """Views of one projection."""
    batch, length, head_dim = shape
    x = Draw(seed, device).normal(batch, length, sum(HEADS), head_dim, dtype=torch.bfloat16)
    return x.split(list(HEADS), dim=2)


def apart(shape, seed, device, *, room=0):
    """Each on its own, heads one after the other, some room behind each of their tokens."""
    batch, length, head_dim = shape
    draw = Draw(seed, device)
    made = (draw.normal(batch, n, length, head_dim + room, dtype=torch.bfloat16) for n in HEADS)
    return tuple(x[..., :head_dim].transpose(1, 2) for x in made)


odd = partial(apart, room=1)  # loads of single values


def check(first, qkv, *, history=None, config=SMALL, **options):
    """As the kernels for both streams concatenated; without norms as the reference, too."""
    whole = tuple(torch.cat(both, dim=1) for both in zip(first, qkv, strict=True))
    runs = [
        (partial(quantize_qkv, config=config), qkv, {"first": first}),
        (partial(quantize_qkv, config=config), whole, {}),
    ]
    if options.get("norm") is None:  # whose sums have another order there
        runs.append((reference, qkv, {"first": first}))
    results = []
    for run, tensors, given in runs:
        ours = copy.deepcopy(history)
        rings = None if ours is None else tuple(one.ring for one in ours)
        result = run(*tensors, E4M3, rings=rings, **given, **options)
        results.append((result, [x for ring in rings or () for x in ring]))
    (actual, rings), *others = results
    for expected, expected_rings in others:
        for name in "qkv":
            assert_same_bits(getattr(actual.scales, name), getattr(expected.scales, name))
            assert_same_bits(getattr(actual, name), getattr(expected, name))
            assert getattr(actual, name).stride() == getattr(expected, name).stride()
        for ring, other in zip(rings, expected_rings, strict=True):
            assert_same_bits(ring, other)
    return actual, rings


def norms(num_streams, head_dim, device, num_first=0):
    """Norms that differ by much from stream to stream."""
    weights = Draw(2, device).normal(2, num_streams, head_dim, dtype=torch.bfloat16) + 1
    return QkNorm(weights[0] * 4, weights[1], 1e-6, num_first)


# Tokens of both streams, batch, head_dim; how both lie; norms; rotary embedding; scales; values.
CASES = {
    "one": ((1, 63), 1, 72, (joint, apart), None, "halves", "tensor", "transposed"),
    "uneven": ((17, 3), 2, 72, (apart, joint), None, "interleaved", "static", "rows"),
    "tiles": ((63, 65), 1, 64, (joint, odd), None, "halves", "static", "transposed"),
    "odd": ((5, 12), 2, 33, (odd, joint), None, None, "head", "transposed"),
    "norms": ((7, 1), 2, 32, (joint, apart), 2, "interleaved", "static", "transposed"),
    "norms-head": ((3, 5), 2, 32, (apart, joint), 2, "halves", "head", "rows"),
    "norms-tensor": ((9, 5), 1, 128, (joint, joint), 2, "interleaved", "tensor", "transposed"),
    "one-norm": ((3, 4), 2, 64, (apart, apart), 1, None, "static", "rows"),
}


@pytest.mark.parametrize("name", CASES)
def test_streams(name, device):
    lengths, batch, head_dim, memory, num_norms, turning, scaling, layout = CASES[name]
    first, qkv = (
        draw((batch, length, head_dim), seed, device)
        for seed, (draw, length) in enumerate(zip(memory, lengths, strict=True))
    )
    options = {"granularity": PerHead() if scaling == "head" else PerTensor()}
    if scaling == "static":
        options = {"scales": static_scales(device, ((2,), (1,), ()))}
    if turning is not None:
        rows = sum(lengths) * (batch if layout == "rows" else 1)  # of each sequence, or of all
        is_interleaved = turning == "interleaved"
        options["rotary"] = draw_rotary(rows, head_dim, device, is_interleaved=is_interleaved)
    if num_norms is not None:
        num_first = lengths[0] if num_norms == 2 else 0
        options["norm"] = norms(num_norms, head_dim, device, num_first)
    check(first, qkv, value_layout=layout, **options)


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
def test_histories(granularity, device):
    """The largest value may be in either stream, and so may NaN and Inf."""
    first, qkv = joint((2, 5, 40), 0, device), apart((2, 8, 40), 1, device)
    first[0][1, 4, 1, 7], first[1][0, 0] = 30.0, torch.nan
    qkv[1][1, 7, 0, 39], qkv[2][0, 0, 0, :3] = 50.0, torch.inf
    shapes = [granularity.scale_shape(x.shape) for x in qkv]
    history = tuple(AmaxHistory(shape, 3).to(device) for shape in shapes)
    _, rings = check(first, qkv, history=history, granularity=granularity)
    assert [int(x.max()) for x in rings[:6:3]] == [30, 50]
    assert [int(x) for x in rings[2::3]] == [0, 40, 3]


@pytest.mark.parametrize(
    ("batch", "lengths"), [(2, (0, 3)), (2, (3, 0)), (2, (0, 0)), (0, (5, 4))], ids=str
)
def test_streams_without_tokens(batch, lengths, device):
    first, qkv = (joint((batch, length, 32), 0, device) for length in lengths)
    check(first, qkv, norm=norms(2, 32, device, lengths[0]), value_layout="transposed")


def test_no_value_of_another_stream_is_read(device):
    """Both streams are parts of larger tensors that hold NaN elsewhere."""

    def inside_nan(x):
        room = torch.full([n + 2 for n in x.shape[:3]] + [x.shape[3]], torch.nan).to(x)
        room[1:-1, 1:-1, 1:-1] = x
        return room[1:-1, 1:-1, 1:-1]

    first, qkv = (
        tuple(inside_nan(x) for x in joint((2, length, 40), 0, device)) for length in (7, 11)
    )
    result, _ = check(first, qkv, value_layout="transposed")
    for name in "qkv":
        assert getattr(result, name).float().isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["static", "tensor", "head"])
@pytest.mark.parametrize(
    ("head_dim", "num_norms"),
    [(64, None), (64, 1), (64, 2), (72, None), (128, None), (128, 1), (128, 2)],
)
def test_real_sizes_on_a_gpu(head_dim, scaling, num_norms):
    """Qwen-Image: a text of awkward length, and an image of 1024 × 1024 pixels."""
    first, qkv = (
        tuple(
            x.unflatten(0, (2, length)) for x in draw_packed(2 * length, 24, 24, head_dim, "cuda")
        )
        for length in (333, 4096)
    )
    first = tuple(x.contiguous() * 2 for x in first)
    options = {"granularity": PerHead() if scaling == "head" else PerTensor()}
    if scaling == "static":
        options = {"scales": static_scales("cuda")}
    if num_norms is not None:
        options["norm"] = norms(num_norms, head_dim, "cuda", 333 if num_norms == 2 else 0)
    options["rotary"] = draw_rotary(4429, head_dim, "cuda", is_interleaved=True)
    for layout in ("rows", "transposed"):
        check(first, qkv, config=None, value_layout=layout, **options)


@pytest.mark.gpu
def test_histories_in_a_cuda_graph():
    first, qkv = (joint((2, length, 128), length, "cuda") for length in (65, 200))
    ours, theirs = (tuple(AmaxHistory().cuda() for _ in "qkv") for _ in range(2))
    options = {"value_layout": "transposed", "norm": norms(2, 128, "cuda", 65), "impl": "triton"}
    run = partial(ops.quantize_qkv, *qkv, first=first, history=ours, **options)
    run()
    for one in ours:
        one.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for step in range(20):
        for x in (*first, *qkv):
            x.copy_(torch.randn_like(x) * (1 + step * 7 % 5))
        graph.replay()
        whole = (torch.cat(both, dim=1) for both in zip(first, qkv, strict=True))
        expected = ops.quantize_qkv(*whole, history=theirs, **options)
        for name in "qkv":
            assert_same_bits(getattr(result.scales, name), getattr(expected.scales, name))
            assert_same_bits(getattr(result, name), getattr(expected, name))
