"""The rotate_qk kernel against `octavo.reference`: the same bits, on a GPU or interpreted.

So its error budget is the reference's, which tests/reference/test_rotary.py derives.
"""

from functools import partial

import pytest
import torch

from octavo import ops
from octavo.kernels.device import CPU, Device, describe
from octavo.kernels.rotate_qk.config import (
    RotateQkConfig,
    candidates,
    default,
    is_valid,
    objection,
    work,
)
from octavo.numerics.rotary import Rotary
from octavo.reference.qkv import rotate_qk as reference
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw
from octavo_testkit.kernels import qkv_inputs
from octavo_testkit.kernels.qkv_inputs import draw_rotary

pytest.importorskip("triton")
from octavo.kernels.rotate_qk.triton import rotate_qk

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
# Few programs, for the interpreter, and yet several.
SMALL = RotateQkConfig(16, 256, 4)


def draw_packed(*sizes, **options):
    """q and k as views of one projection, which has values as well."""
    return qkv_inputs.draw_packed(*sizes, **options)[:2]


def check(q, k, rotary, config=SMALL):
    """The kernel gives the reference's bits; NaN has many, any of which will do."""
    actual, expected = rotate_qk(q, k, rotary, config=config), reference(q, k, rotary)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_same_bits(*(torch.where(x.isnan(), 0.0, x) for x in (ours, theirs)))


ROTARY = {
    "halves": lambda rows, device: draw_rotary(rows, 72, device),
    "interleaved": lambda rows, device: draw_rotary(rows, 72, device, is_interleaved=True),
    "partial": lambda rows, device: draw_rotary(rows, 36, device),
    "partial-interleaved": lambda rows, device: draw_rotary(rows, 20, device, is_interleaved=True),
    "bf16": lambda rows, device: draw_rotary(rows, 72, device, dtype=torch.bfloat16),
    "empty": lambda rows, device: draw_rotary(rows, 0, device),
}


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary(kind, device):
    q, k = draw_packed(21, 2, 1, 72, device)
    check(q, k, ROTARY[kind](21, device))


