"""Recipe: shorthands, contradictions, messages, components and the round trip through text."""

import copy
import json
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from octavo.errors import ConfigError
from octavo.recipe import (
    AttentionSettings,
    Bf16Settings,
    ComponentRecipe,
    KvCacheSettings,
    LinearSettings,
    Recipe,
)

INLINE = {"visual.blocks.0.attn": {"q": 0.5, "k": 1, "v": 2.5, "q_heads": [0.5, 0.25]}}

RECIPES = {
    "empty": {},
    "design": {"vision_attention": "fp8", "kv_cache": "fp8", "linear": "fp8"},
    "e5m2": {"kv_cache": "fp8_e5m2", "skip_layers": ["sliding_window", "0-3"]},
    "per head": {"kv_cache": {"granularity": "head", "scaling": "static"}, "scales": "s.json"},
    "per token": {"kv_cache": {"granularity": "token"}},
    "rotated": {"kv_cache": {"scaling": "unit", "rotate_keys": True}},
    "centered": {
        "kv_cache": {"granularity": "token", "rotate_keys": True, "center_keys": True},
        "scales": {
            "octavo": {"format_version": 1, "rotate_keys": True},
            "layers": {"a.0": {"q": 0.5, "k": 1, "v": 2.5, "k_mean": [[1, -2.5], [0, 0.5]]}},
        },
    },
    "weight only": {"linear": {"activation": None}, "ignored_layers": ["re:^a.*\\.b$", "*.x"]},
    "weight-only layers": {"linear": "fp8", "weight_only_layers": ["modulation", "0-3"]},
    "block": {"linear": {"weight": "block 128x128", "activation": "block 1x128"}},
    "one level": {"attention": "fp8", "promote_every": None},
    "four tiles": {"attention": "fp8", "promote_every": 4, "margin": 1.25},
    "inline scales": {"attention": {"scaling": "static"}, "scales": INLINE},
    "text encoder": {"text_encoder": "fp8", "ignored_layers": ["wo"]},
    "components": {
        "linear": "fp8",
        "components": {
            "vae": None,
            "transformer_2": {"linear": {"weight": "tensor"}, "ignored_layers": ["img_mlp"]},
            'odd "name".\n': {"attention": "fp8", "skip_layers": ["7"]},
        },
    },
}


@pytest.fixture(params=RECIPES, ids=lambda name: name.replace(" ", "-"))
def recipe(request):
    return Recipe(**RECIPES[request.param])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vision_attention": "fp8"}, AttentionSettings()),
        ({"vision_attention": "bf16"}, Bf16Settings(dtype="bf16")),
        ({"vision_attention": {"dtype": "bf16"}}, Bf16Settings(dtype="bf16")),
        ({"vision_attention": Bf16Settings(dtype="bf16")}, Bf16Settings(dtype="bf16")),
        ({"attention": "fp8"}, AttentionSettings(granularity="tensor", scaling="dynamic")),
        ({"attention": {"granularity": "head"}}, AttentionSettings(granularity="head")),
        ({"kv_cache": "fp8"}, KvCacheSettings(format="e4m3", scaling="checkpoint")),
        ({"kv_cache": "fp8_e5m2"}, KvCacheSettings(format="e5m2")),
        ({"kv_cache": {}}, KvCacheSettings()),
        ({"kv_cache": {"scaling": "unit"}}, KvCacheSettings(scaling="unit")),
        ({"linear": "fp8"}, LinearSettings(weight="channel", activation="token")),
        ({"linear": {"activation": "none"}}, LinearSettings(activation=None)),
        ({"linear": LinearSettings(weight="tensor")}, LinearSettings(weight="tensor")),
        ({"text_encoder": "fp8"}, LinearSettings()),
        ({"linear": "none"}, None),
        ({"linear": None}, None),
    ],
)
def test_shorthands(fields, expected):
    (name,) = fields
    assert getattr(Recipe(**fields), name) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scaling": "static"}, LinearSettings(scaling="static", activation="tensor")),
        (
            {"weight": "block 128x128"},
            LinearSettings(weight="block 128x128", activation="block 1x128"),
        ),
        (
            {"weight": "block 128x128", "activation": "token"},
            LinearSettings(weight="block 128x128", activation="token"),
        ),
        (
            {"weight": "block 128x128", "scaling": "static"},
            LinearSettings(weight="block 128x128", activation="tensor", scaling="static"),
        ),
        ({"method": "fp8"}, LinearSettings()),
        ({"activation_scheme": "dynamic", "weight_block_size": None}, LinearSettings()),
        ({"activation_scheme": "static"}, LinearSettings(scaling="static", activation="tensor")),
        ({"weight_block_size": [128, 128]}, LinearSettings(weight="block 128x128")),
        ({"weight_block_size": (128, 128)}, LinearSettings(weight="block 128x128")),
        ({"activation_scheme": "static", "scaling": "static"}, LinearSettings(scaling="static")),
    ],
)
def test_linear_layers_understand_the_words_of_vllm(fields, expected):
    assert LinearSettings(**fields) == expected
    assert LinearSettings.read(fields) == expected


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


