"""BF16 products are those of float32, rounded, whatever the CPU has instructions for."""

import platform

import pytest
import torch
import torch.nn.functional as F

from octavo.numerics.narrow_products import use_float32_products


def draw(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_cpus_with_instructions_keep_torchs_own(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert use_float32_products.__wrapped__() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_linear_layers(dtype):
    x, weight, bias = draw(5, 40, dtype=dtype), draw(7, 40, dtype=dtype), draw(7, dtype=dtype)
    truth = F.linear(x.double(), weight.double(), bias.double())
    out = F.linear(x, weight, bias)
    assert out.dtype == dtype
    tolerance = 2 * torch.finfo(dtype).eps * float(truth.abs().max()) + 1e-5
    assert float((out.double() - truth).abs().max()) <= tolerance


def test_masked_attention():
    q, k, v = (draw(2, 3, 20, 16, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.zeros(20, 20, dtype=torch.bfloat16).masked_fill(
        torch.ones(20, 20).triu(1) > 0, -9e9
    )
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - truth).abs().max()) < 0.05