@pytest.mark.parametrize("head_dim", [2, 64, 72, 80, 128, 256])
@pytest.mark.parametrize("num_tokens", [0, 1, 63])
def test_sizes(num_tokens, head_dim, device):
    q, k = draw_packed(num_tokens, 3, 1, head_dim, device)
    check(q, k, draw_rotary(num_tokens, head_dim, device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype, device):
    q, k = draw_packed(9, 2, 1, 64, device, dtype)
    check(q, k, draw_rotary(9, 64, device))
    check(q, k.float(), draw_rotary(9, 64, device))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_one_table_for_every_sequence(is_interleaved, device):
    q, k = (x.view(3, 7, -1, 40) for x in draw_packed(21, 2, 1, 40, device))
    check(q, k, draw_rotary(7, 40, device, is_interleaved=is_interleaved))


def test_tables_with_strides(device):
    """Columns of a table that repeats its halves, as models have them, and every second one."""
    q, k = draw_packed(5, 2, 2, 40, device)
    table = draw_rotary(5, 80, device)
    check(q, k, Rotary(table.cos[:, :20], table.sin[:, 20:]))
    check(q, k, Rotary(table.cos[:, ::2], table.sin.t().contiguous().t()[:, ::2]))


def test_strided_inputs(device):
    draw = Draw(0, device)
    rotary = draw_rotary(5, 40, device)
    check(*(draw.normal(2, 3, 5, 40).transpose(1, 2) for _ in range(2)), rotary)
    check(*(draw.normal(40, 5, 3).permute(1, 2, 0) for _ in range(2)), rotary)
    check(*(draw.normal(1, 3, 40).expand(5, -1, -1) for _ in range(2)), rotary)
    check(*(draw.normal(2, 5, 4, 2, 40)[:, :, ::2] for _ in range(2)), draw_rotary(4, 40, device))


def test_other_lengths_of_keys(device):
    draw = Draw(0, device)
    q, k = draw.normal(2, 3, 4, 40), draw.normal(2, 6, 2, 40)
    check(q, k, draw_rotary(3, 40, device))
    check(q, k[:0], draw_rotary(3, 40, device))


def test_unusual_values(device):
    """NaN stays with its pair, Inf makes Inf or NaN there; large sums overflow as they must."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k = (x.to(dtype).clone() for x in draw_packed(12, 3, 1, 50, device, torch.float32))
        q[3, 0, 5:8] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)
        q[7], k[7] = -0.0, 0.0
        k[9] *= 1e-42
        k[11] = torch.finfo(dtype).max
        rotary = draw_rotary(12, 50, device)
        check(q, k, rotary)
        turned, _ = rotate_qk(q, k, rotary, config=SMALL)
        touched = torch.zeros_like(turned, dtype=torch.bool)
        touched[3, 0, 5:8] = touched[3, 0, 30:33] = True
        assert torch.equal(~turned.isfinite(), touched)


def test_defaults_and_candidates_are_valid():
    assert is_valid(default()) and all(is_valid(config) for config in candidates())
    assert not is_valid(RotateQkConfig(16, 96, 4))
    assert not is_valid(RotateQkConfig(16, 1, 4))


def test_work_counts_every_value_twice():
    assert work(3, 5, 4, 2, 64)[1] == (3 * 4 + 5 * 2) * 64 * 2 * 2


@pytest.mark.parametrize(
    ("device", "head_dim", "message"),
    [
        (CPU, 64, "needs a CUDA GPU, got CPU"),
        (Device("cuda", "T4", (7, 5)), 64, "8.0 or newer, got 7.5"),
        (H200, 512, "even and 2 to 256, got 512"),
        (H200, 33, "even and 2 to 256, got 33"),
    ],
)
def test_objections(device, head_dim, message):
    assert message in objection(device, head_dim)


def test_no_objection_on_an_h200():
    assert objection(H200, 72) is None


@pytest.mark.gpu
def test_a_gpu_chooses_triton():
    request = ops.Request(
        op="rotate_qk", device=describe("cuda"), dtype=torch.bfloat16, head_dim=72
    )
    assert ops.select(request).impl == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROTARY)
def test_real_sizes_on_a_gpu(kind):
    num_tokens = 24480
    q, k = draw_packed(num_tokens, 16, 16, 72, "cuda")
    rotary = ROTARY[kind](num_tokens, "cuda")
    check(q, k, rotary, config=None)
    run = partial(ops.rotate_qk, q, k, rotary, impl="triton")
    first = run()
    for _ in range(5):
        for again, expected in zip(run(), first, strict=True):
            assert_same_bits(again, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_head_dims_on_a_gpu(head_dim):
    q, k = draw_packed(777, 8, 2, head_dim, "cuda")
    for is_interleaved in (False, True):
        rotary = draw_rotary(777, head_dim, "cuda", is_interleaved=is_interleaved)
        check(q, k, rotary, config=None)


@pytest.mark.gpu
@pytest.mark.parametrize("config", candidates(), ids=str)
def test_candidates_on_a_gpu(config):
    q, k = draw_packed(300, 16, 16, 72, "cuda")
    check(q, k, draw_rotary(300, 72, "cuda"), config=config)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    num_tokens = 2**31 // 2048 + 5
    x = torch.zeros(num_tokens, 16, 128, device="cuda", dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, 16, 128, device="cuda")
    rotary = draw_rotary(num_tokens, 128, "cuda")
    turned, _ = ops.rotate_qk(x, x[:, :1], rotary, impl="triton")
    last = Rotary(rotary.cos[-3:], rotary.sin[-3:])
    assert_same_bits(turned[-3:], reference(x[-3:], x[-3:], last)[0])
    assert not turned[:-3].any()


@pytest.mark.gpu
def test_in_a_cuda_graph():
    q, k = (x.contiguous() for x in draw_packed(600, 4, 2, 72, "cuda"))
    rotary = draw_rotary(600, 72, "cuda")
    run = partial(ops.rotate_qk, q, k, rotary, impl="triton")
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for _ in range(3):
        for x in (q, k):
            x.copy_(torch.randn_like(x))
        graph.replay()
        for ours, theirs in zip(result, reference(q, k, rotary), strict=True):
            assert_same_bits(ours, theirs)
