"""The append_kv kernel against `octavo.reference`: the same bits, on a GPU or interpreted."""

from functools import partial

import pytest
import torch

from octavo import ops
from octavo.kernels.append_kv.config import (
    AppendConfig,
    candidates,
    default,
    is_valid,
    objection,
    work,
)
from octavo.kernels.device import CPU, Device, describe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.rotary import Rotary
from octavo.reference.paged import append_kv as reference
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import HEAD_DIMS, PagedCase
from octavo.testing.inputs import Draw, make_paged_view

pytest.importorskip("triton")
from octavo.kernels.append_kv.triton import append_kv

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
A100 = Device(type="cuda", name="NVIDIA A100", capability=(8, 0))
BUFFERS = ("key_pages", "value_pages", "key_scale", "value_scale", "page_table", "lengths")
SLOTS = (3, -1, 70, 129, 64)


def draw_rotary(rows, rotary_dim, device, *, is_interleaved=False, dtype=torch.float32):
    angle = torch.rand(rows, rotary_dim // 2) * 6
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    return Rotary(cos, sin, is_interleaved)


def draw_tokens(case, num_tokens, device, dtype=torch.bfloat16):
    """Query, key and value as views of one projection."""
    heads = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
    joint = Draw(5, device).normal(num_tokens, sum(heads), case.head_dim, dtype=dtype)
    return joint.split(heads, dim=1)


def check(case, query, key, value, slots, *, run=append_kv, **options):
    """The kernel leaves the reference's bytes in every buffer and returns its queries."""
    device = key.device
    slots = torch.tensor(slots, dtype=torch.int64, device=device)
    ours, theirs = (make_paged_view(case, device=device) for _ in range(2))
    actual = run(ours, key, value, slots, query=query, **options)
    expected = reference(theirs, key, value, slots, query=query, **options)
    for name in BUFFERS:
        assert_same_bits(getattr(ours, name), getattr(theirs, name))
    if query is None:
        assert actual is None
    else:
        assert_same_bits(actual, expected)
        assert actual.is_contiguous()


@pytest.mark.parametrize(
    "case",
    [
        PagedCase(),
        PagedCase(granularity=PerHead(), layout="token_major"),
        PagedCase(granularity=PerToken(), layout="token_major", head_dim=72),
        PagedCase(granularity=PerToken(), dtype=E5M2.dtype, num_heads=6),
        PagedCase(dtype=E5M2.dtype, page_size=16, head_dim=40),
        PagedCase(dtype=torch.bfloat16, num_heads=7, num_kv_heads=1),
        PagedCase(dtype=torch.float16, layout="token_major"),
        PagedCase(dtype=torch.float32, head_dim=96),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pages(case, dtype, device):
    query, key, value = draw_tokens(case, 5, device, dtype)
    check(case, None, key, value, SLOTS)
    rotary = draw_rotary(5, case.head_dim, device)
    check(case, query, key, value, SLOTS, rotary=rotary)


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 33])
def test_head_dims(head_dim, device):
    case = PagedCase(head_dim=head_dim, granularity=PerToken(), lengths=(3, 70), q_lens=(1, 1))
    query, key, value = draw_tokens(case, 2, device)
    rotary = draw_rotary(2, head_dim // 2 * 2, device)
    check(case, query, key, value, (3, 70), rotary=rotary)


@pytest.mark.parametrize("rotary_dim", [2, 20, 64])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary(dtype, is_interleaved, rotary_dim, device):
    case = PagedCase(granularity=PerHead())
    query, key, value = draw_tokens(case, 4, device)
    tables = {"is_interleaved": is_interleaved, "dtype": dtype}
    rotary = draw_rotary(4, rotary_dim, device, **tables)
    check(case, query, key, value, SLOTS[:4], rotary=rotary)
    shared = draw_rotary(2, rotary_dim, device, **tables)
    check(case, query, key, value, SLOTS[:4], rotary=shared)


@pytest.mark.parametrize("shape", [(), (6,)], ids=str)
def test_fp8_queries(shape, device):
    case = PagedCase(num_heads=6, granularity=PerHead())
    query, key, value = draw_tokens(case, 5, device)
    q_scale = ((Draw(2).normal(*shape).abs() + 0.5) / 200).to(device)
    rotary = draw_rotary(5, 64, device)
    check(case, query, key, value, SLOTS, q_scale=q_scale, rotary=rotary)
    check(case, query, key, value, SLOTS, q_scale=q_scale)
    check(case, query.float(), key, value, SLOTS)


@pytest.mark.parametrize("granularity", [PerTensor(), PerToken()], ids=str)
def test_unusual_values(granularity, device):
    case = PagedCase(granularity=granularity)
    query, key, value = (x.contiguous() for x in draw_tokens(case, 3, device, torch.float32))
    for x in (key, value):
        x[0, 0, 3:6] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)
        x[0, 1] = -0.0
        x[1, 0] *= 1e-42
        x[1, 1, 7] = 3e38
    check(case, query, key, value, SLOTS[:3])
    check(case, query, key, value, SLOTS[:3], rotary=draw_rotary(3, 64, device))


def count_both(case, key, value, slots, device, run=append_kv, **options):
    """What the kernel and the reference add to a count that begins at (10, 2^40)."""
    slots, counts = torch.tensor(slots, device=device), []
    for each in (run, reference):
        view = make_paged_view(case, device=device)
        saturated = torch.tensor([10, 2**40], device=device)
        each(view, key, value, slots, saturated=saturated, **options)
        counts.append((saturated[0].item() - 10, saturated[1].item() - 2**40))
    return counts


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_saturated_values_are_counted(dtype, granularity, fmt, device):
    case = PagedCase(granularity=granularity, dtype=fmt.dtype, num_kv_heads=3, num_heads=3)
    view = make_paged_view(case, device=device)
    _, key, value = (x.contiguous() for x in draw_tokens(case, 5, device, dtype))
    expected = []
    for x, scale in ((key, view.key_scale), (value, view.value_scale)):
        x *= scale.view(-1, 1) * fmt.max * (0.6 if x is key else 0.4)
        x[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38], device=device)
        x[1] = torch.inf  # padding
        limit = scale.double().view(-1, 1) * fmt.max * (1 + 2.0 ** -(fmt.mantissa_bits + 2))
        is_beyond = x.double().abs() > limit
        expected.append(int(is_beyond.sum() - is_beyond[1].sum()))
    assert 3 < expected[1] < expected[0]
    found = count_both(case, key, value, SLOTS, device)
    assert found == [tuple(expected)] * 2
    check(case, None, key, value, SLOTS)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_where_saturation_begins(fmt, device):
    """At the last number that is no saturation, 0; one bit above it, 1: in every place."""
    case = PagedCase(granularity=PerHead(), dtype=fmt.dtype, num_kv_heads=2, head_dim=33)
    _, key, value = (torch.zeros_like(x) for x in draw_tokens(case, 1, device, torch.float32))
    scale = make_paged_view(case, device=device).key_scale
    edge = scale * (fmt.max * (1 + 2.0 ** -(fmt.mantissa_bits + 2)))
    key[0] = edge[:, None]
    assert count_both(case, key, value, (3,), device) == [(0, 0)] * 2
    beyond = torch.nextafter(edge, edge.new_tensor(torch.inf))
    for head, place in ((0, 0), (1, 32)):
        one = key.clone()
        one[0, head, place] = -beyond[head]
        assert count_both(case, one, value, (3,), device) == [(1, 0)] * 2
    key[0] = beyond[:, None]
    assert count_both(case, key, value, (3,), device) == [(66, 0)] * 2


