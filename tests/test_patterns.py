"""Layer patterns: what each kind matches, what is malformed, and what a mismatch says."""

import fnmatch
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.patterns import MAX_PATTERN_LENGTH, Layer, match_layers, parse_pattern

DIT = [
    Layer(f"blocks.{i}.{part}", index=i)
    for i in range(12)
    for part in ("attn.to_q", "img_mlp.net.0", "img_mlp.net.2", "mlp", "txt_mlp.net.0")
]
TEXT = [Layer(f"model.layers.{i}.self_attn", i, is_sliding_window=i % 2 == 0) for i in range(6)]
NAMES = [layer.name for layer in DIT]


def names_matched(patterns, layers=DIT):
    return [layer.name for layer in match_layers(patterns, layers)]


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("img_mlp", "blocks.3.img_mlp.net.0", True),
        ("mlp", "blocks.3.img_mlp.net.0", False),
        ("img", "blocks.3.img_mlp.net.0", False),
        ("img_mlp.net", "blocks.3.img_mlp.net.0", True),
        ("img_mlp.0", "blocks.3.img_mlp.net.0", False),
        ("blocks.3", "blocks.3.img_mlp.net.0", True),
        ("blocks.3", "blocks.30.img_mlp.net.0", False),
        ("blocks.3", "my_blocks.3.mlp", False),
        ("net.0", "blocks.3.img_mlp.net.0", True),
        ("blocks.3.img_mlp.net.0", "blocks.3.img_mlp.net.0", True),
        ("3.img_mlp", "blocks.3.img_mlp.net.0", True),
        ("IMG_MLP", "blocks.3.img_mlp.net.0", False),
        ("lm_head", "lm_head", True),
        ("img_mlp.", "blocks.3.img_mlp.net.0", False),
        (".img_mlp", "blocks.3.img_mlp.net.0", False),
        ("img-mlp", "blocks.3.img-mlp", True),
        ("1a", "blocks.1a", True),
    ],
)
def test_component(pattern, name, is_match):
    assert parse_pattern(pattern).matches(Layer(name, index=3)) is is_match


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("*.attn", "visual.blocks.3.attn", True),
        ("*.attn", "visual.blocks.3.attn.qkv", False),
        ("*attn*", "visual.blocks.3.attn.qkv", True),
        ("img_*", "blocks.3.img_mlp", False),
        ("*img_*", "blocks.3.img_mlp", True),
        ("blocks.?.mlp", "blocks.3.mlp", True),
        ("blocks.?.mlp", "blocks.13.mlp", False),
        ("blocks?3?mlp", "blocks.3.mlp", True),
        ("blocks.[0-2].*", "blocks.2.mlp", True),
        ("blocks.[0-2].*", "blocks.3.mlp", False),
        ("blocks.[!0-2].*", "blocks.3.mlp", True),
        ("*.MLP", "blocks.3.mlp", False),
        ("[", "[", True),
        ("*", "anything.at.all", True),
    ],
)
def test_glob(pattern, name, is_match):
    assert parse_pattern(pattern).matches(Layer(name, index=3)) is is_match
    assert fnmatch.fnmatchcase(name, pattern) is is_match


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("re:mlp", "blocks.3.img_mlp.net.0", True),
        ("re:^mlp", "blocks.3.img_mlp.net.0", False),
        (r"re:blocks\.(1|3)\.", "blocks.3.mlp", True),
        (r"re:blocks\.(1|3)\.", "blocks.31.mlp", False),
        (r"re:net\.0$", "blocks.3.img_mlp.net.0", True),
        (r"re:^blocks\.\d+\.mlp$", "blocks.12.mlp", True),
        ("re:(?i)MLP", "blocks.3.mlp", True),
        ("re:7", "blocks.7.mlp", True),
        ("re:sliding_window", "blocks.sliding_window", True),
    ],
)
def test_regex_is_searched_for(pattern, name, is_match):
    assert parse_pattern(pattern).matches(Layer(name)) is is_match


@pytest.mark.parametrize(
    ("pattern", "indices"),
    [
        ("7", [7]),
        ("0", [0]),
        ("007", [7]),
        ("0-3", [0, 1, 2, 3]),
        ("3-3", [3]),
        ("10-99999999999999999999", [10, 11]),
    ],
)
def test_index_and_range(pattern, indices):
    layers = [Layer(f"layer{i}", i) for i in range(12)]
    assert [layer.index for layer in match_layers([pattern], layers)] == indices


def test_digits_are_an_index_never_a_component():
    layers = [Layer("blocks.3.mlp", index=0), Layer("blocks.4.mlp", index=3)]
    assert match_layers(["3"], layers) == [layers[1]]


def test_a_layer_without_an_index_is_in_no_range():
    layers = [Layer("lm_head"), Layer("layers.0", index=0)]
    assert match_layers(["0-9999999999999"], layers) == [layers[1]]


def test_sliding_window():
    assert [layer.index for layer in match_layers(["sliding_window"], TEXT)] == [0, 2, 4]


def test_patterns_add_up_in_the_order_of_the_layers():
    assert names_matched(["mlp", "txt_mlp", "11"]) == [
        name
        for name in NAMES
        if name.endswith(".mlp") or ".txt_mlp." in name or name.startswith("blocks.11.")
    ]


def test_no_patterns_match_no_layers():
    assert match_layers([], DIT) == []


