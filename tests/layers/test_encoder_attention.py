"""EncoderAttention: layouts, scales of its own, and what it refuses."""

import copy
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo import AttentionSpec, ConfigError, Packing, QkvScales, UnsupportedError, ops
from octavo.kernels.device import Device
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.scaling import DynamicScaling, StaticScaling
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.rotary import Rotary
from octavo.ops import check
from octavo.recipe import AttentionSettings
from octavo.testing.asserts import assert_same_bits

FP8 = AttentionSettings()
PER_HEAD = AttentionSettings(granularity="head")
STATIC = AttentionSettings(scaling="static")


def draw(*shape, heads=(4, 2, 2), head_dim=72, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, n, head_dim, generator=generator).to(dtype) for n in heads]


def layer(**options):
    return EncoderAttention(4, 72, num_kv_heads=2, name="blocks.0.attn", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fp8", [None, FP8, PER_HEAD], ids=str)
def test_it_is_the_op(fp8, dtype):
    q, k, v = draw(2, 65, dtype=dtype)
    out = layer(fp8=fp8, scale=0.2)(q, k, v)
    assert out.dtype == dtype and out.shape == q.shape
    spec = AttentionSpec(softmax_scale=0.2)
    if fp8 is None:
        assert_same_bits(out, ops.attention(q, k, v, spec))
        return
    granularity = PerHead() if fp8 == PER_HEAD else PerTensor()
    qkv = ops.quantize_qkv(q, k, v, granularity=granularity)
    assert_same_bits(out, ops.attention(qkv.q, qkv.k, qkv.v, spec, qkv.scales, out_dtype=dtype))


@pytest.mark.parametrize("fp8", [None, FP8], ids=str)
def test_heads_side_by_side(fp8):
    qkv = draw(2, 63)
    expected = layer(fp8=fp8)(*qkv)
    joint = layer(fp8=fp8)(*(x.flatten(-2) for x in qkv))
    assert joint.shape == (2, 63, 4 * 72)
    assert_same_bits(joint, expected.flatten(-2))


@pytest.mark.parametrize("fp8", [None, FP8], ids=str)
def test_packed_layouts(fp8):
    qkv = draw(100)
    ends = torch.tensor([0, 63, 63, 100], dtype=torch.int32)
    packed = {"cu_seqlens": ends, "max_seqlen": 70}
    out = layer(fp8=fp8)(*qkv, **packed)
    assert out.shape == (100, 4, 72)
    if fp8 is None:
        assert_same_bits(out, ops.attention(*qkv, packing=Packing.same(ends, 70)))
    for change in (
        lambda x: x.flatten(-2),
        lambda x: x.unsqueeze(0),
        lambda x: x.flatten(-2).unsqueeze(0),
    ):
        changed = layer(fp8=fp8)(*map(change, qkv), **packed)
        assert_same_bits(changed, change(out))


def test_one_head():
    attend = EncoderAttention(1, 64)
    x = torch.randn(3, 1, 64)
    assert attend(x, x, x).shape == (3, 1, 64)
    packed = {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32), "max_seqlen": 3}
    assert_same_bits(attend(x, x, x, **packed), attend(x.mT.mT, x, x, **packed))
    rows = x.view(1, 3, 64)
    assert_same_bits(attend(rows, rows, rows, **packed).view(3, 1, 64), attend(x, x, x, **packed))


def test_views_of_a_joint_projection():
    joint = torch.randn(2, 30, 3, 4, 72, dtype=torch.bfloat16)
    attend = EncoderAttention(4, 72, fp8=FP8)
    out = attend(*joint.unbind(2))
    again = EncoderAttention(4, 72, fp8=FP8)(*(x.contiguous() for x in joint.unbind(2)))
    assert_same_bits(out, again)


def test_rotary_on_the_way_to_fp8():
    q, k, v = draw(1, 40, heads=(2, 2, 2))
    angle = torch.rand(40, 36)
    rotary = Rotary(angle.cos(), angle.sin())
    out = EncoderAttention(2, 72, fp8=FP8)(q, k, v, rotary=rotary)
    qkv = ops.quantize_qkv(q, k, v, rotary=rotary)
    expected = ops.attention(
        qkv.q, qkv.k, qkv.v, AttentionSpec(), qkv.scales, out_dtype=torch.bfloat16
    )
    assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rotary_without_fp8(dtype):
    q, k, v = draw(1, 40, heads=(4, 2, 2), dtype=dtype)
    angle = torch.rand(40, 36)
    rotary = Rotary(angle.cos(), angle.sin())
    out = layer()(q, k, v, rotary=rotary)
    assert_same_bits(out, ops.attention(*ops.rotate_qk(q, k, rotary), v))
    assert out.dtype == dtype and not list(layer().buffers())


