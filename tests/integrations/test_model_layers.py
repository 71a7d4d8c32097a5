"""Shapes of layers, from configs as models carry them."""

import json

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.model_layers import layers_to_warm_up
from octavo.ops.warm_up import AttentionLayers

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
VISION = {"hidden_size": 1152, "num_heads": 16}


@pytest.fixture
def layers_of(tmp_path):
    """The layers of a config, read from the file that it is in."""

    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return layers_to_warm_up(tmp_path, [], {}, "fp8")

    return read


@pytest.fixture
def attention_layers(layers_of):
    return lambda config: [x for x in layers_of(config) if isinstance(x, AttentionLayers)]


def test_a_language_model(layers_of):
    decoder, *linears = layers_of(LLAMA)
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (32, 8, 128)
    assert decoder.is_decoder and decoder.spec.causal and decoder.spec.window is None
    assert decoder.page_dtype == torch.float8_e4m3fn
    shapes = [(one.columns, one.depth) for one in linears]
    assert shapes == [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]


def test_a_vision_language_model(attention_layers):
    decoder, encoder = attention_layers({"text_config": LLAMA, "vision_config": VISION})
    assert decoder.is_decoder
    assert (encoder.num_heads, encoder.head_dim, encoder.is_decoder) == (16, 72, False)


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({"sliding_window": 128, "layer_types": ["sliding_attention"]}, [128]),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
            [None, 128],
        ),
        ({"sliding_window": 4096}, [4096]),
        ({"sliding_window": 4096, "use_sliding_window": False}, [None]),
        ({"sliding_window": None}, [None]),
    ],
)
def test_windows(extra, windows, attention_layers):
    assert [one.spec.window for one in attention_layers(LLAMA | extra)] == windows


def test_head_dim_softcap_and_sinks(attention_layers):
    (gemma,) = attention_layers(LLAMA | {"head_dim": 256, "attn_logit_softcapping": 50.0})
    assert gemma.head_dim == 256 and gemma.spec.softcap == 50.0 and not gemma.has_sinks
    (oss,) = attention_layers(LLAMA | {"model_type": "gpt_oss"})
    assert oss.has_sinks


def test_a_model_folder_and_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    from_folder = layers_to_warm_up(tmp_path, [], {}, "bf16")
    assert from_folder == layers_to_warm_up(tmp_path / "config.json", [], {}, "bf16")
    assert from_folder[0].page_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 1}, "expected num_attention_heads in the config"),
        ({**LLAMA, "vision_config": {"depth": 3}}, "num_heads or num_attention_heads"),
    ],
)
def test_configs_without_what_is_needed(config, message, layers_of):
    with pytest.raises(CheckpointError, match=message):
        layers_of(config)


def test_no_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected a model's config.json"):
        layers_to_warm_up(tmp_path, [], {}, "fp8")
    with pytest.raises(ConfigError, match="one of fp8, fp8_e5m2, bf16; got 'int8'"):
        layers_to_warm_up(tmp_path, [], {}, "int8")
