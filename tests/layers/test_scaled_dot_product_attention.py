"""ScaledDotProductAttention: torch's arguments, scales of its own, and what it refuses."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo import ConfigError, PerHead, PerTensor, QkvScales, UnsupportedError
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits


def draw(*shape, kv_heads=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = [shape[-3], kv_heads or shape[-3], kv_heads or shape[-3]]
    shapes = [(*shape[:-3], n, *shape[-2:]) for n in heads]
    return [torch.randn(s, generator=generator).to(torch.bfloat16) for s in shapes]


class Block(nn.Module):
    """Somebody's own module, written for torch's function."""

    def __init__(self, attend):
        super().__init__()
        self.project = nn.Linear(64, 192)
        self.attend = attend

    def forward(self, x):
        qkv = self.project(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return self.attend(*qkv, is_causal=True).transpose(1, 2).flatten(2)


def test_a_module_of_ones_own():
    torch.manual_seed(0)
    block = Block(F.scaled_dot_product_attention)
    x = torch.randn(2, 30, 64)
    with torch.inference_mode():
        expected = block(x)
        block.attend = octavo.ScaledDotProductAttention()
        assert 0 < relative_rms(block(x), expected) < 0.06
    assert any(key.startswith("attend.scaling") for key in block.state_dict())


@pytest.mark.parametrize("granularity", [None, PerTensor(), PerHead()], ids=str)
def test_the_first_call_is_the_function(granularity):
    qkv = draw(2, 6, 33, 72, kv_heads=2)
    heads = {"num_heads": 6, "num_kv_heads": 2} if granularity == PerHead() else {}
    layer = octavo.ScaledDotProductAttention(granularity, **heads)
    out = layer(*qkv, is_causal=True, scale=0.2, enable_gqa=True)
    expected = octavo.scaled_dot_product_attention(
        *qkv, is_causal=True, scale=0.2, enable_gqa=True, granularity=granularity
    )
    assert_same_bits(out.contiguous(), expected.contiguous())


def test_dynamic_scales_remember_sixteen_calls():
    layer = octavo.ScaledDotProductAttention()
    layer(*(8 * x for x in draw(1, 2, 9, 64)))
    first = layer.scales()
    for seed in range(15):
        layer(*draw(1, 2, 9, 64, seed=seed))
        assert_same_bits(layer.scales().q, first.q)
    layer(*draw(1, 2, 9, 64))
    assert layer.scales().q < first.q


def test_a_call_without_tokens_is_not_remembered():
    layer = octavo.ScaledDotProductAttention(history_length=1)
    layer(*draw(1, 2, 9, 64))
    before = layer.scales()
    assert layer(*draw(0, 2, 9, 64)).shape == (0, 2, 9, 64)
    assert_same_bits(layer.scales().v, before.v)


def test_static_scales_with_a_margin():
    qkv = draw(1, 2, 33, 64)
    dynamic = octavo.ScaledDotProductAttention(PerHead(), num_heads=2)
    dynamic(*qkv)
    static = octavo.ScaledDotProductAttention(scales=dynamic.scales(margin=1.5))
    torch.testing.assert_close(static.scales().k, 1.5 * dynamic.scales().k)
    expected = octavo.scaled_dot_product_attention(*qkv, scales=dynamic.scales(margin=1.5))
    assert_same_bits(static(*qkv).contiguous(), expected.contiguous())
    static(*(100 * x for x in qkv))
    torch.testing.assert_close(static.scales().k, 1.5 * dynamic.scales().k)


@pytest.mark.parametrize("is_static", [False, True])
def test_scales_survive(is_static):
    options = {"scales": QkvScales(*map(torch.tensor, (0.02, 0.03, 0.04)))} if is_static else {}
    layer = octavo.ScaledDotProductAttention(**options)
    layer(*draw(1, 2, 33, 64))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    options = {"scales": QkvScales.ones()} if is_static else {}
    loaded = octavo.ScaledDotProductAttention(**options)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (loaded, copy.deepcopy(layer).to(torch.bfloat16)):
        for name in "qkv":
            assert_same_bits(getattr(other.scales(), name), getattr(layer.scales(), name))


def test_refusals_name_the_layer():
    layer = octavo.ScaledDotProductAttention(name="blocks.3")
    qkv = draw(1, 2, 9, 64)
    with pytest.raises(UnsupportedError, match=r"attention layer blocks\.3: expected dropout_p"):
        layer(*qkv, dropout_p=0.5)
    with pytest.raises(UnsupportedError, match=r"blocks\.3: expected a bool attn_mask"):
        layer(*qkv, torch.zeros(9, 9))
    with pytest.raises(ConfigError, match=r"blocks\.3: expected as many KV heads as heads"):
        layer(*draw(1, 2, 9, 64, kv_heads=1))


def test_contradictions():
    with pytest.raises(ConfigError, match="expected num_heads for scales per head"):
        octavo.ScaledDotProductAttention(PerHead())
    with pytest.raises(ConfigError, match="expected static scales, or granularity"):
        octavo.ScaledDotProductAttention(PerTensor(), scales=QkvScales.ones())
    layer = octavo.ScaledDotProductAttention(PerHead(), num_heads=4)
    with pytest.raises(ConfigError, match=r"a history of q for amax values of shape \[2\]"):
        layer(*draw(1, 2, 9, 64))
    values_alone = QkvScales(torch.ones(()), torch.ones(()), torch.ones(2))
    assert (
        octavo.ScaledDotProductAttention(scales=values_alone)(*draw(1, 2, 9, 64)).isfinite().all()
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_one_graph():
    torch._dynamo.reset()
    layer, again = (octavo.ScaledDotProductAttention() for _ in range(2))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        qkv = draw(1, 2, 20, 64, seed=seed)
        expected = again(*qkv, is_causal=True)
        assert_same_bits(compiled(*qkv, is_causal=True).contiguous(), expected.contiguous())
    assert layer.scaling.num_passes == 3
    torch._dynamo.reset()


def test_printed():
    assert repr(octavo.ScaledDotProductAttention()).startswith("ScaledDotProductAttention(\n  dyna")
    assert "static" in repr(octavo.ScaledDotProductAttention(scales=QkvScales.ones()))