def test_dynamic_scales_remember_sixteen_passes():
    attend = layer(fp8=FP8)
    large = draw(1, 20, seed=1)
    attend(*(8 * x for x in large))
    first = attend.scaling.scales()
    for seed in range(15):
        attend(*draw(1, 20, seed=seed))
        assert_same_bits(attend.scaling.scales().q, first.q)
    attend(*draw(1, 20, seed=99))  # the seventeenth: the first is forgotten
    assert attend.scaling.scales().q < first.q
    assert attend.scaling.num_passes == 17


def test_margin():
    attend = layer(fp8=PER_HEAD)
    attend(*draw(1, 20))
    plain, wide = attend.scaling.scales(), attend.scaling.scales(margin=1.5)
    torch.testing.assert_close(wide.k, 1.5 * plain.k)
    assert plain.q.shape == (4,) and plain.k.shape == plain.v.shape == (2,)


def test_static_scales_are_those_of_the_passes_before():
    qkv = draw(2, 40)
    dynamic = layer(fp8=FP8)
    expected = dynamic(*qkv)
    static = layer(fp8=STATIC, scales=dynamic.scaling.scales())
    assert_same_bits(static(*qkv), expected)
    torch.testing.assert_close(static.scaling.scales(2.0).v, 2 * dynamic.scaling.scales().v)


@pytest.mark.parametrize("fp8", [FP8, PER_HEAD, STATIC], ids=str)
def test_scales_survive(fp8):
    """state_dict, .to(dtype), deepcopy and a file."""
    scales = QkvScales(*(torch.tensor(x) for x in (0.123456, 0.2, 1.0)))
    options = {"scales": scales} if fp8 == STATIC else {}
    attend = layer(fp8=fp8, **options)
    attend(*draw(1, 33))
    expected = attend.scaling.scales()
    other = layer(fp8=fp8, **options)
    file = io.BytesIO()
    torch.save(attend.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    moved = copy.deepcopy(attend).to(torch.bfloat16).to("cpu").half()
    for survivor in (other, moved):
        for name in "qkv":
            assert_same_bits(getattr(survivor.scaling.scales(), name), getattr(expected, name))
        assert_same_bits(survivor(*draw(1, 33)), attend(*draw(1, 33)))


def discard(module, state):
    """Free the memory, get some other, and load into it."""
    module.to_empty(device="cpu")
    module.load_state_dict(state)


def move(module, state):
    """Free the memory under the tensors, and fill it from the host: their addresses stay theirs."""
    buffers = dict(module.named_buffers())
    sizes = {name: buffer.untyped_storage().nbytes() for name, buffer in buffers.items()}
    for buffer in buffers.values():
        buffer.untyped_storage().resize_(0)
    for name, buffer in buffers.items():
        buffer.untyped_storage().resize_(sizes[name])
        buffer.fill_(7).copy_(state[name])


@pytest.mark.parametrize("wake", [discard, move])
@pytest.mark.parametrize("fp8", [FP8, PER_HEAD, STATIC], ids=str)
def test_scales_survive_sleep(fp8, wake):
    scales = QkvScales(torch.rand(4) + 0.1, torch.tensor(0.2), torch.rand(2) + 0.1)
    attend = layer(fp8=fp8, **({"scales": scales} if fp8 == STATIC else {}))
    for seed in range(3):
        attend(*draw(1, 33, seed=seed))
    awake = copy.deepcopy(attend)
    wake(attend, {name: x.clone() for name, x in attend.state_dict().items()})
    for name, buffer in awake.named_buffers():
        assert_same_bits(attend.get_buffer(name), buffer)
    assert_same_bits(attend(*draw(1, 33)), awake(*draw(1, 33)))


def test_discarded_scales_are_garbage_until_loaded():
    attend = layer(fp8=STATIC, scales=QkvScales.ones())
    attend.to_empty(device="cpu")  # NaN, by the tests' own setting
    assert not attend.scaling.q.isfinite()
    assert not attend(*draw(1, 5)).isfinite().any()


def test_a_scale_of_one_is_the_plain_cast():
    q, k, v = draw(1, 33)
    q[0, 0, 0, :4] = torch.tensor([1000.0, -1000.0, 448.0, 1e-9])
    attend = layer(fp8=STATIC, scales=QkvScales.ones())
    found = attend.scaling.quantize(
        (q, k, v), rotary=None, value_layout="rows", cu_seqlens=None, num_tokens=None
    )
    for name, x in zip("qkv", (q, k, v), strict=True):
        plain = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        assert_same_bits(getattr(found, name).contiguous(), plain)


def test_one_graph():
    attend = layer(fp8=FP8)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    again = layer(fp8=FP8)
    for seed in range(3):
        qkv = draw(1, 20, seed=seed)
        assert_same_bits(compiled(*qkv), again(*qkv))
    assert attend.scaling.num_passes == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8": STATIC}, "attention layer blocks.0.attn: scaling is static: expected its scales"),
        ({"scales": QkvScales.ones()}, "expected static scaling for given scales, got none"),
        (
            {"fp8": FP8, "scales": QkvScales.ones()},
            "expected static scaling for given scales, got dynamic",
        ),
        (
            {"fp8": STATIC, "scales": QkvScales(*(torch.ones(n) for n in (3, 2, 2)))},
            r"scale of q for all heads, or 4 of them, got torch.float32 \[3\]",
        ),
        (
            {"fp8": STATIC, "scales": QkvScales(*(torch.zeros(()) for _ in range(3)))},
            "expected positive finite scales of q",
        ),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(ConfigError, match=message):
        layer(**options)


def test_heads_that_do_not_divide():
    with pytest.raises(ConfigError, match="got 4 heads, 3 KV heads and head_dim 72"):
        EncoderAttention(4, 72, num_kv_heads=3)
    with pytest.raises(ConfigError, match="got 0 heads"):
        EncoderAttention(0, 72)


def test_shapes_that_do_not_fit():
    q, k, v = draw(2, 10)
    with pytest.raises(ConfigError, match=r"expected key of shape \[batch, length, 2, 72\]"):
        layer()(q, q, v)
    with pytest.raises(ConfigError, match="or with 288 values side by side"):
        layer()(q[0], k[0], v[0])
    ends = torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"expected query of shape \[tokens, 4, 72\]"):
        layer()(q, k, v, cu_seqlens=ends, max_seqlen=10)
    with pytest.raises(ConfigError, match="or neither, got one of them"):
        layer()(q, k, v, cu_seqlens=ends)


