"""Attention over pages: rotated and centered keys change rounding, and nothing else."""

import copy

import pytest
import torch

from octavo.cache.view import PagedView
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import Device
from octavo.layers.decoder_attention import DecoderAttention
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerHead, PerToken
from octavo.numerics.hadamard import hadamard
from octavo.numerics.rotary import Rotary
from octavo.ops import check
from octavo.reference.qkv import rotate
from octavo.testing.asserts import assert_same_bits

HEADS, KV_HEADS, PAGE_SIZE, LENGTHS = 4, 2, 16, (37, 5)
CAUSAL = AttentionSpec(causal=True)


def make_view(head_dim, dtype, scale=None):
    """Empty pages of two sequences."""
    pages = [torch.zeros(6, KV_HEADS, PAGE_SIZE, head_dim, dtype=dtype) for _ in range(2)]
    if scale is None:
        scale = torch.ones(())
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    return PagedView(*pages, scale, scale.clone(), table, torch.tensor(LENGTHS, dtype=torch.int32))


def make_inputs(head_dim, offset=0.0):
    """Keys with a large constant channel, values, their slots and queries of the last 3 tokens."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    k, v = torch.randn(2, num_tokens, KV_HEADS, head_dim, generator=generator)
    k[..., 1] += offset
    q = torch.randn(2, 3, HEADS, head_dim, generator=generator)
    slots = torch.cat([torch.arange(37), 48 + torch.arange(5)])
    return q, k, v, slots


def mean_of(k):
    return k.mean(0).contiguous()


def run(layer, view, q, k, v, slots, is_prefill=False):
    layer.append(view, k, v, slots)
    if not is_prefill:
        return layer.decode(q, view)
    ends = torch.tensor([0, 3, 6], dtype=torch.int32)
    return layer.prefill(q.flatten(0, 1), view, ends, 3).view(q.shape)


@pytest.mark.parametrize("is_prefill", [False, True])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 96, 128, 192])
def test_without_rounding_attention_is_the_same(head_dim, window, is_prefill):
    spec = AttentionSpec(causal=True, window=window)
    q, k, v, slots = make_inputs(head_dim, offset=3.0)
    changes = {
        "none": {},
        "rotated": {"rotates_keys": True},
        "centered": {"key_mean": mean_of(k)},
        "both": {"rotates_keys": True, "key_mean": mean_of(k)},
    }
    found, stored = {}, {}
    for name, options in changes.items():
        # e5m2 leaves queries as they are, and pages in float32 stand in for FP8: none is rounded.
        options = {"dtype": E5M2.dtype, "head_dim": head_dim, **options}
        layer = DecoderAttention(HEADS, KV_HEADS, spec, **options)
        view = make_view(head_dim, torch.float32)
        found[name] = run(layer, view, q, k, v, slots, is_prefill)
        stored[name] = view.key_pages
    for name in ("rotated", "centered", "both"):
        assert (stored[name] - stored["none"]).abs().max() > 1
        torch.testing.assert_close(found[name], found["none"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("granularity", [PerHead(), PerToken()], ids=str)
def test_what_is_stored_is_the_rotated_rest(granularity):
    q, k, v, slots = make_inputs(32, offset=500.0)
    k = k.bfloat16()  # in steps of 2 there: without care, what is left would be in such steps, too
    mean = mean_of(k.float())
    expected = (k.double() - mean.double()) @ hadamard(32).double()
    scales = {} if granularity == PerToken() else {"key_scale": torch.full((KV_HEADS,), 0.02)}
    layer = DecoderAttention(
        *(HEADS, KV_HEADS, CAUSAL),
        granularity=granularity,
        rotates_keys=True,
        key_mean=mean,
        head_dim=32,
        **scales,
    )
    is_token = granularity == PerToken()
    scale = torch.zeros(6, KV_HEADS, PAGE_SIZE) if is_token else layer.key_scale
    view = make_view(32, E4M3.dtype, scale)
    layer.append(view, k, v, slots)
    data = view.key_pages.float()
    data = data * (view.key_scale[..., None] if is_token else layer.key_scale.view(1, -1, 1, 1))
    rows = data.transpose(1, 2).flatten(0, 1)[slots]
    assert ((rows - expected).abs() <= expected.abs() / 16 + 2e-4).all()


def test_saturation_counts_what_is_stored():
    q, k, v, slots = make_inputs(32, offset=1000.0)
    slots[-1] = -1
    counts = {}
    for name, mean in (("plain", None), ("centered", mean_of(k))):
        options = {"key_mean": mean, "head_dim": 32, "counts_saturation": True}
        layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL, **options)
        layer.append(make_view(32, E4M3.dtype), k, v, slots)
        counts[name] = layer.saturated.tolist()
    assert counts == {"plain": [KV_HEADS * (len(slots) - 1), 0], "centered": [0, 0]}


def test_fp8_with_a_large_constant_channel():
    q, k, v, slots = make_inputs(64, offset=1e6)
    exact = run(
        DecoderAttention(HEADS, KV_HEADS, CAUSAL, dtype=None),
        make_view(64, torch.float32),
        *(q, k - torch.eye(64)[1] * 1e6, v, slots),
    )
    errors = {}
    options = {"granularity": PerToken(), "head_dim": 64}
    for name, change in (("plain", {}), ("both", {"rotates_keys": True, "key_mean": mean_of(k)})):
        layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL, **options, **change)
        view = make_view(64, E4M3.dtype, torch.zeros(6, KV_HEADS, PAGE_SIZE))
        found = run(layer, view, q, k, v, slots)
        errors[name] = float((found - exact).norm() / exact.norm())
    assert errors["both"] < 0.05 < 0.5 < errors["plain"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_keep_the_dtype_of_queries(dtype):
    inputs = make_inputs(64)
    q, k, v, slots = (x if x.dtype == torch.int64 else x.to(dtype) for x in inputs)
    options = {"rotates_keys": True, "key_mean": mean_of(k).float(), "head_dim": 64}
    for fmt in (E4M3, E5M2):
        for is_prefill in (False, True):
            layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL, dtype=fmt.dtype, **options)
            found = run(layer, make_view(64, fmt.dtype), q, k, v, slots, is_prefill)
            assert found.dtype == dtype and bool(found.isfinite().all())


def test_it_compiles_in_one_graph():
    q, k, v, slots = make_inputs(64, offset=50.0)
    options = {"rotates_keys": True, "key_mean": mean_of(k), "head_dim": 64}
    layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL, **options)
    expected = run(layer, make_view(64, E4M3.dtype), q, k, v, slots)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(layer, make_view(64, E4M3.dtype), q, k, v, slots), expected)


def test_buffers_move_copy_and_load():
    mean = torch.randn(KV_HEADS, 16) + 1 / 3
    options = {"rotates_keys": True, "head_dim": 16}
    layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL, key_mean=mean, **options)
    for other in (copy.deepcopy(layer), copy.deepcopy(layer).to(torch.bfloat16)):
        assert torch.equal(other.key_mean, mean) and torch.equal(other.rotation, hadamard(16))
    assert "rotation" not in layer.state_dict()
    loaded = DecoderAttention(HEADS, KV_HEADS, CAUSAL, key_mean=torch.zeros(2, 16), **options)
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded.key_mean, mean)
    assert "keys rotated, keys centered" in repr(layer) and layer.rotates_keys
    assert "keys rotated" not in repr(DecoderAttention(HEADS, KV_HEADS, CAUSAL))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"rotates_keys": True}, ConfigError, "x: expected a head_dim to rotate keys"),
        ({"dtype": None, "rotates_keys": True, "head_dim": 8}, ConfigError, "changes no keys"),
        ({"dtype": None, "key_mean": torch.zeros(2, 8)}, ConfigError, "changes no keys"),
        ({"key_mean": torch.zeros(4, 8)}, ConfigError, r"shape \[2, 8\].* got torch.float32 \[4"),
        ({"key_mean": torch.zeros(2, 8), "head_dim": 16}, ConfigError, r"\[2, 16\].*\[2, 8\]"),
        ({"key_mean": torch.zeros(2, 8).double()}, ConfigError, "float32 key mean.*float64"),
        ({"key_mean": torch.full((2, 8), torch.nan)}, ConfigError, "got NaN or Inf in it"),
    ],
)
def test_what_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        DecoderAttention(HEADS, KV_HEADS, CAUSAL, name="x", **options)


def test_centered_keys_need_softmax_over_keys_alone():
    mean = torch.zeros(KV_HEADS, 16)
    capped = AttentionSpec(causal=True, softcap=30.0)
    with pytest.raises(UnsupportedError, match="x: .* got a soft-cap"):
        DecoderAttention(HEADS, KV_HEADS, capped, key_mean=mean, name="x")
    DecoderAttention(HEADS, KV_HEADS, capped, rotates_keys=True, head_dim=16)
    q, k, v, slots = make_inputs(16)
    sinks, view = torch.zeros(HEADS), make_view(16, E4M3.dtype)
    layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL, key_mean=mean, name="x")
    with pytest.raises(UnsupportedError, match="x: .* got sinks"):
        layer.decode(q, view, sinks=sinks)
    ends = torch.tensor([0, 3, 6], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="x: .* got sinks"):
        layer.prefill(q.flatten(0, 1), view, ends, 3, sinks=sinks)


def test_a_layer_that_slept_is_as_before():
    """Memory that was discarded, and a state dict: the rotation is not in it."""
    q, k, v, slots = make_inputs(64, offset=3.0)
    options = {"rotates_keys": True, "head_dim": 64, "key_mean": mean_of(k)}
    scale = torch.tensor(0.05)
    layer = DecoderAttention(
        *(HEADS, KV_HEADS, CAUSAL), key_scale=scale, value_scale=scale, **options
    )
    view = make_view(64, E4M3.dtype, scale)
    expected = run(layer, view, q, k, v, slots)
    state = {name: x.clone() for name, x in layer.state_dict().items()}
    assert "rotation" not in state
    layer.to_empty(device="cpu")
    assert not layer.rotation.isfinite().any()
    layer.load_state_dict(state)
    assert_same_bits(run(layer, make_view(64, E4M3.dtype, scale), q, k, v, slots), expected)


def test_a_device_is_checked_when_it_changes(monkeypatch):
    seen = []
    monkeypatch.setattr(DecoderAttention, "check_device", lambda self, device: seen.append(device))
    q, k, v, slots = make_inputs(64)
    layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL)
    for _ in range(3):
        layer.append(make_view(64, E4M3.dtype), k, v, slots)
    twin = copy.deepcopy(layer)
    layer._appended_by = torch.device("meta"), None
    for one in (layer, twin):
        one.append(make_view(64, E4M3.dtype), k, v, slots)
    assert seen == [torch.device("cpu")] * 2


def test_append_turns_keys_and_the_query():
    _, k, v, slots = make_inputs(32)
    query = torch.randn(len(k), HEADS, 32, generator=torch.Generator().manual_seed(1))
    angles = torch.arange(len(k))[:, None] / 10 ** torch.linspace(0, 2, 16)
    rotary = Rotary(angles.cos(), angles.sin())
    layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL)
    found, expected = make_view(32, E4M3.dtype), make_view(32, E4M3.dtype)
    turned = layer.append(found, k, v, slots, query=query, rotary=rotary)
    assert_same_bits(turned, rotate(query, rotary))
    assert layer.append(expected, rotate(k, rotary), v, slots) is None
    for name in ("key_pages", "value_pages"):
        assert_same_bits(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(
    "options", [{"rotates_keys": True, "head_dim": 32}, {"key_mean": torch.zeros(KV_HEADS, 32)}]
)
def test_a_layer_that_changes_keys_turns_none(options):
    _, k, v, slots = make_inputs(32)
    layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL, name="x", **options)
    rotary = Rotary(torch.ones(len(k), 16), torch.zeros(len(k), 16))
    with pytest.raises(ConfigError, match="x: expected keys that are turned, got a rotary"):
        layer.append(make_view(32, E4M3.dtype), k, v, slots, rotary=rotary)


def test_a_gpu_without_fp8_stores_no_fp8_pages(monkeypatch):
    device = Device(type="cuda", name="NVIDIA A100", capability=(8, 0))
    monkeypatch.setattr(check, "describe", lambda _: device)
    q, k, v, slots = make_inputs(64)
    layer = DecoderAttention(HEADS, KV_HEADS, CAUSAL, name="layers.0.self_attn")
    view = make_view(64, E4M3.dtype)
    said = r"layers\.0\.self_attn: .* got NVIDIA A100 \(sm_80\): leave kv_cache out"
    with pytest.raises(UnsupportedError, match=said):
        layer.append(view, k, v, slots)
    layer.impl = "reference"
    assert run(layer, view, q, k, v, slots).isfinite().all()
    layer.impl = None  # a device is checked again for another implementation
    with pytest.raises(UnsupportedError, match=said):
        layer.append(view, k, v, slots)
    plain = DecoderAttention(HEADS, KV_HEADS, CAUSAL, dtype=None)
    assert run(plain, make_view(64, torch.float32), q, k, v, slots).isfinite().all()
