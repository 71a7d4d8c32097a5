"""A recipe as JSON and as TOML: the round trip, files, and texts that are none."""

import copy
import json
import pickle
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.recipe import LinearSettings, Recipe

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
