"""Every op on a GPU: the same bits as on the CPU where nothing is added up, close where it is."""

import pytest
import torch

from octavo import ops
from octavo.cache.view import PagedView
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerBlock, PerChannel, PerHead, PerTensor, PerToken
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import AttentionCase, MatmulCase, PackedCase, PagedCase
from octavo.testing.inputs import (
    Draw,
    make_attention_inputs,
    make_decode_inputs,
    make_matmul_inputs,
    make_packed_inputs,
    make_paged_view,
    make_prefill_inputs,
)

pytestmark = pytest.mark.gpu

FP8 = E4M3.dtype
DEVICES = ("cpu", "cuda")


def assert_close(cuda: torch.Tensor, cpu: torch.Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest element."""
    assert cuda.device.type == "cuda"
    assert (cuda.dtype, cuda.shape) == (cpu.dtype, cpu.shape)
    limit = tolerance * float(cpu.double().abs().max()) if cpu.numel() else 0.0
    torch.testing.assert_close(cuda.cpu().double(), cpu.double(), rtol=0, atol=limit)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerHead(), PerToken(), PerChannel(), PerBlock(16, 32)], ids=str
)
def test_quantize(granularity, fmt):
    x = Draw(0).wide(5, 65, 72, dtype=torch.bfloat16)
    cpu, cuda = ops.quantize(x, granularity, fmt), ops.quantize(x.cuda(), granularity, fmt)
    assert_same_bits(cuda.data, cpu.data)
    assert_same_bits(cuda.scale, cpu.scale)


def test_quantize_qkv_with_histories():
    results = []
    for device in DEVICES:
        history = tuple(AmaxHistory().to(device) for _ in "qkv")
        for seed in range(3):
            q, k, v = Draw(seed, device).normal(3, 2, 9, 4, 72, dtype=torch.bfloat16)
            result = ops.quantize_qkv(q, k, v, history=history)
        buffers = [buffer for one in history for buffer in one.ring]
        results.append([result.q, result.k, result.v, *vars(result.scales).values(), *buffers])
    for cpu, cuda in zip(*results, strict=True):
        assert_same_bits(cuda, cpu)


EVERYTHING = AttentionSpec(causal=True, window=40, softcap=10.0)


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(),
        AttentionCase(batch=0),
        AttentionCase(q_len=70, kv_len=200, num_heads=9, num_kv_heads=3, head_dim=72),
        AttentionCase(spec=EVERYTHING, has_sinks=True, has_key_mask=True),
        AttentionCase(q_len=3, kv_len=300, spec=AttentionSpec(promote_every=None)),
        PackedCase(spec=EVERYTHING, has_sinks=True),
    ],
    ids=str,
)
def test_attention(case, dtype):
    make = make_packed_inputs if isinstance(case, PackedCase) else make_attention_inputs
    cpu, cuda = (
        ops.attention(
            **make(case, dtype=dtype, granularity=PerToken(), device=device),
            out_dtype=torch.float32,
            return_lse=True,
            impl="reference",
        )
        for device in DEVICES
    )
    # A weight next to a midpoint may be rounded the other way: 2^-4 of its share.
    assert_close(cuda[0], cpu[0], 1e-2 if dtype == FP8 else 1e-5)
    torch.testing.assert_close(cuda[1].cpu(), cpu[1], rtol=1e-5, atol=1e-5)


PAGED_CASES = [
    PagedCase(),
    PagedCase(lengths=(), q_lens=()),
    PagedCase(granularity=PerHead(), page_size=16, layout="token_major", has_sinks=True),
    PagedCase(granularity=PerToken(), q_lens=(1, 3, 3, 3, 3)),
    PagedCase(dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", PAGED_CASES, ids=str)
def test_attention_over_pages(case):
    for make, op in (
        (make_decode_inputs, ops.decode_attention),
        (make_prefill_inputs, ops.prefill_attention),
    ):
        cpu, cuda = (
            op(**make(case, dtype=torch.float32, device=device), impl="reference")
            for device in DEVICES
        )
        assert_close(cuda, cpu, 1e-5)


@pytest.mark.parametrize("case", PAGED_CASES, ids=str)
def test_append(case):
    views: list[PagedView] = []
    for device in DEVICES:
        view = make_paged_view(case, device=device)
        key, value = Draw(1, device).normal(2, 4, 2, 64, dtype=torch.bfloat16)
        slots = torch.tensor([3, -1, 20, 31], device=device)
        ops.append_kv(view, key, value, slots, impl="reference")
        views.append(view)
    for name in ("key_pages", "value_pages", "key_scale", "value_scale", "page_table"):
        assert_same_bits(getattr(views[1], name), getattr(views[0], name))


@pytest.mark.parametrize(
    "case",
    [
        MatmulCase(has_bias=True),
        MatmulCase(a=None),
        MatmulCase(a=PerBlock(1, 64), b=PerBlock(64, 64), depth=200),
        MatmulCase(a=PerTensor(), b=PerTensor(), rows=1),
    ],
    ids=str,
)
def test_matmul(case):
    cpu, cuda = (
        ops.scaled_mm(
            **make_matmul_inputs(case, device=device), out_dtype=torch.float32, impl="reference"
        )
        for device in DEVICES
    )
    assert_close(cuda, cpu, 1e-6)


def test_devices_must_agree():
    q, k = torch.zeros(1, 5, 4, 64), torch.zeros(1, 5, 2, 64, device="cuda")
    with pytest.raises(ValueError, match="expected k on cpu like q, got it on cuda:0"):
        ops.attention(q, k, k)