def test_a_kv_cache_per_token_is_dynamic_by_itself():
    assert KvCacheSettings(granularity="token").scaling == "dynamic"


def test_the_defaults_quantize_nothing():
    assert Recipe().is_empty
    assert Recipe().describe() == "nothing is quantized"
    assert Recipe().promote_every == 1
    assert Recipe().margin == 1.5


@pytest.mark.parametrize(
    ("fields", "is_empty"),
    [
        ({"components": {"vae": None}}, True),
        ({"components": {"vae": {}}}, True),
        ({"promote_every": None}, True),
        ({"components": {"transformer": {"linear": "fp8"}}}, False),
        ({"text_encoder": "fp8"}, False),
        ({"kv_cache": "fp8"}, False),
        ({"vision_attention": "bf16"}, False),
    ],
)
def test_is_empty(fields, is_empty):
    assert Recipe(**fields).is_empty is is_empty


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
        ({"promote_every": 0}, "promote_every: expected greater than or equal to 1, got 0"),
        ({"promote_every": -1}, "promote_every: expected greater than or equal to 1"),
        ({"promote_every": True}, "promote_every: expected a valid integer, got True"),
        ({"promote_every": "2"}, "promote_every: expected a valid integer, got '2'"),
        ({"promote_every": 1.0}, "promote_every: expected a valid integer"),
        ({"promote_every": 10**5000}, "promote_every: expected less than"),
        ({"margin": 0}, "margin: expected greater than 0, got 0"),
        ({"margin": -1.5}, "margin: expected greater than 0"),
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


def test_frozen_to_the_inside():
    recipe = Recipe(**RECIPES["components"])
    with pytest.raises(ValidationError):
        recipe.linear = None
    with pytest.raises(TypeError):
        recipe.components["vae"] = ComponentRecipe()
    with pytest.raises(TypeError):
        Recipe(**RECIPES["inline scales"]).scales["a"] = {}


def test_json_round_trip(recipe):
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.to_json() == recipe.to_json()


def test_toml_round_trip(recipe):
    again = Recipe.from_toml(recipe.to_toml())
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.to_toml() == recipe.to_toml()


def test_json_and_toml_say_the_same(recipe):
    assert tomllib.loads(recipe.to_toml()) == json.loads(recipe.to_json())
    assert "null" not in recipe.to_json()


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_file_round_trip(recipe, suffix, tmp_path):
    path = tmp_path / f"recipe.{suffix}"
    recipe.save(path)
    assert Recipe.load(path) == Recipe.load(str(path)) == recipe
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_copies_and_pickles(recipe):
    assert copy.copy(recipe) == copy.deepcopy(recipe) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_equal_recipes_hash_alike_whatever_their_order():
    first = Recipe(linear="fp8", components={"a": None, "b": None}, margin=2)
    second = Recipe(margin=2.0, components={"b": None, "a": "none"}, linear=LinearSettings())
    assert first == second
    assert len({first, second, Recipe()}) == 2


