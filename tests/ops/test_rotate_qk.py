"""rotate_qk as an op: what it means, what it takes and what it refuses."""

import pytest
import torch

from octavo import ConfigError, UnsupportedError, ops
from octavo.kernels.device import CPU, Device
from octavo.numerics.rotary import Rotary
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))


def tables(rows=5, columns=20, **options):
    angle = Draw(1).normal(rows, columns, dtype=torch.float32)
    return Rotary(angle.cos(), angle.sin(), **options)


def call(**changes):
    draw = Draw(0)
    q, k = draw.normal(5, 4, 40, dtype=torch.bfloat16), draw.normal(5, 2, 40, dtype=torch.bfloat16)
    return ops.rotate_qk(**({"q": q, "k": k, "rotary": tables()} | changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_as_transformers_turns_them(dtype):
    """The bits of the models' own function, which also turns in float32 and rounds once."""
    modeling = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    draw = Draw(0)
    q, k = (draw.normal(63, 2, 72, dtype=dtype) for _ in range(2))
    angle = Draw(1).normal(63, 36, dtype=torch.float32)
    cos, sin = (x.repeat(1, 2) for x in (angle.cos(), angle.sin()))
    expected = modeling.apply_rotary_pos_emb_vision(q, k, cos, sin)
    rotary = Rotary(cos[:, :36], sin[:, :36])
    for ours, theirs in zip(ops.rotate_qk(q, k, rotary), expected, strict=True):
        assert_same_bits(ours, theirs)


def test_views_of_a_joint_projection():
    joint = Draw(0).normal(5, 8, 40, dtype=torch.bfloat16)
    q, k, _ = joint.split([4, 2, 2], dim=1)
    for ours, theirs in zip(call(q=q, k=k), call(q=q.contiguous(), k=k.contiguous()), strict=True):
        assert ours.is_contiguous() and ours.dtype == torch.bfloat16
        assert_same_bits(ours, theirs)


def test_it_is_the_rotation_of_quantize_qkv():
    """Turned before or on the way to FP8: in float32, where nothing is rounded in between."""
    draw = Draw(0)
    q, k, v = (draw.normal(5, heads, 40, dtype=torch.float32) for heads in (4, 2, 2))
    for is_interleaved in (False, True):
        rotary = tables(is_interleaved=is_interleaved)
        expected = ops.quantize_qkv(q, k, v, rotary=rotary)
        actual = ops.quantize_qkv(*ops.rotate_qk(q, k, rotary), v)
        assert_same_bits(actual.q, expected.q)
        assert_same_bits(actual.k, expected.k)


def test_odd_heads_and_no_tokens():
    """An odd head_dim is the reference's; the value beyond the last pair stays."""
    q = Draw(0).normal(5, 2, 41, dtype=torch.bfloat16)
    turned, _ = ops.rotate_qk(q, q, tables())
    assert_same_bits(turned[..., 40], q[..., 40])
    empty = torch.zeros(0, 2, 40)
    assert ops.rotate_qk(empty, empty, tables(rows=0))[0].shape == (0, 2, 40)


def test_which_one_runs_where():
    def request(device, head_dim):
        return ops.Request(op="rotate_qk", device=device, dtype=torch.bfloat16, head_dim=head_dim)

    assert ops.select(request(H200, 72)).impl == "triton"
    assert ops.select(request(H200, 73)).impl == "reference"
    assert ops.select(request(CPU, 72)).impl == "reference"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 40)}, r"q \[\.\.\., heads, head_dim\], got \[4, 40\]"),
        ({"k": torch.zeros(5, 2, 40).double()}, "k in bfloat16, float16 or float32, got"),
        ({"k": torch.zeros(5, 2, 64)}, "q and k of one head_dim, got 40 and 64"),
        ({"k": torch.zeros(5, 2, 40, device="meta")}, "k on cpu like q, got it on meta"),
        ({"rotary": tables(columns=21)}, "at most head_dim / 2 = 20 columns, got 21"),
        ({"rotary": tables(rows=3)}, "divide the 5 tokens, got 3 rows"),
        ({"impl": "cuda"}, "impl for rotate_qk, one of triton, reference; got 'cuda'"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        call(**changes)


def test_asked_for_by_name_it_runs_or_raises():
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="needs a CUDA GPU"):
            call(impl="triton")
    assert_same_bits(call(impl="reference")[0], call()[0])


@pytest.mark.gpu
def test_the_same_bits_on_a_gpu():
    draw = Draw(0)
    q, k = (draw.normal(2, 63, heads, 72, dtype=torch.bfloat16) for heads in (4, 2))
    rotary = tables(63, 36)
    on_gpu = Rotary(rotary.cos.cuda(), rotary.sin.cuda())
    for ours, theirs in zip(
        ops.rotate_qk(q.cuda(), k.cuda(), on_gpu), ops.rotate_qk(q, k, rotary), strict=True
    ):
        assert_same_bits(ours, theirs)
