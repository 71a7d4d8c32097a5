"""The quantize_qkv kernels with norms against `octavo.reference`, on a GPU or interpreted."""

import pytest
import torch

from octavo.kernels.quantize_qkv.config import QuantizeQkvConfig
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
SMALL = QuantizeQkvConfig(16, 256, 64, 128, 4, 2)


def draw_norm(num_streams, head_dim, device, *, dtype=torch.bfloat16, **options):
    weights = Draw(2, device).normal(2, num_streams, head_dim, dtype=dtype) + 1
    return QkNorm(*weights, eps=1e-6, **options)


def check_normalized(q, k, v, *, config=SMALL, **options):
    """As the reference, but for sums in another order: it moves a value by a step at most, of FP8
    steps that are 2^-3 of it or 2^-9, and few by one."""
    actual = quantize_qkv(q, k, v, E4M3, config=config, **options)
    expected = reference(q, k, v, E4M3, **options)
    assert_same_bits(actual.v, expected.v)
    for name in "qk":
        scale, other = getattr(actual.scales, name), getattr(expected.scales, name)
        torch.testing.assert_close(scale, other, rtol=1e-6, atol=0)
        got, wanted = getattr(actual, name).float(), getattr(expected, name).float()
        assert got.shape == wanted.shape and got.isfinite().all()
        assert got.stride() == wanted.stride()
        moved = (got - wanted).abs()
        assert (moved <= (wanted.abs() * 2**-3).clamp_min(2**-9)).all()
        assert (moved > 0).float().mean() < 2e-3
        assert wanted.std() > 1


NORM_ROTARY = {
    "none": lambda rows, dim, device: None,
    "halves": lambda rows, dim, device: draw_rotary(rows, dim, device),
    "interleaved": lambda rows, dim, device: draw_rotary(rows, dim, device, is_interleaved=True),
    "partial": lambda rows, dim, device: draw_rotary(rows, dim // 2, device),
}


@pytest.mark.parametrize(
    ("scaling", "head_dim"), [("static", 64), ("tensor", 128), ("head", 32)], ids=str
)
@pytest.mark.parametrize("kind", NORM_ROTARY)
def test_norms(kind, scaling, head_dim, device):
    q, k, v = (x.view(2, 9, -1, head_dim) for x in draw_packed(18, 3, 1, head_dim, device))
    options = {"granularity": PerHead() if scaling == "head" else PerTensor()}
    if scaling == "static":
        options = {"scales": static_scales(device, ((3,), (1,), ()))}
    norm = draw_norm(2, head_dim, device, num_first=5)
    if kind == "partial":
        norm = draw_norm(1, head_dim, device, dtype=torch.float32)
    check_normalized(q, k, v, norm=norm, rotary=NORM_ROTARY[kind](9, head_dim, device), **options)


@pytest.mark.parametrize("num_first", [0, 7, 16, 33])
def test_each_stream_has_its_norm(num_first, device):
    """The first tokens of every sequence; weights of the others could not be told apart here."""
    q, k, v = (x.view(3, 33, -1, 64) for x in draw_packed(99, 2, 2, 64, device))
    norm = draw_norm(2, 64, device, num_first=num_first)
    weights = QkNorm(norm.q * torch.tensor([[1.0], [8.0]]).to(norm.q), norm.k, norm.eps, num_first)
    check_normalized(q, k, v, norm=weights, scales=static_scales(device))


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_no_tokens_and_zeros_give_the_same_bits(num_tokens, device):
    packed = draw_packed(num_tokens, 2, 1, 64, device)
    q, k, v = (torch.zeros_like(x)[None] for x in packed)
    norm = draw_norm(2, 64, device)
    actual, expected = (run(q, k, v, E4M3, norm=norm) for run in (quantize_qkv, reference))
    for name in "qkv":
        assert_same_bits(getattr(actual, name), getattr(expected, name))
        assert_same_bits(getattr(actual.scales, name), getattr(expected.scales, name))


def test_strange_values_stay_in_their_head(device):
    """An Inf makes its own place NaN and the rest of its head 0, as root-mean-square norms do."""
    q, k, v = (x.view(1, 9, -1, 64) for x in draw_packed(9, 2, 1, 64, device))
    q[0, 3, 1, 7], q[0, 5, 0, 9] = torch.inf, torch.nan
    options = {"norm": draw_norm(1, 64, device), "scales": static_scales(device)}
    actual = quantize_qkv(q, k, v, E4M3, config=SMALL, **options).q.float()
    expected = reference(q, k, v, E4M3, **options).q.float()
    assert_same_bits(actual.isnan(), expected.isnan())
    assert actual[0, 3, 1].isnan().sum() == 1 and actual[0, 5, 0].isnan().all()
    assert actual[0, 3, 1].nan_to_num().abs().max() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("scaling", ["static", "tensor", "head"])
@pytest.mark.parametrize("kind", NORM_ROTARY)
def test_norms_of_real_sizes_on_a_gpu(kind, scaling, head_dim):
    """FLUX.1: 512 tokens of text and 4096 of an image."""
    q, k, v = (x[None] for x in draw_packed(4608, 24, 24, head_dim, "cuda"))
    options = {"granularity": PerHead() if scaling == "head" else PerTensor()}
    if scaling == "static":
        options = {"scales": static_scales("cuda")}
    rotary = NORM_ROTARY[kind](4608, head_dim, "cuda")
    options |= {"rotary": rotary, "value_layout": "transposed", "config": None}
    check_normalized(q, k, v, norm=draw_norm(2, head_dim, "cuda", num_first=512), **options)
    check_normalized(q, k, v, norm=draw_norm(1, head_dim, "cuda"), **options)
