"""OctavoConfig: settings of linear layers as transformers keeps them."""

import json

import pytest

pytest.importorskip("transformers")

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)

from octavo import ConfigError, OctavoConfig, ScaleSet, load_scales, save_scales
from octavo.recipe import LinearSettings

SCALES = {"model.layers.0.mlp.up_proj": {"input": 0.5}}


def test_transformers_knows_it():
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["octavo"] is OctavoConfig
    assert AUTO_QUANTIZER_MAPPING["octavo"].__name__ == "OctavoQuantizer"


@pytest.mark.parametrize(
    "config",
    [
        OctavoConfig(),
        OctavoConfig({"weight": "block 128x128"}, ["lm_head", "0-3"]),
        OctavoConfig({"activation": None}),
        OctavoConfig(LinearSettings(scaling="static"), scales=SCALES),
        OctavoConfig({"scaling": "static"}),
    ],
    ids=str,
)
def test_json_round_trip(config):
    document = json.loads(json.dumps(config.to_dict()))
    again = OctavoConfig.from_dict(document)
    assert again == config and dict(again) == document == json.loads(config.to_json_string())
    assert again.linear == config.linear and again.ignored_layers == config.ignored_layers


def test_vllms_words_mean_the_same():
    assert OctavoConfig({"activation_scheme": "dynamic"}) == OctavoConfig("fp8")
    assert OctavoConfig({"weight_block_size": [128, 128]}) != OctavoConfig("fp8")
    assert OctavoConfig() != "fp8"


def test_scales_from_a_file(tmp_path):
    save_scales(tmp_path / "scales.json", ScaleSet.from_dict(SCALES))
    config = OctavoConfig({"scaling": "static"}, scales=tmp_path / "scales.json")
    assert config.read_scales() == load_scales(tmp_path / "scales.json")
    assert config.to_dict()["scales"] == str(tmp_path / "scales.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear": None}, "expected 'fp8'"),
        ({"linear": "int8"}, "int8"),
        ({"linear": {"weights": "channel"}}, "unknown key 'weights'"),
        ({"ignored_layers": "lm_head"}, "expected a list of patterns"),
        ({"ignored_layers": ["re:("]}, "regular expression"),
        ({"scales": SCALES}, "scaling is not 'static'"),
        ({"quant_method": "fp8"}, "expected quant_method octavo"),
    ],
)
def test_what_has_no_meaning_raises(options, message):
    with pytest.raises(ConfigError, match=message):
        OctavoConfig(**options)
