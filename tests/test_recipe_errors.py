"""Recipes that cannot be: what is said of them."""

import pytest

from octavo.errors import ConfigError
from octavo.recipe import (
    AttentionSettings,
    ComponentRecipe,
    KvCacheSettings,
    LinearSettings,
    Recipe,
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "awq"}, "method: expected 'fp8', got 'awq'"),
        ({"weight_block_size": [64, 64]}, "expected [128, 128] or None, got [64, 64]"),
        ({"weight_block_size": 128}, "expected [128, 128] or None, got 128"),
        (
            {"weight_block_size": [128, 128], "weight": "channel"},
            "weight: got 'channel' and 'block 128x128': say it once",
        ),
        (
            {"activation_scheme": "static", "scaling": "dynamic"},
            "scaling: got 'dynamic' and 'static': say it once",
        ),
        ({"activation_scheme": "sometimes"}, "scaling: expected 'dynamic' or 'static'"),
        ({"activation_scheme": "static", "activation": "token"}, "needs activation 'tensor'"),
        ({"format": "e5m2"}, "format: expected 'e4m3', got 'e5m2'"),
        ({"weights": "tensor"}, "unknown key 'weights': did you mean 'weight'?"),
    ],
)
def test_linear_settings_that_contradict_themselves(fields, said):
    with pytest.raises(ConfigError) as caught:
        LinearSettings(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"foo": 1}, "unknown key 'foo': remove it"),
        ({"vision_atention": "fp8"}, "unknown key 'vision_atention': did you mean 'vision_att"),
        ({"ignored_layer": []}, "did you mean 'ignored_layers'?"),
        ({"weight_only_layer": []}, "did you mean 'weight_only_layers'?"),
        ({"self": 1}, "unknown key 'self'"),
        ({"linear": {"wieght": "tensor"}}, "linear: unknown key 'wieght': did you mean 'weight'?"),
        ({"components": {"vae": {"linaer": "fp8"}}}, "components.vae: unknown key 'linaer'"),
        ({"components": {"vae": {"margin": 1}}}, "components.vae: unknown key 'margin'"),
        ({"components": {"vae": "fp8"}}, "components.vae: expected None or settings"),
        ({"components": {"vae": Recipe()}}, "components.vae: expected None or settings"),
        ({"components": ["vae"]}, "components: expected a valid dictionary, got ['vae']"),
        ({"components": {7: None}}, "expected a valid string, got 7"),
        ({"attention": "fp9"}, "attention: expected None, 'fp8' or settings (granularity"),
        ({"attention": "fp8_e5m2"}, "attention: expected None, 'fp8' or settings"),
        ({"kv_cache": "fp9"}, "kv_cache: expected None, 'fp8', 'fp8_e5m2' or settings"),
        ({"kv_cache": True}, "kv_cache: expected None, 'fp8'"),
        ({"kv_cache": {1: 2}}, "kv_cache: expected None, 'fp8'"),
        ({"linear": KvCacheSettings()}, "linear: expected None, 'fp8' or settings (format, weight"),
        ({"attention": {"granularity": "token"}}, "granularity: expected 'tensor' or 'head', got"),
        ({"attention": {"granularity": ["head"]}}, "expected 'tensor' or 'head', got ['head']"),
        ({"kv_cache": {"format": "fp8"}}, "format: expected 'e4m3' or 'e5m2', got 'fp8'"),
        ({"linear": {"weight": "head"}}, "weight: expected 'channel', 'tensor' or 'block 128"),
        ({"linear": {"weight": "block 64x64"}}, "got 'block 64x64'"),
        ({"linear": {"weight": None}}, "weight: expected 'channel'"),
        ({"linear": {"activation": "channel"}}, "activation: expected 'token', 'tensor' or"),
        (
            {"promote_every": 0},
            "promote_every: expected a number greater than or equal to 1, got 0",
        ),
        ({"promote_every": -1}, "promote_every: expected a number greater than or equal to 1"),
        ({"promote_every": True}, "promote_every: expected a valid integer, got True"),
        ({"promote_every": "2"}, "promote_every: expected a valid integer, got '2'"),
        ({"promote_every": 1.0}, "promote_every: expected a valid integer"),
        ({"promote_every": 10**5000}, "promote_every: expected a number less than"),
        ({"margin": 0}, "margin: expected a number greater than 0, got 0"),
        ({"margin": -1.5}, "margin: expected a number greater than 0"),
        ({"margin": float("nan")}, "margin: expected"),
        ({"margin": float("inf")}, "margin: expected a finite number"),
        ({"margin": 10**400}, "margin: expected"),
        ({"margin": "1.5"}, "margin: expected a valid number"),
        ({"margin": None}, "margin: expected a valid number"),
        ({"skip_layers": "mlp"}, "skip_layers: expected a list of patterns, got 'mlp'"),
        ({"skip_layers": [7]}, 'skip_layers: expected a pattern as a string such as "img_mlp"'),
        ({"skip_layers": None}, "skip_layers: expected a list of patterns, got None"),
        ({"skip_layers": ["5-2"]}, "skip_layers: expected a layer index such as 7 or a range"),
        ({"ignored_layers": ["re:("]}, "ignored_layers: expected a regular expression"),
        ({"weight_only_layers": "modulation"}, "weight_only_layers: expected a list of patterns"),
        ({"scales": ""}, "scales: expected a path or"),
        ({"scales": 7}, "scales: expected a path or"),
        ({"scales": {}}, "scales: expected a path or"),
        ({"scales": {"a": 1}}, "scales: layer 'a': expected positive finite scales"),
        ({"scales": {"a": {"q": 0}}}, "scales: layer 'a': expected positive finite scales"),
        ({"scales": {"a": {"q": -1.0}}}, "layer 'a': expected positive finite scales"),
        ({"scales": {"a": {"q": True}}}, "layer 'a': expected positive finite scales"),
        ({"scales": {"a": {"q": "1"}}}, "layer 'a': expected positive finite scales"),
        ({"scales": {"a": {"q": float("nan")}}}, "layer 'a': expected positive finite scales"),
        ({"scales": {"a": {"q": [1.0, 10**400]}}}, "layer 'a': expected positive finite"),
    ],
)
def test_invalid_fields(fields, said):
    with pytest.raises(ConfigError) as caught:
        Recipe(**fields)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AttentionSettings(foo=1), "unknown key 'foo'"),
        (lambda: AttentionSettings(scaling="static "), "expected 'dynamic' or 'static'"),
        (lambda: KvCacheSettings(granularity="token", scaling="static"), "go together"),
        (lambda: KvCacheSettings(granularity="head", scaling="dynamic"), "go together"),
        (lambda: LinearSettings(scaling="static", activation="token"), "'tensor', got 'token'"),
        (lambda: LinearSettings(scaling="static", activation=None), "got None"),
        (lambda: LinearSettings(scaling="static", activation="block 1x128"), "got 'block 1x128'"),
        (lambda: ComponentRecipe(skip_layers=["0"]), "skip_layers needs"),
        (lambda: Recipe(skip_layers=["0"]), "skip_layers needs quantized attention"),
        (lambda: Recipe(linear="fp8", skip_layers=["0"]), "skip_layers needs quantized attention"),
        (lambda: Recipe(kv_cache="fp8", ignored_layers=["a"]), "ignored_layers needs"),
        (lambda: Recipe(attention="fp8", included_layers=["a"]), "included_layers needs"),
        (lambda: Recipe(attention="fp8", weight_only_layers=["a"]), "weight_only_layers needs"),
        (lambda: Recipe(attention={"scaling": "static"}), "needs scales, got none"),
        (lambda: Recipe(kv_cache={"scaling": "static"}), "needs scales, got none"),
        (
            lambda: Recipe(linear={"scaling": "static", "activation": "tensor"}),
            "needs scales, got none",
        ),
        (
            lambda: Recipe(components={"a": {"attention": {"scaling": "static"}}}),
            "needs scales, got none",
        ),
        (
            lambda: Recipe(components={"a": {"ignored_layers": ["b"]}}),
            "components.a: ignored_layers needs quantized linear layers",
        ),
        (lambda: Recipe(scales="s.json"), "nothing has scaling 'static'"),
        (lambda: Recipe(kv_cache="fp8", scales="s.json"), "nothing has scaling 'static'"),
    ],
)
def test_contradictions(make, said):
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