def test_a_layer_is_matched_once():
    assert names_matched(["blocks.0.mlp", "re:^blocks.0.mlp$", "blocks.0.ml?"]) == ["blocks.0.mlp"]


@pytest.mark.parametrize(
    ("pattern", "layers", "said"),
    [
        ("img_mpl", DIT, "did you mean 'img_mlp'?"),
        ("img_mpl.net", DIT, "did you mean 'img_mlp.net'?"),
        ("blocks.3.atn.to_q", DIT, "did you mean 'blocks.3.attn.to_q'?"),
        ("zzzzzz", DIT, "whole dotted components"),
        ("img_*", DIT, "put * at both ends"),
        ("re:^img", DIT, "searched for in the whole name"),
        ("12", DIT, "their indices lie in 0-11"),
        ("12-20", DIT, "their indices lie in 0-11"),
        ("3", [Layer("lm_head")], "none of them has an index"),
        ("sliding_window", DIT, "none of them has a sliding window"),
        ("img_mlp", [], "there are no layers"),
    ],
)
def test_no_match_is_an_error_that_helps(pattern, layers, said):
    with pytest.raises(ConfigError) as caught:
        match_layers([pattern], layers)
    assert repr(pattern) in str(caught.value)
    assert said in str(caught.value)


def test_no_match_lists_what_exists():
    with pytest.raises(ConfigError) as caught:
        match_layers(["img_mlp", "vae"], DIT)
    message = str(caught.value)
    assert f"none of the {len(DIT)} layers" in message
    assert all(name in message for name in NAMES[:20])
    assert NAMES[20] not in message
    assert f"and {len(DIT) - 20} more" in message


def test_one_of_several_patterns_without_a_match_is_an_error():
    with pytest.raises(ConfigError, match="'nothing'"):
        match_layers(["mlp", "nothing"], DIT)


def test_the_message_is_short_and_quick_for_many_and_long_names():
    layers = [Layer(f"layers.{i}." + "x" * 10_000, i) for i in range(20_000)]
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        match_layers(["y" * MAX_PATTERN_LENGTH], layers)
    assert len(str(caught.value)) < 3000
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "1 to 1000 characters"),
        ("x" * 1001, "got 1001"),
        ("re:", "got nothing"),
        ("re:(", "regular expression"),
        ("re:[", "regular expression"),
        ("re:*a", "regular expression"),
        ("re:a{99999999999999999999}", "regular expression"),
        ("re:" + "(" * 900, "regular expression"),
        ("5-2", "a range such as 0-3, got '5-2'"),
        ("5-", "a range such as 0-3"),
        ("-5", "a range such as 0-3"),
        ("-", "a range such as 0-3"),
        (7, "as a string"),
        (None, "as a string"),
        (b"mlp", "as a string"),
    ],
)
def test_malformed(pattern, said):
    with pytest.raises(ConfigError, match=said):
        parse_pattern(pattern)
    with pytest.raises(ConfigError, match=said):
        match_layers([pattern], DIT)


def test_a_string_is_not_a_list_of_patterns():
    with pytest.raises(ConfigError, match="expected a list of patterns, got the string 'mlp'"):
        match_layers("mlp", DIT)


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_is_a_pattern_or_a_config_error(text, name):
    if text.startswith("re:"):
        text = text[1:]
    try:
        pattern = parse_pattern(text)
    except ConfigError:
        return
    assert isinstance(pattern.matches(Layer(name)), bool)


@given(st.text("ab*?[!]-.", min_size=1, max_size=12), st.text("ab*?[!]-.", max_size=8))
def test_globs_agree_with_fnmatch(text, name):
    if not any(character in text for character in "*?["):
        text += "*"
    assert parse_pattern(text).matches(Layer(name)) is fnmatch.fnmatchcase(name, text)


@given(st.lists(st.text("ab_1", min_size=1, max_size=4), min_size=1, max_size=6), st.data())
def test_every_run_of_components_matches_its_name(components, data):
    start = data.draw(st.integers(0, len(components) - 1))
    stop = data.draw(st.integers(start + 1, len(components)))
    run = ".".join(components[start:stop])
    if not run.isdigit():
        assert parse_pattern(run).matches(Layer(".".join(components)))


def test_modulation_is_a_kind_of_layer_and_a_component_like_others():
    layers = [
        Layer("blocks.0.norm1.linear", 0, is_modulation=True),
        Layer("blocks.0.mlp", 0),
        Layer("blocks.0.modulation.1", 0),
    ]
    names = ["blocks.0.norm1.linear", "blocks.0.modulation.1"]
    assert names_matched(["modulation"], layers) == names
    with pytest.raises(
        ConfigError, match="none of them is modulation.*the layers are .blocks.0.ml"
    ):
        match_layers(["modulation"], layers[1:2])


@pytest.mark.parametrize("pattern", ["(a+)+$", "^(a|a)*$", "(a|aa)+$", "^(.*)*x", r"^(\w+\w*)+\."])
def test_no_regular_expression_can_hang(pattern):
    # In a process of its own: Python's re holds the interpreter until it is done.
    code = f"""
from octavo.patterns import Layer, parse_pattern
print(parse_pattern({"re:" + pattern!r}).matches(Layer("a" * 199 + "!")))"""
    run = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=10)
    assert done.stdout == "False\n", done.stderr