def test_named_in_a_printed_model():
    assert "blocks.0.attn: 4/2 heads of 72" in repr(layer())
    assert repr(EncoderAttention(4, 72)).startswith("EncoderAttention(4/4 heads of 72")


@pytest.mark.slow
def test_two_ranks_share_their_scales(tmp_path):
    qkv = draw(1, 30, heads=(4, 4, 4))
    torch.save(qkv, tmp_path / "qkv.pt")
    script = Path(__file__).parent / "rank.py"
    ranks = [subprocess.Popen([sys.executable, script, str(rank), tmp_path]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    whole = EncoderAttention(4, 72, fp8=FP8)
    assert_same_bits(torch.cat([out for out, _ in parts], dim=2), whole(*qkv))
    for _, scale in parts:
        assert_same_bits(scale, whole.scaling.scales().q)


def test_ranks_rotate_before():
    scaling = DynamicScaling(PerTensor(), 2, 2)
    scaling.group = object()
    q, k, v = draw(1, 5, heads=(2, 2, 2))
    table = torch.ones(5, 36)
    options = {"value_layout": "rows", "cu_seqlens": None, "num_tokens": None}
    with pytest.raises(UnsupportedError, match="rotate them before"):
        scaling.quantize((q, k, v), rotary=Rotary(table, table), **options)


def test_static_scaling_takes_one_scale_for_each_head():
    scales = QkvScales(torch.rand(4) + 0.5, torch.rand(2) + 0.5, torch.tensor(0.5))
    scaling = StaticScaling(scales, 4, 2)
    assert_same_bits(scaling.scales().q, scales.q)


def test_a_gpu_without_fp8_is_refused_unless_the_reference_is_asked_for(monkeypatch):
    qkv = draw(1, 5)
    expected = layer(fp8=FP8)(*qkv)
    device = Device(type="cuda", name="NVIDIA A100", capability=(8, 0))
    monkeypatch.setattr(check, "describe", lambda _: device)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.attn: .* got NVIDIA A100 \(sm_80\)"):
        layer(fp8=FP8)(*qkv)
    assert_same_bits(layer(fp8=FP8, impl="reference")(*qkv), expected)
    assert layer()(*qkv).isfinite().all()


def test_the_check_of_the_device_is_no_break_of_a_graph():
    attend, qkv = layer(fp8=FP8), draw(1, 5)
    torch._dynamo.reset()
    out = torch.compile(attend, fullgraph=True, backend="eager")(*qkv)
    torch._dynamo.reset()
    assert_same_bits(out, layer(fp8=FP8)(*qkv))