def test_a_weight_only_none_and_a_one_level_none_are_written():
    text = Recipe(linear={"activation": None}, promote_every=None).to_toml()
    assert 'activation = "none"' in text
    assert 'promote_every = "none"' in text


def test_json_null_is_none():
    recipe = Recipe.from_json('{"linear": {"activation": null}, "promote_every": null}')
    assert recipe == Recipe(linear={"activation": None}, promote_every=None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "in JSON"),
        ("[]", "as an object, got []"),
        ("null", "as an object, got None"),
        ('"none"', "as an object, got 'none'"),
        ("{", "in JSON"),
        ("[" * 100_000, "recursion"),
        ("9" * 5000, "4300 digits"),
        ('{"linear": "fp8", "linear": "fp8"}', "'linear' appears twice"),
        ('{"linear": {"weight": "tensor", "weight": "channel"}}', "'weight' appears twice"),
        ('{"linera": "fp8"}', "unknown key 'linera': did you mean 'linear'?"),
        ('{"promote_every": NaN}', "promote_every: expected a valid integer, got nan"),
    ],
)
def test_bad_json(text, said):
    with pytest.raises(ConfigError) as caught:
        Recipe.from_json(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("linear", "in TOML"),
        ('linear = "fp8"\nlinear = "fp8"', "in TOML"),
        ("a = " + "[" * 10_000, "in TOML"),
        ("linear = 2026-08-22", "linear: expected None, 'fp8'"),
        ("promote_every = 0x" + "F" * 5000, "got a huge number"),
        ("promote_every = " + "9" * 5000, "in TOML"),
        ('[liner]\nweight = "tensor"', "did you mean 'linear'?"),
    ],
)
def test_bad_toml(text, said):
    with pytest.raises(ConfigError) as caught:
        Recipe.from_toml(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe", "recipe.JSON", ".toml"])
def test_the_file_name_says_the_language(name, tmp_path):
    with pytest.raises(ConfigError, match=r"ends in .json or .toml"):
        Recipe().save(tmp_path / name)
    with pytest.raises(ConfigError, match=r"ends in .json or .toml"):
        Recipe.load(tmp_path / name)


def test_load_names_the_file(tmp_path):
    missing, broken, binary = (tmp_path / name for name in ("a.json", "b.toml", "c.json"))
    broken.write_text("linear =")
    binary.write_bytes(b"\xff\xfe")
    for path, said in [(missing, "No such file"), (broken, "in TOML"), (binary, "utf-8")]:
        with pytest.raises(ConfigError, match=said) as caught:
            Recipe.load(path)
        assert path.name in str(caught.value)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match="folder.json"):
        Recipe.load(tmp_path / "folder.json")


def test_save_into_a_missing_folder(tmp_path):
    with pytest.raises(ConfigError, match="expected an existing folder"):
        Recipe().save(tmp_path / "none" / "recipe.json")


def test_scales_may_be_a_path_object():
    assert Recipe(attention={"scaling": "static"}, scales=Path("a") / "s.json").scales == "a/s.json"


def test_inline_scales_are_floats_and_tuples():
    recipe = Recipe(attention={"scaling": "static"}, scales=INLINE)
    entry = recipe.scales["visual.blocks.0.attn"]
    assert entry == {"q": 0.5, "k": 1.0, "v": 2.5, "q_heads": (0.5, 0.25)}
    assert all(isinstance(entry[key], float) for key in "qkv")


def test_replace_checks_again():
    recipe = Recipe(kv_cache="fp8", skip_layers=["0"])
    assert recipe.replace(kv_cache="fp8_e5m2") == Recipe(kv_cache="fp8_e5m2", skip_layers=["0"])
    assert recipe.kv_cache.format == "e4m3"
    with pytest.raises(ConfigError, match="skip_layers needs"):
        recipe.replace(kv_cache=None)
    with pytest.raises(ConfigError, match="unknown key"):
        recipe.replace(kvcache=None)


