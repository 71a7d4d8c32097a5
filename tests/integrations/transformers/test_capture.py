"""Capturing what a model's attention layers see, and the model stays as it was."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.integrations.transformers.calibrate import capture_qkv
from octavo.numerics.attention import AttentionSpec
from octavo.reference.attention import attention

transformers = pytest.importorskip("transformers")

LAYERS, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 3, 4, 2, 16, 65


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def input_ids():
    return torch.randint(0, 100, (2, LENGTH))


def test_captures_only_the_layers_asked_for(model, input_ids):
    captured = capture_qkv(model, input_ids, [0, 2])
    assert sorted(captured) == [0, 2]
    for qkv in captured.values():
        assert qkv.q.shape == (2, LENGTH, HEADS, HEAD_DIM)
        assert qkv.k.shape == qkv.v.shape == (2, LENGTH, KV_HEADS, HEAD_DIM)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_captured_tensors_give_the_layer_its_output(model, input_ids, layer):
    seen = []
    projection = model.model.layers[layer].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    qkv = capture_qkv(model, input_ids, [layer])[layer]
    handle.remove()
    out, _ = attention(qkv.q, qkv.k, qkv.v, AttentionSpec(causal=True))
    torch.testing.assert_close(out.flatten(2), seen[0], rtol=1e-4, atol=1e-5)


def test_the_model_is_as_before(model, input_ids):
    with torch.inference_mode():
        before = model(input_ids).logits
        capture_qkv(model, input_ids, [1])
        after = model(input_ids).logits
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(before, after)


def test_the_model_is_as_before_when_the_pass_fails(model):
    with pytest.raises(IndexError):
        capture_qkv(model, torch.full((1, 4), 10**6), [0])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layers", [[3], [-1], [0, 99]])
def test_a_layer_that_does_not_exist(model, input_ids, layers):
    with pytest.raises(ConfigError, match="expected layers 0 to 2, got"):
        capture_qkv(model, input_ids, layers)