def test_several_problems_are_all_named_in_one_paragraph():
    with pytest.raises(ConfigError) as caught:
        Recipe(margin=0, promote_every=0, foo=1)
    assert all(word in str(caught.value) for word in ("margin", "promote_every", "foo"))


def test_messages_are_bounded():
    with pytest.raises(ConfigError) as caught:
        Recipe(**{"x" * 10**6: 1, "attention": "y" * 10**6, "scales": {"z" * 10**6: ["w" * 10**6]}})
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vision_attention": "bf16", "scales": "s.json"}, "nothing has scaling 'static'"),
        ({"vision_attention": "bf16", "skip_layers": ["0"]}, "skip_layers needs quantized att"),
        ({"vision_attention": {"dtype": "bf16", "granularity": "head"}}, "key 'granularity'"),
        ({"vision_attention": {"dtype": "bf16", "scaling": "static"}}, "unknown key 'scaling'"),
        ({"vision_attention": {"dtype": "int4"}}, "expected 'bf16', got 'int4'"),
        ({"vision_attention": "int4"}, "expected None, 'fp8', 'bf16' or settings"),
        ({"attention": "bf16"}, "expected None, 'fp8' or settings"),
    ],
)
def test_bf16_has_no_scales(fields, said):
    with pytest.raises(ConfigError) as caught:
        Recipe(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_cache": {"center_keys": True}}, "expected scaling 'static' or 'dynamic', got 'check"),
        ({"kv_cache": {"center_keys": True, "scaling": "unit"}}, "got 'unit'"),
        ({"kv_cache": {"granularity": "token", "center_keys": True}}, "center_keys needs scales"),
        ({"kv_cache": {"rotate_keys": "yes"}}, "rotate_keys: expected a valid boolean, got 'yes'"),
        ({"kv_cache": {"granularity": "token"}, "scales": "s"}, "'static' or center_keys; set one"),
    ],
)
def test_keys_that_contradict(fields, said):
    with pytest.raises(ConfigError, match=said):
        Recipe(**fields)


@pytest.mark.parametrize("mean", [1.0, None, [1.0], [[float("nan")]], [[True]], [["1"]]])
def test_means_that_are_none(mean):
    entry = {"a": {"q": 1.0, "k": 1.0, "v": 1.0, "k_mean": mean}}
    settings = {"granularity": "token", "center_keys": True}
    with pytest.raises(ConfigError, match="layer 'a': expected k_mean to be a list of finite"):
        Recipe(kv_cache=settings, scales=entry)


def test_a_scale_file_without_layers():
    with pytest.raises(ConfigError, match="expected a path or"):
        Recipe(kv_cache={"scaling": "static"}, scales={"octavo": 1, "layers": {}})
