"""Rotary embedding against complex multiplication, and its errors."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics.rotary import Rotary
from octavo.reference.qkv import rotate, rotate_qk


def tables(rows, half, dtype=torch.float32):
    angle = torch.rand(rows, half) * 6
    return angle, angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 8, 20])
def test_a_pair_turns_like_a_complex_number(rotary_dim, is_interleaved):
    x = torch.randn(6, 3, 20, dtype=torch.float32)
    angle, cos, sin = tables(6, rotary_dim // 2)
    turned = rotate(x, Rotary(cos, sin, is_interleaved))
    pairs = x[..., :rotary_dim].double()
    if is_interleaved:
        pairs = torch.complex(pairs[..., 0::2], pairs[..., 1::2])
    else:
        pairs = torch.complex(*pairs.chunk(2, -1))
    expected = pairs * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    parts = (expected.real, expected.imag)
    stacked = torch.stack(parts, -1).flatten(-2) if is_interleaved else torch.cat(parts, -1)
    torch.testing.assert_close(turned[..., :rotary_dim].double(), stacked, rtol=0, atol=1e-6)
    assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])


def test_one_table_for_every_sequence_of_a_batch():
    x = torch.randn(3, 5, 2, 8).bfloat16()
    _, cos, sin = tables(5, 4, torch.bfloat16)
    turned = rotate(x, Rotary(cos, sin))
    assert turned.dtype == torch.float32
    for one, expected in zip(turned, x, strict=True):
        assert torch.equal(one, rotate(expected, Rotary(cos, sin)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_queries_and_keys_within_their_budget(is_interleaved, dtype):
    """Two products and a sum in float32, then one rounding, against float64.

    |error| ≤ ((1 + u)² − 1)·(|a·cos| + |b·sin|), u = 2⁻²⁴, and after that half a step of the dtype.
    """
    q, k = (torch.randn(63, heads, 72).to(dtype) for heads in (3, 1))
    _, cos, sin = tables(63, 36)
    for turned, x in zip(rotate_qk(q, k, Rotary(cos, sin, is_interleaved)), (q, k), strict=True):
        assert turned.dtype == dtype and turned.is_contiguous()
        x, c, s = x.double(), cos.double().unsqueeze(1), sin.double().unsqueeze(1)
        a, b = (x[..., 0::2], x[..., 1::2]) if is_interleaved else x.chunk(2, -1)
        parts = (a * c - b * s, b * c + a * s)
        sizes = ((a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs())
        truth, size = (
            torch.stack(both, -1).flatten(-2) if is_interleaved else torch.cat(both, -1)
            for both in (parts, sizes)
        )
        in_float32 = ((1 + 2.0**-24) ** 2 - 1) * size
        half_step = torch.finfo(dtype).eps / 2 * (truth.abs() + in_float32)
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
        assert ((turned.double() - truth).abs() <= in_float32 + half_step + smallest).all()


def test_no_tokens():
    _, cos, sin = tables(0, 4)
    assert rotate(torch.zeros(0, 2, 8), Rotary(cos, sin)).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("cos", "sin", "message"),
    [
        (torch.ones(3), torch.ones(3), "one shape"),
        (torch.ones(3, 4), torch.ones(3, 5), "one shape"),
        (torch.ones(3, 4), torch.ones(3, 4).bfloat16(), "one floating dtype"),
        (torch.ones(3, 4).int(), torch.ones(3, 4).int(), "one floating dtype"),
    ],
)
def test_tables_that_do_not_belong_together(cos, sin, message):
    with pytest.raises(ConfigError, match=message):
        Rotary(cos, sin)


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "message"),
    [(4, 6, "at most head_dim / 2 = 3 columns, got 4"), (5, 8, "divide the 5 tokens, got 4 rows")],
)
def test_tables_that_do_not_fit(num_tokens, head_dim, message):
    rotary = Rotary(torch.ones(4, 4), torch.ones(4, 4))
    rotary.check(8, 8)
    rotary.check(0, 8)
    with pytest.raises(ConfigError, match=message):
        rotary.check(num_tokens, head_dim)
