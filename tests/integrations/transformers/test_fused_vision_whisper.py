"""Whisper's encoder in FP8, beside a decoder of the same classes that stays as it is."""

import functools

import pytest
import torch

from octavo import Recipe, UnsupportedError
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers import vision
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits

transformers = pytest.importorskip("transformers")

FP8 = Recipe(vision_attention="fp8")


def whisper(**sizes):
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=24,
        max_target_positions=16,
        vocab_size=50,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **sizes,
    )
    model = transformers.WhisperModel(config).eval()
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.self_attn.q_proj.weight *= 8
            layer.self_attn.k_proj.weight *= 8
    return model


def speech():
    features = torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "decoder_input_ids": torch.tensor([[1, 5, 6], [1, 7, 8]])}


def test_the_encoder_of_whisper():
    model, inputs = whisper(), speech()
    with torch.inference_mode():
        expected = model(**inputs)
        changes = apply_(model, FP8)
        out = model(**inputs)
    names = [f"encoder.layers.{i}.self_attn" for i in (0, 1)]
    assert changes.layers == changes.fused == {"vision_attention": names}
    assert [layer.name for layer in layers_of(model)] == names
    assert [int(layer.scaling.num_passes) for layer in layers_of(model)] == [1, 1]
    error = relative_rms(out.encoder_last_hidden_state, expected.encoder_last_hidden_state)
    assert 0 < error < 0.05
    restore_(model)
    with torch.inference_mode():
        again = model(**inputs)
    assert_same_bits(again.last_hidden_state, expected.last_hidden_state)


def test_the_decoder_of_whisper_stays():
    """Given one encoder output, the decoder's result has the same bits, with a cache as well."""
    model, inputs = whisper(), speech()
    given = {**inputs, "encoder_outputs": (torch.randn(2, 24, 64),)}
    implementation = model.config._attn_implementation
    with torch.inference_mode():
        expected = model(**given, use_cache=True).last_hidden_state
        apply_(model, FP8)
        assert_same_bits(model(**given, use_cache=True).last_hidden_state, expected)
    assert model.config._attn_implementation == implementation
    assert not vision.find_fused(model.decoder) and not layers_of(model.decoder)
    assert {int(layer.scaling.num_passes) for layer in layers_of(model)} == {0}


def test_skipped_layers_of_whisper_are_not_touched():
    model, inputs = whisper(), speech()
    before = dict(vars(model.encoder.layers[0].self_attn))
    changes = apply_(model, Recipe(vision_attention="fp8", skip_layers=["0"]))
    assert changes.layers["vision_attention"] == ["encoder.layers.1.self_attn"]
    assert vars(model.encoder.layers[0].self_attn) == before
    with torch.inference_mode():
        model(**inputs)
    restore_(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_value_states": torch.zeros(1, 3, 64)}, "got key_value_states"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "got attention_mask"),
        ({"output_attentions": True}, "got output_attentions"),
        ({"past_key_values": object(), "softcap": 1.0}, "got past_key_values, softcap"),
    ],
)
def test_calls_of_whisper_that_are_refused(options, message):
    model = whisper(attention_dropout=0.1)
    apply_(model, FP8)
    module = model.encoder.layers[0].self_attn
    hidden = torch.randn(1, 5, 64)
    with torch.inference_mode():
        out, weights = module(hidden)
        assert out.shape == hidden.shape and weights is None
        with pytest.raises(UnsupportedError, match=message):
            module(hidden, **options)
        with pytest.raises(UnsupportedError, match="got dropout 0.1"):
            module.train()(hidden)


def test_whispers_that_are_refused():
    model = whisper()
    with pytest.raises(
        UnsupportedError, match="WhisperAttention in an encoder; got WhisperDecoder"
    ):
        apply_(model.decoder, FP8)
    module = model.encoder.layers[1].self_attn
    module.forward = functools.partial(type(module).forward, module)
    with pytest.raises(UnsupportedError, match=r"encoder\.layers\.1\.self_attn: expected the forw"):
        apply_(model, FP8)
    assert not layers_of(model) and not vision.find_fused(model)
    assert len(vision.find_layers(model.encoder)) == 2


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, EncoderAttention)]
