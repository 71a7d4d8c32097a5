"""What the attention layers of decoders are given: exactly what a stock cache would store."""

import pytest
import torch

from octavo import ConfigError, UnsupportedError

pytest.importorskip("transformers")

import transformers

from octavo.integrations.transformers.calibrate import observe_text
from octavo.integrations.transformers.text import find_layers, find_windows
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.text_models import FAMILIES, VISION_LANGUAGE, VOCABULARY, make_decoder

LENGTH = 20  # beyond the sliding window of 8


def tokens(batch=2, length=LENGTH):
    return torch.randint(2, VOCABULARY, (batch, length))


@torch.inference_mode()
def observed(model, **inputs):
    seen = {}

    def see(name, *qkv):
        assert name not in seen
        seen[name] = qkv

    with observe_text(model, see):
        logits = model(**inputs, use_cache=False).logits
    return seen, logits


def state_of(model):
    implementation = model.config.get_text_config()._attn_implementation
    attributes = {name: sorted(vars(m)) for name, m in model.named_modules()}
    return implementation, attributes


@pytest.mark.parametrize("family", [*FAMILIES, VISION_LANGUAGE])
def test_keys_and_values_are_those_of_a_stock_cache(family):
    model, input_ids = make_decoder(family), tokens()
    before = state_of(model)
    cache = transformers.DynamicCache()  # without a config it keeps keys that left a window, too
    with torch.inference_mode():
        expected = model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits
    seen, logits = observed(model, input_ids=input_ids)
    assert_same_bits(logits, expected)
    assert list(seen) == list(find_layers(model))
    for name, module in find_layers(model).items():
        q, k, v = seen[name]
        layer = cache.layers[module.layer_idx]
        assert_same_bits(k.transpose(1, 2), layer.keys)
        assert_same_bits(v.transpose(1, 2), layer.values)
        assert q.shape == (2, LENGTH, 4, 16) and k.shape == v.shape == (2, LENGTH, 2, 16)
    assert state_of(model) == before


def test_names_and_sliding_layers():
    gemma = make_decoder("gemma3_text")
    seen, _ = observed(gemma, input_ids=tokens())
    assert set(find_windows(gemma).values()) == {8, None}
    assert list(seen) == [f"model.layers.{index}.self_attn" for index in range(6)]
    vision_language = make_decoder(VISION_LANGUAGE)
    seen, _ = observed(vision_language, input_ids=tokens())
    assert list(seen) == [f"model.language_model.layers.{i}.self_attn" for i in range(4)]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_function_of_before_is_called_with_its_masks(implementation):
    """Left padding: without the masks of the function before, logits would be others."""
    model = make_decoder(attn_implementation=implementation)
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    inputs["attention_mask"][1, :5] = 0
    with torch.inference_mode():
        expected = model(**inputs, use_cache=False).logits
    _, logits = observed(model, **inputs)
    assert_same_bits(logits, expected)
    assert model.config._attn_implementation == implementation


def test_queries_are_seen_after_rotation():
    """By hand for the first layer of a Llama: projection, then rotation."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model, input_ids = make_decoder(), tokens(batch=1)
    seen, _ = observed(model, input_ids=input_ids)
    layer = model.model.layers[0]
    with torch.inference_mode():
        hidden = layer.input_layernorm(model.model.embed_tokens(input_ids))
        q, k = (
            projection(hidden).unflatten(-1, (-1, 16)).transpose(1, 2)
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
        cos, sin = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
        rotated = apply_rotary_pos_emb(q, k, cos, sin)
    given = seen["model.layers.0.self_attn"][:2]
    for found, expected, plain in zip(given, rotated, (q, k), strict=True):
        assert_same_bits(found.transpose(1, 2), expected)
        assert not torch.equal(found.transpose(1, 2), plain)


def test_a_pass_with_a_cache_is_refused():
    model, input_ids = make_decoder(), tokens()
    cache = transformers.DynamicCache()
    with torch.inference_mode():
        model(input_ids=input_ids, past_key_values=cache)
        with (
            pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn: .* without a cache"),
            observe_text(model, lambda *_: None),
        ):
            model(input_ids=input_ids[:, :1], past_key_values=cache)


def test_an_error_leaves_the_model_as_it_was():
    model = make_decoder()
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), observe_text(model, lambda *_: 1 / 0):
        model(input_ids=tokens(), use_cache=False)
    assert state_of(model) == before


def test_a_model_in_fp8_is_refused():
    model = make_decoder()
    model.config._attn_implementation = "octavo"
    with (
        pytest.raises(ConfigError, match="got one in FP8: restore_ it first"),
        observe_text(model, lambda *_: None),
    ):
        pass
    assert model.config._attn_implementation == "octavo"


def test_a_model_without_such_layers_is_refused():
    with (
        pytest.raises(UnsupportedError, match="expected a decoder"),
        observe_text(torch.nn.Linear(2, 2), lambda *_: None),
    ):
        pass