def test_turned_keys_are_counted(device):
    """What is stored counts: here a turn takes the values of a pair across the limit."""
    case = PagedCase(granularity=PerTensor())
    _, key, value = (torch.zeros_like(x) for x in draw_tokens(case, 2, device, torch.float32))
    scale = make_paged_view(case, device=device).key_scale
    key[:, :, 0], key[:, :, 32] = 400 * scale, -400 * scale
    angle = torch.full((2, 32), torch.pi / 4, device=device)
    rotary = Rotary(angle.cos(), angle.sin())
    assert count_both(case, key, value, (0, 1), device) == [(0, 0)] * 2
    assert count_both(case, key, value, (0, 1), device, rotary=rotary) == [(4, 0)] * 2


@pytest.mark.parametrize(
    "case", [PagedCase(granularity=PerToken()), PagedCase(dtype=torch.bfloat16)], ids=str
)
def test_what_has_no_static_scale_does_not_saturate(case, device):
    _, key, value = (x.contiguous() for x in draw_tokens(case, 5, device))
    key[0], value[1] = torch.inf, 3e38
    assert count_both(case, key, value, SLOTS, device) == [(0, 0)] * 2
    no_tokens = key[:0]
    assert count_both(PagedCase(), no_tokens, no_tokens, (), device) == [(0, 0)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("config", candidates(H200), ids=str)
def test_counts_of_many_tokens_on_a_gpu(config):
    """Every program adds to the same two numbers."""
    case = PagedCase(
        lengths=(3001,), q_lens=(1,), num_heads=9, num_kv_heads=3, granularity=PerHead()
    )
    _, key, value = (x.contiguous() for x in draw_tokens(case, 3001, "cuda"))
    view = make_paged_view(case, device="cuda")
    key *= 500 * view.key_scale.view(-1, 1)
    value.fill_(torch.inf)
    slots = torch.randperm(3001).tolist()
    run = partial(append_kv, config=config)
    first, second = count_both(case, key, value, slots, "cuda", run=run)
    assert first == second and first[0] > 1000 and first[1] == value.numel()


def test_padding_is_not_written(device):
    case = PagedCase(granularity=PerToken())
    query, key, value = draw_tokens(case, 3, device)
    check(case, query, key, value, (-1, -64, -(2**40)), rotary=draw_rotary(3, 64, device))


def test_no_tokens(device):
    case = PagedCase()
    query, key, value = draw_tokens(case, 0, device)
    check(case, query, key, value, (), rotary=draw_rotary(0, 64, device))
    check(case, None, key, value, ())


def test_strided_inputs(device):
    case = PagedCase(granularity=PerHead())
    draw = Draw(0, device)
    key, value = draw.normal(2, 5, 64).transpose(0, 1), draw.normal(64, 2, 5).permute(2, 1, 0)
    query = draw.normal(5, 4, 128)[..., ::2]
    check(case, query, key, value, SLOTS, rotary=draw_rotary(5, 64, device))
    check(case, query, key, value, SLOTS)


@pytest.mark.parametrize("device", [CPU, A100, H200], ids=lambda device: device.name)
def test_defaults_are_valid(device):
    for group in (1, 4, 7, 64):
        for head_dim in (32, 72, 128, 256):
            assert is_valid(default(device, 3, group, head_dim), device)
    assert all(is_valid(config, device) for config in candidates(device))
    assert not is_valid(AppendConfig(4, 3, False), device)
    assert is_valid(AppendConfig(1, 1, True), device) == (device is H200)


def test_work_counts_every_value_once():
    assert work(2, 8, 2, 64)[1] == 2 * 64 * (8 * 4 + 2 * 2 * 3)


@pytest.mark.parametrize(
    ("device", "head_dim", "dtype", "options", "message"),
    [
        (CPU, 64, E4M3.dtype, {}, "needs a CUDA GPU, got CPU"),
        (Device("cuda", "V100", (7, 0)), 64, torch.float16, {}, "8.0 or newer, got 7.0"),
        (A100, 64, E4M3.dtype, {}, "8.9 or newer, got 8.0"),
        (A100, 64, torch.bfloat16, {"is_fp8_query": True}, "8.9 or newer, got 8.0"),
        (H200, 512, E4M3.dtype, {}, "head_dim must be 1 to 256, got 512"),
        (H200, 256, E4M3.dtype, {"group": 129}, "fit 32768 values, got 129 heads of 256"),
    ],
)
def test_objections(device, head_dim, dtype, options, message):
    assert message in objection(device, head_dim, dtype, **options)


def test_no_objection():
    assert objection(A100, 64, torch.bfloat16) is None
    assert objection(H200, 72, E5M2.dtype, 16, is_fp8_query=True) is None


@pytest.mark.gpu
def test_a_gpu_chooses_triton():
    for dtype in (torch.bfloat16, E4M3.dtype):
        request = ops.Request(
            op="append_kv",
            device=describe("cuda"),
            dtype=torch.bfloat16,
            other_dtype=dtype,
            head_dim=128,
        )
        assert ops.select(request).impl == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 256, 3001])