class TestForComponent:
    recipe = Recipe(
        attention={"scaling": "static"},
        linear="fp8",
        text_encoder={"weight": "tensor"},
        ignored_layers=["img_mlp"],
        weight_only_layers=["txt_mod"],
        components={"transformer_2": {"linear": {"activation": None}}, "vae": None},
        promote_every=2,
        scales="s.json",
        margin=2.0,
    )

    def test_without_an_entry_the_recipe_holds(self):
        assert self.recipe.for_component("transformer") == self.recipe.replace(
            components={}, text_encoder=None
        )

    def test_an_entry_replaces_all_of_it(self):
        assert self.recipe.for_component("transformer_2") == Recipe(
            linear={"activation": None}, promote_every=2, margin=2.0
        )

    def test_none_is_nothing(self):
        assert self.recipe.for_component("vae").is_empty

    def test_a_text_encoder_has_its_own_field(self):
        assert self.recipe.for_component("text_encoder", is_text_encoder=True) == Recipe(
            linear={"weight": "tensor"},
            ignored_layers=["img_mlp"],
            weight_only_layers=["txt_mod"],
            promote_every=2,
            margin=2.0,
        )

    def test_an_entry_beats_the_text_encoder_field(self):
        recipe = self.recipe.replace(components={"text_encoder": None})
        assert recipe.for_component("text_encoder", is_text_encoder=True).is_empty

    def test_a_text_encoder_that_is_not_quantized_ignores_nothing(self):
        patterns = {"included_layers": ["txt_mlp"], "weight_only_layers": ["modulation"]}
        recipe = Recipe(linear="fp8", ignored_layers=["img_mlp"], **patterns)
        assert recipe.for_component("text_encoder", is_text_encoder=True) == Recipe()

    def test_a_transformer_beside_a_quantized_text_encoder_is_left_alone(self):
        recipe = Recipe(text_encoder="fp8", ignored_layers=["wo"])
        assert recipe.for_component("transformer") == Recipe()


@pytest.mark.parametrize(
    ("weight", "expected"),
    [("channel", "channel"), ("tensor", "channel"), ("block 128x128", "block 128x128")],
)
def test_weight_only_settings_have_no_activation_and_no_scale_for_all(weight, expected):
    given = LinearSettings(weight=weight, scaling="static", activation="tensor")
    found = given.weight_only()
    assert found == LinearSettings(weight=expected, activation=None)
    assert (found.activation, found.scaling) == (None, "dynamic")


def test_describe():
    recipe = Recipe(
        vision_attention={"granularity": "head", "scaling": "static"},
        kv_cache="fp8",
        linear={"activation": None},
        skip_layers=["sliding_window", "0-3"],
        included_layers=["txt_mlp"],
        weight_only_layers=["modulation"],
        components={"t2": {"linear": "fp8", "ignored_layers": ["img_mlp"]}, "vae": None},
        promote_every=None,
        scales="s.json",
    )
    assert recipe.describe() == str(recipe)
    assert recipe.describe().splitlines() == [
        "vision_attention: granularity head, scaling static",
        "kv_cache: format e4m3, granularity tensor, scaling checkpoint",
        "linear: format e4m3, weight channel, activation None, scaling dynamic",
        "t2.linear: format e4m3, weight channel, activation token, scaling dynamic",
        "skip_layers: sliding_window, 0-3",
        "included_layers: txt_mlp",
        "weight_only_layers: modulation",
        "t2.ignored_layers: img_mlp",
        "promote_every: None",
        "scales: s.json",
    ]


def test_bf16_quantizes_nothing():
    recipe = Recipe(vision_attention="bf16", kv_cache={"scaling": "static"}, scales="s.json")
    assert list(recipe.quantized()) == ["kv_cache"]
    assert recipe.describe().splitlines()[0] == "vision_attention: dtype bf16"
    assert Recipe.from_toml(recipe.to_toml()) == Recipe.from_json(recipe.to_json()) == recipe
    only = Recipe(components={"visual": {"vision_attention": "bf16"}})
    assert list(only.settings()) == ["visual.vision_attention"] and not only.quantized()
    assert only.for_component("visual") == Recipe(vision_attention="bf16")


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


