"""Logits of −Inf: keys that weigh nothing, and zeros where a row has no others."""

from dataclasses import replace

import pytest
import torch

from octavo.cache.view import PagedView
from octavo.kernels.attention.config import AttentionConfig
from octavo.kernels.decode.config import DecodeShape, default, plan_settings
from octavo.kernels.device import Device
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.decode_plan import DecodePlan, make_items
from octavo.numerics.qkv import QkvScales
from octavo.reference import attention as reference
from octavo.reference.paged import paged_attention

pytest.importorskip("triton")
from octavo.kernels.attention.triton import attention
from octavo.kernels.decode.triton import decode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = Device(type="cuda", name="small", capability=(9, 0), num_sms=4)
HIDDEN = {"first": slice(0, 64), "last": slice(64, 96), "all": slice(0, 96)}
# Rows of padding multiply 0 with −Inf.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")


def draw(num_queries, hidden, dtype, device):
    """Queries [n, 1, 32], 96 keys and values; with the hidden keys each product is −Inf."""
    torch.manual_seed(0)
    q = torch.rand(num_queries, 1, 32) + 0.5
    k, v = torch.randn(2, 96, 1, 32).unbind()
    k[HIDDEN[hidden], :, 3] = -torch.inf
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def assert_near(actual, expected):
    torch.testing.assert_close(actual.float(), expected, rtol=0.02, atol=0.02, equal_nan=True)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_attention(hidden, dtype, causal, has_sinks, device):
    q, k, v = draw(40, hidden, dtype, device)
    if hidden == "all" and not has_sinks:
        v[95] = torch.inf  # zeros are zeros all the same
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    sinks = torch.zeros(1, device=device) if has_sinks else None
    spec = AttentionSpec(causal=causal)
    out, lse = attention(
        *(q, k, v, spec, QkvScales.ones(device)),
        packing=None,
        sinks=sinks,
        key_mask=None,
        out_dtype=FP32,
        value_layout="rows",
        config=AttentionConfig(32, 32, 4, 2),
    )
    expected, expected_lse = reference.attention(q, k, v, spec, sinks=sinks)
    assert_near(out, expected)
    assert_near(lse, expected_lse)
    if hidden == "all":
        assert not out.any()


def run_decode(q, k, v, sinks=None, block_tokens=64):
    """One sequence of 96 tokens in pages of 16."""
    pages = [x.view(6, 16, 1, 32).transpose(1, 2).contiguous() for x in (k, v)]
    one = torch.ones((), device=q.device)
    table = torch.arange(6, dtype=torch.int32, device=q.device).unsqueeze(0)
    lengths = torch.full((1,), 96, dtype=torch.int32, device=q.device)
    view, spec = PagedView(*pages, one, one, table, lengths), AttentionSpec(causal=True)
    shape = DecodeShape(
        num_sequences=1,
        q_len=q.shape[0],
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        page_size=16,
        max_pages=6,
        q_dtype=q.dtype,
        page_dtype=k.dtype,
    )
    config = replace(default(shape, SMALL), block_tokens=block_tokens)
    settings = plan_settings(shape, config, SMALL)
    counters = torch.zeros(settings.programs_per_item, dtype=torch.int32, device=q.device)
    plan = DecodePlan(make_items(lengths, settings).to(q.device), counters, settings, "triton")
    out = decode(q.unsqueeze(0), view, spec, plan, config, sinks=sinks, out_dtype=FP32)
    ends = torch.tensor([0, len(q)], dtype=torch.int32)
    expected, _ = paged_attention(q, view, ends, spec, sinks=sinks)
    return out[0], expected


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_decode(hidden, dtype, has_sinks, device):
    q, k, v = draw(2, hidden, BF16 if dtype.itemsize == 1 else dtype, device)
    if hidden == "all" and not has_sinks:
        v[95] = torch.inf
    sinks = torch.zeros(1, device=device) if has_sinks else None
    out, expected = run_decode(q, k.to(dtype), v.to(dtype), sinks)
    assert_near(out, expected)
    if hidden == "all":
        assert not out.any()


def test_decode_of_logits_that_are_very_low(device):
    """Finite all the same: equal ones weigh the same."""
    q, k, v = draw(2, "all", FP32, device)
    k.zero_()[..., 3] = -1e35  # one product each: a sum's last bit would decide
    out, expected = run_decode(q, k, v, block_tokens=128)
    assert_near(expected[1], v.mean(dim=0))
    assert_near(out, expected)
