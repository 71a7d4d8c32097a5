"""Settings of the plug-in and which layers they choose; none of this needs vLLM."""

from types import SimpleNamespace

import pytest

from octavo.errors import ConfigError
from octavo.integrations.vllm.settings import LinearChoice, PluginSettings, read_settings
from octavo.recipe import LinearSettings

QKV = ("q_proj", "k_proj", "v_proj")


def config_of(additional, quantization="octavo"):
    """What read_settings looks at of a VllmConfig."""
    model = SimpleNamespace(quantization=quantization)
    return SimpleNamespace(additional_config=additional, model_config=model)


@pytest.mark.parametrize("additional", [{}, {"other": {"linear": 1}}, {"octavo": {}}, object()])
def test_without_settings_the_defaults_hold(additional):
    settings = read_settings(config_of(additional))
    assert settings == PluginSettings()
    assert settings.linear == LinearSettings(weight="channel", activation="token")


def test_settings_have_the_words_of_a_recipe():
    given = {"linear": {"weight": "block 128x128"}, "ignored_layers": ["down_proj", "0-3"]}
    settings = read_settings(config_of({"octavo": given}))
    assert settings.linear == LinearSettings(weight="block 128x128", activation="block 1x128")
    assert settings.ignored_layers == ("down_proj", "0-3")
    words = {"linear": {"activation": "none"}}
    assert read_settings(config_of({"octavo": words})).linear.activation is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fp8", "octavo: expected an object with the keys linear, ignored_layers, weight_only"),
        ({"liner": "fp8"}, "unknown key 'liner': did you mean 'linear'?.*keys are linear, ign"),
        ({"linear": "fp4"}, "linear: expected None, 'fp8' or settings .*, got 'fp4'"),
        ({"linear": "none"}, "leave --quantization octavo out"),
        ({"linear": {"scaling": "static"}}, "'static' is not supported inside vLLM"),
        ({"linear": {"weight": "row"}}, "weight: .*, got 'row'"),
        ({"ignored_layers": "down_proj"}, "expected a list of patterns, got 'down_proj'"),
        ({"ignored_layers": ["a"], "weight_only_layers": ["a"]}, "got in both: 'a'"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_settings(config_of({"octavo": given}))
    assert str(caught.value).startswith("--additional-config: octavo: ")


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_settings_that_nobody_reads_are_refused(quantization):
    with pytest.raises(ConfigError, match="which need --quantization octavo"):
        read_settings(config_of({"octavo": {"linear": "fp8"}}, quantization))
    assert read_settings(config_of({"octavo": {}}, quantization)) == PluginSettings()


def chosen(**given):
    """The choice for two layers of a Llama, as vLLM names and fuses them."""
    choice = LinearChoice(PluginSettings(**given))
    for index in range(2):
        layer = f"model.layers.{index}"
        choice.choose(f"{layer}.self_attn.qkv_proj", QKV, (64, 128))
        choice.choose(f"{layer}.self_attn.o_proj", (), (64, 64))
        choice.choose(f"{layer}.mlp.gate", (), (64, 32))
        choice.choose(f"{layer}.mlp.down_proj", (), (64, 64))
    return choice


def test_routers_and_small_layers_are_left_alone():
    choice = chosen()
    choice.choose("model.head", (), (64, 8))
    assert choice.left == {
        "model.layers.0.mlp.gate": "a router of experts",
        "model.layers.1.mlp.gate": "a router of experts",
        "model.head": "small: 64 to 8",
    }
    assert {*choice.settings.values()} == {LinearSettings()}
    assert len(choice.settings) == 6
    choice.check()


@pytest.mark.parametrize("patterns", [QKV, ("qkv_proj",), ("re:[qkv]_proj",), ("*.self_attn.*",)])
def test_a_fused_layer_is_matched_by_its_name_or_all_of_its_parts(patterns):
    choice = chosen(ignored_layers=patterns)
    names = {f"model.layers.{index}.self_attn.qkv_proj" for index in range(2)}
    assert names <= choice.left.keys()
    assert not names & choice.settings.keys()
    choice.check()


def test_some_parts_of_a_fused_layer_are_not_enough():
    with pytest.raises(ConfigError, match="fuses into one layer, model.layers.0.self_attn.qkv_pro"):
        chosen(ignored_layers=("q_proj",))


def test_layers_are_matched_by_index():
    choice = chosen(ignored_layers=("1",))
    assert all(".0." in name for name in choice.settings)
    choice.check()


def test_weight_only_layers_have_settings_of_their_own():
    choice = chosen(weight_only_layers=("down_proj", "gate"))
    weight_only = {n for n, own in choice.settings.items() if own.activation is None}
    assert {name.rpartition(".")[2] for name in weight_only} == {"down_proj", "gate"}
    assert not choice.left  # even a router, if it is named


def test_a_layer_cannot_be_ignored_and_weight_only():
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj.*got in both"):
        chosen(ignored_layers=("1",), weight_only_layers=("down_proj",))


def test_a_pattern_that_matches_nothing_is_an_error():
    for key in ("ignored_layers", "weight_only_layers"):
        with pytest.raises(ConfigError, match="pattern 'up_proj' matches none of the"):
            chosen(**{key: ("up_proj",)}).check()


def test_asking_twice_changes_nothing():
    choice = chosen()
    before = dict(choice.settings), dict(choice.left)
    choice.choose("model.layers.0.self_attn.qkv_proj", QKV, (64, 128))
    assert ({**choice.settings}, choice.left) == before