def test_real_sizes_on_a_gpu(num_tokens, granularity):
    case = PagedCase(
        lengths=(num_tokens, 70),
        q_lens=(1, 1),
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        granularity=granularity,
    )
    query, key, value = draw_tokens(case, num_tokens, "cuda")
    slots = torch.randperm(num_tokens).tolist()
    rotary = draw_rotary(num_tokens, 128, "cuda")
    for _ in range(3):
        run = partial(ops.append_kv, impl="triton")
        check(case, query, key, value, slots, rotary=rotary, run=run)


@pytest.mark.gpu
@pytest.mark.parametrize("config", candidates(H200), ids=str)
def test_candidates_on_a_gpu(config):
    case = PagedCase(num_heads=9, num_kv_heads=3, head_dim=80, granularity=PerToken())
    query, key, value = draw_tokens(case, 300, "cuda")
    slots = torch.randperm(300).tolist()
    run = partial(append_kv, config=config)
    check(case, query, key, value, slots, rotary=draw_rotary(300, 80, "cuda"), run=run)


@pytest.mark.gpu
def test_pages_beyond_32_bits():
    case = PagedCase(lengths=(3,), q_lens=(1,), head_dim=256, num_kv_heads=8)
    pages = torch.zeros(2**31 // (8 * 64 * 256) + 2, 8, 64, 256, device="cuda", dtype=torch.uint8)
    small = make_paged_view(case, device="cuda")
    view = type(small)(pages.view(E4M3.dtype), pages.view(E4M3.dtype), *small.tensors[2:])
    _, key, value = draw_tokens(case, 1, "cuda")
    last = len(pages) * 64 - 1
    ops.append_kv(view, value, value, torch.tensor([last], device="cuda"), impl="triton")
    expected = make_paged_view(case, device="cuda")
    reference(expected, value, value, torch.tensor([0], device="cuda"))
    # The value comes last or first: keys and values share these pages.
    written = pages[-1, :, -1]
    choices = (expected.key_pages, expected.value_pages)
    assert any(torch.equal(written, choice[0, :, 0].view(torch.uint8)) for choice in choices)
    assert not pages[:-1].any()


@pytest.mark.gpu
def test_a_chain_of_appends_in_a_cuda_graph():
    """Each kernel may start before the one in front has ended, and must wait for it."""
    case = PagedCase(num_heads=8, num_kv_heads=2, granularity=PerToken())
    view, expected = make_paged_view(case, device="cuda"), make_paged_view(case, device="cuda")
    query, key, value = (x.contiguous() for x in draw_tokens(case, 64, "cuda"))
    slots = torch.arange(64, device="cuda")
    rotary = draw_rotary(64, 64, "cuda")

    def chain(run, cache):
        turned = query
        for step in range(8):
            where = torch.roll(slots, step)
            turned = run(cache, turned[:, :2], value, where, query=turned, rotary=rotary)
        return turned

    chain(partial(ops.append_kv, impl="triton"), make_paged_view(case, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(partial(ops.append_kv, impl="triton"), view)
    for _ in range(5):
        query.copy_(torch.randn_like(query))
        graph.replay()
        assert_same_bits(result, chain(reference, expected))
        for name in BUFFERS:
            assert_same_bits(getattr(view, name), getattr(expected, name))