def test_describe_counts_inline_scales():
    assert "scales: of 1 layers" in Recipe(**RECIPES["inline scales"]).describe()


def test_repr_shows_what_is_set():
    assert repr(Recipe(kv_cache="fp8")) == (
        "Recipe(kv_cache=KvCacheSettings(format='e4m3', granularity='tensor', "
        "scaling='checkpoint'), promote_every=1, margin=1.5)"
    )


def test_granularities_are_those_of_numerics():
    from octavo.numerics.granularity import parse_granularity

    fields = [
        model.model_fields[name]
        for model, name in [
            (AttentionSettings, "granularity"),
            (KvCacheSettings, "granularity"),
            (LinearSettings, "weight"),
        ]
    ]
    words = [word for field in fields for word in get_args(field.annotation)]
    words += ["token", "tensor", "block 1x128"]
    assert [str(parse_granularity(word)) for word in words] == words


def test_formats_are_those_of_numerics():
    from octavo.numerics.formats import FORMATS

    assert set(get_args(KvCacheSettings.model_fields["format"].annotation)) == set(FORMATS)


def test_torch_is_not_imported():
    program = (
        "import sys, octavo.recipe, octavo.calibration.scale_file; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
SETTINGS = st.sampled_from(["fp8", "bf16", "fp8_e5m2", "none", None]) | st.fixed_dictionaries(
    {},
    optional={
        "granularity": st.sampled_from(["tensor", "head", "token"]),
        "scaling": st.sampled_from(["dynamic", "static", "checkpoint"]),
        "weight": st.sampled_from(["tensor", "channel", "block 128x128"]),
        "activation": st.sampled_from(["tensor", "token", None]),
    },
)
PATTERNS = st.lists(st.text(max_size=8) | st.sampled_from(["0-3", "mlp"]), max_size=2)
PARTS = {
    "vision_attention": SETTINGS,
    "attention": SETTINGS,
    "kv_cache": SETTINGS,
    "linear": SETTINGS,
    "skip_layers": PATTERNS,
    "ignored_layers": PATTERNS,
    "included_layers": PATTERNS,
    "weight_only_layers": PATTERNS,
}
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        **PARTS,
        "text_encoder": SETTINGS,
        "components": st.dictionaries(
            st.text(max_size=6), st.none() | st.fixed_dictionaries({}, optional=PARTS), max_size=2
        ),
        "promote_every": st.integers(-1, 4) | st.just("none"),
        "scales": st.text(max_size=6)
        | st.dictionaries(st.text(max_size=6), st.dictionaries(st.text(max_size=3), st.floats())),
        "margin": st.floats(),
    },
)


def check_document(document):
    """A recipe or a ConfigError; and a recipe survives both languages."""
    try:
        recipe = Recipe.from_json(json.dumps(document))
    except ConfigError as error:
        assert len(str(error)) < 5000
        return
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert recipe.describe()


@given(JSON_VALUES | DOCUMENTS)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_a_recipe_or_a_config_error(document):
    check_document(document)


@pytest.mark.slow
@given(DOCUMENTS | st.dictionaries(st.sampled_from(list(Recipe.model_fields)), JSON_VALUES))
@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_a_recipe_or_a_config_error_for_long(document):
    check_document(document)


def test_rotated_and_centered_keys():
    settings = KvCacheSettings(granularity="token", rotate_keys=True)
    assert str(settings).endswith("rotate_keys True") and "center" not in str(settings)
    recipe = Recipe(**RECIPES["centered"])
    assert recipe.is_static and "scales: of 1 layers" in recipe.describe()
    assert recipe.scales["layers"]["a.0"]["k_mean"] == ((1.0, -2.5), (0.0, 0.5))


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
