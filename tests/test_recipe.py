"""Recipe: shorthands, components, and how it describes itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from octavo.calibration.scale_file import LayerScales, ScaleSet, save_scales
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


def test_frozen_to_the_inside():
    recipe = Recipe(linear="fp8", components={"vae": None})
    with pytest.raises(ValidationError):
        recipe.linear = None
    with pytest.raises(TypeError):
        recipe.components["vae"] = ComponentRecipe()
    with pytest.raises(TypeError):
        Recipe(attention={"scaling": "static"}, scales=INLINE).scales["a"] = {}


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


@pytest.mark.parametrize("is_whole_file", [False, True])
def test_scales_of_a_kv_cache_without_q_are_inline_as_in_a_file(is_whole_file, tmp_path):
    scales = ScaleSet({"a": LayerScales(q=None, k=0.5, v=(0.25, 0.125))})
    save_scales(tmp_path / "scales.json", scales)
    document = json.loads((tmp_path / "scales.json").read_text())
    document = document if is_whole_file else document["layers"]
    fields = {"kv_cache": {"granularity": "head", "scaling": "static"}, "scales": document}
    recipe = Recipe(**fields)
    assert Recipe.from_json(json.dumps(fields)) == recipe
    for again in (recipe, Recipe.from_json(recipe.to_json()), Recipe.from_toml(recipe.to_toml())):
        assert again == recipe and hash(again) == hash(recipe)
        assert ScaleSet.from_dict(again.scales).layers == scales.layers


@pytest.mark.parametrize("key", ["k", "v", "k_heads", "q_scale", "input"])
def test_only_q_may_be_none(key):
    entry = {"q": None, "k": 0.5, "v": 0.25, key: None}
    with pytest.raises(ConfigError, match="layer 'a': expected positive finite scales"):
        Recipe(kv_cache={"scaling": "static"}, scales={"a": entry})


def test_describe_counts_inline_scales():
    recipe = Recipe(attention={"scaling": "static"}, scales=INLINE)
    assert "scales: of 1 layers" in recipe.describe()


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


def test_rotated_and_centered_keys():
    settings = KvCacheSettings(granularity="token", rotate_keys=True)
    assert str(settings).endswith("rotate_keys True") and "center" not in str(settings)
    layers = {"a.0": {"q": 0.5, "k": 1, "v": 2.5, "k_mean": [[1, -2.5], [0, 0.5]]}}
    recipe = Recipe(
        kv_cache={"granularity": "token", "rotate_keys": True, "center_keys": True},
        scales={"octavo": {"format_version": 1, "rotate_keys": True}, "layers": layers},
    )
    assert recipe.is_static and "scales: of 1 layers" in recipe.describe()
    assert recipe.scales["layers"]["a.0"]["k_mean"] == ((1.0, -2.5), (0.0, 0.5))
