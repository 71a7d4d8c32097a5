"""weight_only_layers of OctavoConfig: quantized on the way in, saved and loaded bit by bit."""

import json

import pytest
import torch

pytest.importorskip("transformers")


from transformers import AutoModel, AutoModelForCausalLM

from octavo import (
    CheckpointError,
    ConfigError,
    OctavoConfig,
    Recipe,
    apply_,
    calibrate_linear,
    quantize_,
)
from octavo.layers.linear import Fp8Linear
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.fp8_folders import make_plain
from octavo_testkit.models.text_models import make_prompts

DOWN = ("layers.0.mlp.down_proj",)
ALONE = LinearSettings(activation=None)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def load(folder, config=None, kind=AutoModelForCausalLM):
    options = {} if config is None else {"quantization_config": config}
    return kind.from_pretrained(folder, dtype=torch.bfloat16, **options)


def weight_only(model):
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    return [name for name, layer in layers.items() if layer.settings == ALONE]


def assert_same_model(actual, expected):
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, x in ours.items():
        assert_same_bits(x, theirs[name])
    ids = make_prompts(1, 9)["input_ids"]
    assert_same_bits(actual(ids).logits, expected(ids).logits)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    make_plain().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("linear", ["fp8", {"weight": "tensor", "activation": "tensor"}])
def test_it_is_what_quantize_makes_and_a_saved_one_is_the_same(plain, tmp_path, linear):
    config = OctavoConfig(linear, weight_only_layers=DOWN)
    expected = load(plain)
    quantize_(expected, linear, weight_only_layers=DOWN)
    assert weight_only(expected) == ["model.layers.0.mlp.down_proj"]
    for name, model in {"loaded": load(plain, config), "applied": expected}.items():
        assert weight_only(model) == weight_only(expected)
        assert_same_model(model, expected)
        model.save_pretrained(tmp_path / name)
        again = load(tmp_path / name)
        assert weight_only(again) == weight_only(expected)
        assert_same_model(again, expected)
        assert again.config.quantization_config == config


def test_static_scales_are_for_the_others(plain, tmp_path):
    batches = [make_prompts(1, 9)["input_ids"]]
    scales = calibrate_linear(load(plain), batches, weight_only_layers=DOWN)
    assert "model.layers.0.mlp.down_proj" not in scales.inputs
    config = OctavoConfig({"scaling": "static"}, scales=scales, weight_only_layers=DOWN)
    model = load(plain, config)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert weight_only(again) == weight_only(model) == ["model.layers.0.mlp.down_proj"]
    assert_same_model(again, model)


def test_a_part_of_the_saved_model_knows_them_too(plain, tmp_path):
    config = OctavoConfig(weight_only_layers=["re:^model.layers.0.mlp.down"])
    load(plain, config).save_pretrained(tmp_path)
    assert weight_only(load(tmp_path, kind=AutoModel)) == list(DOWN)


def test_a_config_says_them_only_where_they_are():
    assert "weight_only_layers" not in OctavoConfig().to_dict()
    config = OctavoConfig(weight_only_layers=["down_proj"])
    assert OctavoConfig.from_dict(config.to_dict()) == config != OctavoConfig()
    with pytest.raises(ConfigError, match="expected a list of patterns"):
        OctavoConfig(weight_only_layers="down_proj")


def test_patterns_that_match_nothing(plain, tmp_path):
    with pytest.raises(ConfigError, match="pattern 'txt_mod' matches none"):
        load(plain, OctavoConfig(weight_only_layers=["txt_mod"]))
    load(plain, OctavoConfig(weight_only_layers=DOWN)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    document["quantization_config"]["weight_only_layers"] = ["txt_mod"]
    path.write_text(json.dumps(document))
    with pytest.raises(
        CheckpointError,
        match="weight_only_layers of the saved config: pattern 'txt_mod' matches none",
    ):
        load(tmp_path)


def test_beside_a_kv_cache(plain):
    model = load(plain)
    recipe = Recipe(linear="fp8", kv_cache={"scaling": "unit"}, weight_only_layers=["o_proj"])
    changes = apply_(model, recipe)
    assert len(changes.weight_only["linear"]) == len(weight_only(model)) == 2
