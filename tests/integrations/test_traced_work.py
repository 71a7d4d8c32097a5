"""What a model computes, traced: counts that can be worked out by hand."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from octavo.integrations.traced_work import AttentionWork, LinearWork, trace


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        heads = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (q, k, v)]
        out = scaled_dot_product_attention(*heads)
        return x + out.transpose(1, 2).flatten(-2)


def test_layers_and_attention_on_the_meta_device():
    with torch.device("meta"):
        model, x = Block(), torch.empty(3, 10, 8)
    seen = trace(model, lambda: model(x), {"": "block"})
    assert seen.linear == [LinearWork("project", 8, 24, rows=30)]
    assert seen.linear[0].flops == 2 * 30 * 8 * 24
    assert seen.attention == [AttentionWork(6, 4, 10, 10, "block")]
    assert seen.attention[0].flops == 4 * 6 * 4 * 10 * 10
    assert seen.other_bytes == {}


def test_bytes_are_those_of_ops_that_are_no_products():
    model, x = Block(), torch.zeros(1, 10, 8)
    seen = trace(model, lambda: model(x), {"": "block"}, has_bytes=True)
    # The transposed heads are copied by flatten (read and written), then the sum reads two and
    # writes one; views and what products write are free.
    assert seen.other_bytes == {"block": (2 + 3) * 10 * 8 * 4}


def test_nothing_stays_on_the_model():
    model, x = Block(), torch.zeros(1, 10, 8)
    trace(model, lambda: model(x), {"": "block"})
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not model.project._forward_hooks
    assert model(x).shape == x.shape
