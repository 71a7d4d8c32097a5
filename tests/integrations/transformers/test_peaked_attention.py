"""FP8 attention of whole towers where the softmax is peaked, layer by layer.

Peaked is what trained towers are: a query agrees with few keys, those of patches that look alike.
So keys have the projection of queries here, images have regions of one texture, and both are scaled
until a query has some 50 effective keys. (Two independent random projections can be made as peaked
among 32,640 keys only by logits so large that e4m3's rounding of q and k alone costs more than the
limit: their terms have random signs, so the error grows with the logits and not with what agrees.)
"""

import math
from dataclasses import dataclass

import pytest
import torch

from octavo import Recipe
from octavo.integrations.apply import apply_
from octavo.numerics.error import relative_rms
from octavo.reference.qkv import rotate

pytest.importorskip("transformers")
from octavo.integrations.transformers.vision_tower import make_pixels, make_tower
from octavo.layers.encoder_attention import EncoderAttention

MAX_RELATIVE_RMS = 0.07
MAX_EFFECTIVE_KEYS = 100
TARGET_KEYS = 50
REGION = 8  # patches along a side of a region
NUM_QUERIES = 64  # of each head, to measure how peaked attention is


@dataclass(frozen=True)
class Report:
    """One layer: how many keys a query attends to, and how far its attention is from BF16's."""

    name: str
    effective_keys: float
    relative_rms: float


def textured_pixels(tower, size):
    """Random pixels that are alike within regions of patches, as a tower takes them."""
    from transformers.vision_utils import get_vision_position_ids

    inputs = make_pixels(tower, [size])
    noise = inputs["hidden_states"]
    places = get_vision_position_ids(inputs["grid_thw"], tower.config.spatial_merge_size)
    rows, columns = (places.to(noise.device) // REGION).unbind(-1)
    textures = torch.randn_like(noise[: int(rows.max() + 1) * int(columns.max() + 1)])
    alike = textures[rows * (columns.max() + 1) + columns]
    return inputs | {"hidden_states": alike + 0.5 * noise}


def rotated(layer, args, kwargs):
    """q, k and v of a layer's call, [tokens, heads, head_dim] in BF16, as stock attention gets."""
    q, k, v = args
    assert kwargs["cu_seqlens"].numel() == 2  # one image
    return *(rotate(x, kwargs["rotary"]).to(v.dtype) for x in (q, k)), v


def logits_of_some(q, k, scale):
    """float32 [heads, NUM_QUERIES, keys]: never the whole matrix."""
    some = torch.linspace(0, len(q) - 1, NUM_QUERIES, device=q.device).long()
    return torch.einsum("qhd,khd->hqk", q[some].float(), k.float()) * scale


def effective_keys(logits):
    """The exponential of the entropy of each query's weights, its mean over queries and heads."""
    log_weights = logits.log_softmax(-1)
    return float((-(log_weights.exp() * log_weights).sum(-1)).exp().mean())


def sharpening(logits, target):
    """What to multiply logits by for `target` effective keys."""
    low, high = 1e-3, 1e3
    for _ in range(30):
        middle = math.sqrt(low * high)
        is_flat = effective_keys(logits * middle) > target
        low, high = (middle, high) if is_flat else (low, middle)
    return math.sqrt(low * high)


@torch.no_grad()
def peak(tower, inputs, target):
    """Scale the projections of queries and keys of each layer, on the way through the tower."""
    handles = []
    for block in tower.blocks:
        hidden = block.attn.qkv.weight.shape[1]
        block.attn.qkv.weight[hidden : 2 * hidden] = block.attn.qkv.weight[:hidden]

        def scale_both(layer, args, kwargs, projection=block.attn.qkv, hidden=hidden):
            q, k, v = args
            q_turned, k_turned, _ = rotated(layer, args, kwargs)
            logits = logits_of_some(q_turned, k_turned, layer.spec.softmax_scale)
            factor = math.sqrt(sharpening(logits, target))
            projection.weight[: 2 * hidden] *= factor
            projection.bias[: 2 * hidden] *= factor
            return (q * factor, k * factor, v), kwargs

        layer = block.attn.octavo_attention
        handles.append(layer.register_forward_pre_hook(scale_both, with_kwargs=True))
    tower(**inputs)
    for handle in handles:
        handle.remove()


@torch.no_grad()
def reports(tower, inputs, change=lambda out: out):
    """What each layer's attention (not the residual stream) gives, changed, beside BF16's."""
    found = []

    def measure(layer, args, kwargs, out):
        q, k, v = rotated(layer, args, kwargs)
        scale = layer.spec.softmax_scale
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=scale)
        error = relative_rms(change(out), exact.squeeze(0).transpose(0, 1).reshape(out.shape))
        keys = effective_keys(logits_of_some(q, k, scale))
        found.append(Report(layer.name, keys, error))

    layers = [m for m in tower.modules() if isinstance(m, EncoderAttention)]
    handles = [layer.register_forward_hook(measure, with_kwargs=True) for layer in layers]
    tower(**inputs)
    for handle in handles:
        handle.remove()
    return found


def check(found, num_layers):
    assert len(found) == num_layers
    for report in found:
        assert 1 < report.effective_keys < MAX_EFFECTIVE_KEYS, report
        assert report.relative_rms <= MAX_RELATIVE_RMS, report


def run(name, device, size, target):
    """The whole test for one tower: FP8 passes; attention that is zero, or flat, does not."""
    tower = make_tower(name, torch.device(device)).module
    apply_(tower, Recipe(vision_attention="fp8"))
    inputs = textured_pixels(tower, size)
    peak(tower, inputs, target)
    num_layers = len(tower.blocks)
    found = reports(tower, inputs)
    check(found, num_layers)
    zeroed = reports(tower, inputs, torch.zeros_like)
    with pytest.raises(AssertionError, match="relative_rms"):
        check(zeroed, num_layers)
    assert all(report.relative_rms == pytest.approx(1.0) for report in zeroed)
    flat = reports(tower, inputs, lambda out: out.mean(0, keepdim=True).expand_as(out))
    assert all(report.relative_rms > MAX_RELATIVE_RMS for report in flat)
    return found


def test_effective_keys():
    assert effective_keys(torch.zeros(2, 3, 40)) == pytest.approx(40)
    assert effective_keys(100 * torch.eye(5).unsqueeze(0)) == pytest.approx(1)
    assert sharpening(torch.eye(5).unsqueeze(0), 2) > 1


def test_a_tiny_tower():
    """240 tokens and two layers: the same code, wherever it runs."""
    found = run("tiny", "cpu", (720, 1280), target=30)
    assert all(20 < report.effective_keys < 45 for report in found)


@pytest.mark.gpu
def test_a_full_size_tower_at_4k():
    """Qwen3-VL-30B-A3B's 27 layers, one image of 3840 × 2160: 32,640 tokens."""
    found = run("qwen3-vl-30b-a3b", "cuda", (2160, 3840), target=TARGET_KEYS)
    assert len(found) == 27
