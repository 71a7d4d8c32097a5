"""What a model costs: products that the engine makes one."""

import pytest

pytest.importorskip("transformers")

from octavo.integrations.traced_work import LinearWork
from octavo.measure.advise.cost import _joined


def work(name, outputs, is_reached=True):
    return LinearWork(name, 64, outputs, is_reached=is_reached)


def test_layers_with_one_input_are_one_product():
    layers = (
        work("layers.0.attn.q_proj", 32),
        work("layers.0.attn.k_proj", 16),
        work("layers.0.attn.v_proj", 16),
        work("layers.0.attn.o_proj", 64),
        work("layers.0.mlp.gate_proj", 128),
        work("layers.0.mlp.up_proj", 128),
        work("layers.1.attn.q_proj", 32),
        work("layers.1.attn.k_proj", 16, is_reached=False),
    )
    found = {one.name: one.outputs for one in _joined(layers)}
    assert found == {
        "layers.0.attn.q_proj": 64,
        "layers.0.attn.o_proj": 64,
        "layers.0.mlp.gate_proj": 256,
        "layers.1.attn.q_proj": 32,
        "layers.1.attn.k_proj": 16,
    }
