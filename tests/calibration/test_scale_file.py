"""Scale files: what is read, what is refused and why, what is written, and that vLLM takes it."""

import copy
import json
import math
import os
import pickle
from pathlib import Path

import pytest

from octavo.calibration.scale_document import MAX_SCALE, MIN_SCALE
from octavo.calibration.scale_file import (
    FORMAT_VERSION,
    LayerScales,
    ScaleHeader,
    ScaleSet,
    load_scales,
    save_scales,
)
from octavo.errors import CheckpointError, ConfigError
from octavo.recipe import Recipe

NAMES = [f"visual.blocks.{i}.attn.attn" for i in range(27)]
PER_TENSOR = ScaleSet(
    {name: LayerScales(0.1 + i, 0.2 + i, 0.3 + i) for i, name in enumerate(NAMES)}
)
PER_HEAD = ScaleSet(
    {name: LayerScales((0.1, 0.7 + i, 0.2), (0.3,), 1 / 3) for i, name in enumerate(NAMES)},
    ScaleHeader(
        model="Qwen/Qwen3-VL-8B-Instruct",
        data="lmarena-ai/VisionArena-Chat",
        date="2026-08-22T10:00:00+00:00",
        observer="amax",
        passes=100,
        margin=1.5,
    ),
)
ENTRY = {"q": 1.5, "k": 2.5, "v": 3.5}
SCALES = LayerScales(1.5, 2.5, 3.5)


def vllm_scales(path):
    """What vLLM's loader takes from a file, restated from its rules (notes/vllm.md, 1.2)."""
    document = json.loads(Path(path).read_text("utf-8"))
    if isinstance(document.get("layers"), dict):
        document = document["layers"]
    taken = {}
    for name, entry in document.items():
        if not isinstance(entry, dict):
            continue
        scales = {}
        for key in "qkv":
            value = entry[key] if key in entry else entry.get(f"{key}_scale")
            if value is not None:
                scales[key] = float(value)
        if len(scales) < 3:
            continue
        if min(scales.values()) <= 0:
            raise ValueError(f"{name}: {scales}")
        taken[name] = scales
    return taken


def write(path, document):
    text = document if isinstance(document, str) else json.dumps(document)
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "scales.json"


def load_error(path, document):
    """The message of the CheckpointError that this file raises; short, and with the file's name."""
    with pytest.raises(CheckpointError) as caught:
        load_scales(write(path, document), strict=True)
    message = str(caught.value)
    assert path.name in message
    assert len(message) < 3000
    return message


@pytest.mark.parametrize(
    "document",
    [
        {"a.attn": ENTRY},
        {"layers": {"a.attn": ENTRY}},
        {"a.attn": {"q_scale": 1.5, "k_scale": 2.5, "v_scale": 3.5}},
        {"layers": {"a.attn": {"q": 1.5, "k_scale": 2.5, "v": 3.5}}},
        {"octavo": {"format_version": 1}, "layers": {"a.attn": ENTRY}},
        {"octavo": {"format_version": 1}, "a.attn": ENTRY},
        {"a.attn": {"v": 3.5, "k": 2.5, "q": 1.5}},
    ],
    ids=["flat", "nested", "aliases", "mixed", "header", "flat-header", "order"],
)
def test_layouts(document, path):
    loaded = load_scales(write(path, document))
    assert loaded == ScaleSet({"a.attn": SCALES})
    assert vllm_scales(path) == {"a.attn": ENTRY}


def test_a_layer_may_be_called_layers(path):
    scales = ScaleSet({"layers": SCALES, "octavo": SCALES})
    save_scales(path, scales)
    assert load_scales(path) == scales
    assert vllm_scales(path) == {"layers": ENTRY, "octavo": ENTRY}


def test_per_head_lists(path):
    entry = {"q": 2.0, "k": 2.5, "v_scale": 3.5, "q_heads": [1.0, 2.0], "v_heads": [3.5]}
    loaded = load_scales(write(path, {"a": entry}))
    assert loaded.layer("a") == LayerScales((1.0, 2.0), 2.5, (3.5,))


def test_whole_numbers_are_scales(path):
    scales = load_scales(write(path, {"a": {"q": 1, "k": 2, "v": 3}})).layer("a")
    assert (scales.q, scales.k, scales.v) == (1.0, 2.0, 3.0)
    assert all(isinstance(scale, float) for scale in (scales.q, scales.k, scales.v))


@pytest.mark.parametrize("value", [MIN_SCALE, MAX_SCALE, 1.0, 1e-30, 5e37])
def test_the_range_of_float32(value, path):
    assert load_scales(write(path, {"a": {**ENTRY, "q": value}})).layer("a").q == value


@pytest.mark.parametrize("key", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "got 0"),
        ("0.0", "got 0.0"),
        ("-0.0", "got -0.0"),
        ("-1.5", "got -1.5"),
        ("NaN", "got nan"),
        ("Infinity", "got inf"),
        ("-Infinity", "got -inf"),
        ("1e999", "got inf"),
        ("1e39", "got 1e+39"),
        ("1e-39", "got 1e-39"),
        ("1e-400", "got 0.0"),
        ("true", "got True"),
        ("false", "got False"),
        ('"1.5"', "got '1.5'"),
        ('""', "got ''"),
        ("{}", "got {}"),
        ("9" * 400, "got 9999999"),
    ],
    ids=lambda value: value[:12],
)
def test_refused_values(key, text, said, path):
    entry = ", ".join(f'"{k}": {text if k == key else 1.5}' for k in "qkv")
    message = load_error(path, f'{{"good": {json.dumps(ENTRY)}, "blocks.7": {{{entry}}}}}')
    assert "layer 'blocks.7'" in message
    assert f"expected {key} to be a positive finite number, 2^-126 to 2^126" in message
    assert said in message


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "at least one layer, got none"),
        ({"layers": {}}, "at least one layer, got none"),
        ({"octavo": {"format_version": 1}}, "at least one layer, got none"),
        ([], "expected an object of layers, got []"),
        (None, "expected an object of layers, got None"),
        (7, "expected an object of layers, got 7"),
        ("[1.5]", "expected an object of layers, got [1.5]"),
        ({"layers": []}, "expected layers to be an object, got []"),
        ({"layers": None}, "expected layers to be an object, got None"),
        ({"layers": {"a": ENTRY}, "b": ENTRY}, "expected nothing beside layers, got 'b'"),
        ({"layers": {"a": ENTRY}, "version": 1}, "expected nothing beside layers, got 'version'"),
        ({"layers": ENTRY}, "layer 'q': expected an object with q, k and v, got 1.5"),
        ({"a": 1.5}, "layer 'a': expected an object with q, k and v, got 1.5"),
        ({"a": [1, 2, 3]}, "layer 'a': expected an object with q, k and v, got [1, 2, 3]"),
        ({"a": ENTRY, "model": "x"}, "layer 'model': expected an object with q, k and v, got 'x'"),
        ({"a": {}}, "layer 'a': expected q or q_scale, got only nothing"),
        ({"a": {"k": 1, "v": 1}}, "layer 'a': expected q or q_scale, got only 'k', 'v'"),
        ({"a": {"q": 1, "v": 1}}, "layer 'a': expected k or k_scale, got only 'q', 'v'"),
        ({"a": {"q": 1, "k": 1}}, "layer 'a': expected v or v_scale, got only 'q', 'k'"),
        ({"a": {"k": 1, "v": 1, "q_heads": [1]}}, "layer 'a': expected q or q_scale"),
        ({"a": {**ENTRY, "q_scale": 1.5}}, "layer 'a': expected q or q_scale, got both"),
        ({"a": {**ENTRY, "v_scale": 9}}, "layer 'a': expected v or v_scale, got both"),
        ({"a": {**ENTRY, "prob": 1.0}}, "layer 'a': expected only k, k_heads"),
        ({"a": {**ENTRY, "Q": 1.0}}, "got 'Q'"),
        ({"a": {**ENTRY, "q": [1.5]}}, "expected q to be one number, got a list; move it to q_h"),
        ({"a": {**ENTRY, "q_heads": 1.5}}, "layer 'a': expected q_heads to be a list, got 1.5"),
        ({"a": {**ENTRY, "q_heads": None}}, "expected q_heads to be a positive finite"),
        ({"a": {**ENTRY, "q_heads": []}}, "expected a scale for each head in q_heads, got none"),
        ({"a": {**ENTRY, "q_heads": [1.5, 0]}}, "expected q_heads to be a positive finite"),
        ({"a": {**ENTRY, "q_heads": [[1.5]]}}, "expected q_heads to be a positive finite"),
        ({"a": {**ENTRY, "q_heads": [1.5, True]}}, "expected q_heads to be a positive finite"),
        ({"a": {**ENTRY, "q_heads": [1.0, 2.0]}}, "expected q to be the largest of q_heads"),
        ({"a": {**ENTRY, "q": 0, "q_heads": [1.5]}}, "expected q to be a positive finite"),
        ({"a": {**ENTRY, "k_heads": [2.5], "v_heads": [3.5, 1]}}, "as many heads in k as in v"),
        ({"": ENTRY}, "the name of a layer to be a text of 1 to 1000 characters"),
        ({"x" * 1001: ENTRY}, "the name of a layer to be a text of 1 to 1000 characters"),
        ({"octavo": 1, "layers": {"a": ENTRY}}, "expected octavo to be the header"),
        ({"octavo": None, "layers": {"a": ENTRY}}, "expected octavo to be the header"),
        ({"octavo": ENTRY, "layers": {"a": ENTRY}}, "format_version to be a whole number"),
    ],
)
def test_refused_documents(document, said, path):
    assert said in load_error(path, document)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({}, "expected format_version to be a whole number from 1 on, got None"),
        ({"format_version": "1"}, "expected format_version to be a whole number"),
        ({"format_version": True}, "expected format_version to be a whole number"),
        ({"format_version": 1.0}, "expected format_version to be a whole number"),
        ({"format_version": 0}, "expected format_version to be a whole number"),
        ({"format_version": 2}, "expected format_version 1, got 2; upgrade octavo"),
        ({"format_version": 2, "new": 1}, "upgrade octavo"),
        ({"format_version": 10**4000}, "upgrade octavo"),
        (
            {"format_version": 1, "modle": "x"},
            "unknown key 'modle': did you mean 'model'?",
        ),
        ({"format_version": 1, "self": "x"}, "unknown key 'self'"),
        ({"format_version": 1, "__dataclass_self__": "x"}, "unknown key '__dataclass_self__'"),
        ({"format_version": 1, "model": 7}, "model: expected a valid string, got 7"),
        ({"format_version": 1, "model": ""}, "model: expected at least 1 character"),
        (
            {"format_version": 1, "data": "x" * 1001},
            "data: expected at most 1000 characters",
        ),
        ({"format_version": 1, "observer": ["amax"]}, "observer: expected a valid string"),
        ({"format_version": 1, "date": "yesterday"}, "expected a date such as"),
        (
            {"format_version": 1, "passes": 0},
            "passes: expected a number greater than or equal to 1",
        ),
        ({"format_version": 1, "passes": 1.5}, "passes: expected a valid integer"),
        ({"format_version": 1, "margin": 0}, "margin: expected a number greater than"),
        ({"format_version": 1, "margin": math.nan}, "margin: expected a finite"),
    ],
)
def test_refused_headers(header, said, path):
    assert said in load_error(path, {"octavo": header, "layers": {"a": ENTRY}})


def test_a_newer_version_is_said_before_anything_else(path):
    document = {"octavo": {"format_version": FORMAT_VERSION + 1}, "layers": 7, "linears": {}}
    assert "upgrade octavo" in load_error(path, document)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(ENTRY)}}}', "'a' appears twice"),
        (f'{{"layers": {{"a": {json.dumps(ENTRY)}, "a": 1}}}}', "'a' appears twice"),
        ('{"a": {"q": 1, "k": 1, "v": 1, "q": 2}}', "'q' appears twice"),
        ('{"a": {"q": 1, "k": 1, "v": 1, "\\u0071": 2}}', "'q' appears twice"),
    ],
)
def test_duplicate_keys(text, said, path):
    assert said in load_error(path, text)


@pytest.mark.parametrize("scales", [PER_TENSOR, PER_HEAD], ids=["per-tensor", "per-head"])
class TestSaved:
    def test_round_trip(self, scales, path):
        save_scales(path, scales)
        assert load_scales(path) == scales
        assert load_scales(str(path)).header == scales.header

    def test_vllm_takes_every_layer(self, scales, path):
        save_scales(path, scales)
        taken = vllm_scales(path)
        assert list(taken) == NAMES
        for name in NAMES:
            largest = scales.layer(name).per_tensor()
            assert taken[name] == {"q": largest.q, "k": largest.k, "v": largest.v}

    def test_the_same_bytes_whatever_the_order(self, scales, path, tmp_path):
        backwards = ScaleSet(dict(reversed(scales.layers.items())), scales.header)
        save_scales(path, scales)
        save_scales(tmp_path / "again.json", backwards)
        assert path.read_bytes() == (tmp_path / "again.json").read_bytes()
        assert backwards == scales

    def test_one_line_for_each_layer(self, scales, path):
        save_scales(path, scales)
        lines = path.read_text().splitlines(keepends=True)
        assert len(lines) == len(NAMES) + 5
        assert all(line.endswith("\n") for line in lines)

    def test_pickle_and_copy(self, scales):
        assert pickle.loads(pickle.dumps(scales)) == copy.deepcopy(scales) == scales

    def test_dict_round_trip_and_recipe(self, scales):
        assert ScaleSet.from_dict(scales.to_dict()) == scales
        recipe = Recipe(attention={"scaling": "static"}, scales=scales.to_dict()["layers"])
        again = ScaleSet.from_dict(Recipe.from_toml(recipe.to_toml()).scales)
        assert again.layers == scales.layers


def test_the_form_that_is_written(path):
    layers = {"blocks.10": LayerScales((0.5, 0.25), 1.0, 0.1), "blocks.9": SCALES}
    save_scales(path, ScaleSet(layers, ScaleHeader(model="Modèle", margin=1.5, passes=16)))
    assert path.read_text("utf-8") == (
        "{\n"
        '  "octavo": {"format_version": 1, "model": "Modèle", "passes": 16, "margin": 1.5},\n'
        '  "layers": {\n'
        '    "blocks.9": {"q": 1.5, "k": 2.5, "v": 3.5},\n'
        '    "blocks.10": {"q": 0.5, "k": 1.0, "v": 0.1, "q_heads": [0.5, 0.25]}\n'
        "  }\n"
        "}\n"
    )


@pytest.mark.parametrize(
    "value", [0.1, 1 / 3, 5e-324**0.1, 0.1 + 0.2, 2.0**126, 1.1754943508222875e-38]
)
def test_floats_survive_to_the_bit(value, path):
    save_scales(path, ScaleSet({"a": LayerScales(value, (value, 1.0), 1.0)}))
    scales = load_scales(path).layer("a")
    assert scales.q.hex() == scales.k[0].hex() == value.hex()


@pytest.mark.parametrize("scale", [0.5, (0.5, 0.25)], ids=str)
def test_a_layer_without_a_scale_for_q_says_so(scale, path):
    scales = ScaleSet({"a": LayerScales(None, scale, scale)})
    save_scales(path, scales)
    assert json.loads(path.read_text())["layers"]["a"]["q"] is None
    assert load_scales(path) == scales
    assert scales.layer("a").per_tensor() == LayerScales(None, 0.5, 0.5)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"q": 1.5, "k": None, "v": 1.5}, "expected k to be a positive finite number"),
        ({"q": 1.5, "k": 1.5, "v": None}, "expected v to be a positive finite number"),
        ({"q": None, "q_heads": [1.5], "k": 1.5, "v": 1.5}, "expected q to be a positive finite"),
        ({"q": None, "q_scale": 1.5, "k": 1.5, "v": 1.5}, "expected q or q_scale, got both"),
    ],
)
def test_null_stands_only_for_q_alone(entry, said, path):
    assert said in load_error(path, json.dumps({"a": entry}))


@pytest.mark.parametrize(
    "scales",
    [
        {"q": 0.0},
        {"k": -1.0},
        {"v": math.nan},
        {"q": math.inf},
        {"q": True},
        {"q": "1"},
        {"k": None},
        {"v": None},
        {"q": 1e39},
        {"q": ()},
        {"q": (1.0, 0.0)},
        {"q": ((1.0,),)},
        {"k": (1.0, 2.0), "v": (1.0,)},
    ],
    ids=str,
)
def test_invalid_scales_cannot_be_made_and_so_not_written(scales):
    with pytest.raises(ConfigError, match="expected"):
        LayerScales(**{**ENTRY, **scales})


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({}, "at least one layer"),
        ({"": SCALES}, "a text of 1 to 1000"),
        ({7: SCALES}, "without lone surrogates, got 7"),
        ({"\ud800": SCALES}, "lone surrogate"),
    ],
)
def test_invalid_sets_cannot_be_made(layers, said):
    with pytest.raises(ConfigError, match=said):
        ScaleSet(layers)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"date": "22.8.2026"},
        {"passes": 0},
        {"passes": True},
        {"margin": 0.0},
        {"margin": "1.5"},
        {"data": "\udfff"},
    ],
    ids=str,
)
def test_invalid_headers_cannot_be_made(fields):
    with pytest.raises(ConfigError, match="expected"):
        ScaleHeader(**fields)


def test_frozen():
    with pytest.raises(AttributeError):
        PER_TENSOR.header = ScaleHeader()
    with pytest.raises(TypeError):
        PER_TENSOR.layers["a"] = SCALES
    with pytest.raises(AttributeError):
        PER_TENSOR.layer(NAMES[0]).q = 2.0


def test_a_list_of_heads_becomes_a_tuple():
    assert LayerScales([1, 2], 1, 1).q == (1.0, 2.0)


def test_per_tensor_is_the_largest():
    assert LayerScales((1.0, 3.0, 2.0), 4.0, (5.0,)).per_tensor() == LayerScales(3.0, 4.0, 5.0)


def test_layers_are_in_the_order_of_their_numbers():
    names = ["blocks.10.attn", "blocks.9.attn", "blocks.100.attn", "a", "blocks.09.attn"]
    ordered = ["a", "blocks.09.attn", "blocks.9.attn", "blocks.10.attn", "blocks.100.attn"]
    assert list(ScaleSet(dict.fromkeys(names, SCALES)).layers) == ordered


def test_a_missing_layer_is_an_error_with_the_closest_names_first():
    with pytest.raises(CheckpointError) as caught:
        PER_TENSOR.layer("visual.blocks.25.attn")
    message = str(caught.value)
    assert "expected scales for 'visual.blocks.25.attn', got none" in message
    assert "the 27 layers with scales are 'visual.blocks.25.attn.attn'" in message
    assert "and 7 more" in message


def test_require():
    PER_TENSOR.require(NAMES)
    PER_TENSOR.require([])
    with pytest.raises(CheckpointError) as caught:
        PER_TENSOR.require(["a", NAMES[0], "b"])
    assert "expected scales for 'a', 'b', got none" in str(caught.value)


def test_a_missing_layer_is_said_briefly_among_many():
    scales = ScaleSet({f"{i}.{'x' * 900}": SCALES for i in range(5000)})
    with pytest.raises(CheckpointError) as caught:
        scales.require(str(i) + "y" * 10_000 for i in range(5000))
    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(call, path, monkeypatch):
    save_scales(path, PER_TENSOR)

    def fail(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, call, fail)
        save_scales(path, PER_HEAD)
    assert load_scales(path) == PER_TENSOR
    assert os.listdir(path.parent) == [path.name]


def test_the_folder_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="expected an existing folder"):
        save_scales(tmp_path / "none" / "scales.json", PER_TENSOR)


def test_a_file_of_another_kind_is_refused(path):
    layers = {"model.layers.0.self_attn": LayerScales(1.0, 1.0, 1.0)}
    save_scales(path, ScaleSet(layers, ScaleHeader(kind="kv_cache")))
    scales = load_scales(path)
    assert scales.header.kind == "kv_cache"
    scales.require_kind("kv_cache")
    with pytest.raises(CheckpointError, match="scales for vision_attention, got a file for kv_cac"):
        scales.require_kind("vision_attention")
    vision = ScaleSet(layers, ScaleHeader(kind="vision_attention"))
    with pytest.raises(CheckpointError, match="octavo calibrate --kv finds those for kv_cache"):
        vision.require_kind("kv_cache")


def test_files_without_a_kind_serve_both(path):
    """Those of vLLM, and those that were written before there were kinds."""
    save_scales(path, ScaleSet({"a": LayerScales(1.0, 1.0, 1.0)}, ScaleHeader(model="m")))
    assert "kind" not in path.read_text()
    for kind in ("vision_attention", "kv_cache"):
        load_scales(path).require_kind(kind)


@pytest.mark.parametrize("kind", ["weights", "", 1, ["kv_cache"]])
def test_a_kind_that_does_not_exist(kind, path):
    message = "kind: expected 'vision_attention', 'kv_cache', 'linear' or 'pipeline', got"
    with pytest.raises(ConfigError, match=message):
        ScaleHeader(kind=kind)
    header = {"format_version": 1, "kind": kind}
    assert message in load_error(path, {"octavo": header, "layers": {"a": ENTRY}})


INPUTS = {"mlp.10.up": 0.25, "mlp.2.up": 1 / 3}


def test_input_scales_of_linear_layers(path):
    scales = ScaleSet({}, ScaleHeader(kind="linear"), INPUTS)
    save_scales(path, scales)
    assert (
        load_scales(path) == scales == ScaleSet({}, scales.header, dict(reversed(INPUTS.items())))
    )
    assert list(load_scales(path).inputs) == ["mlp.2.up", "mlp.10.up"]
    assert json.loads(path.read_text())["layers"]["mlp.10.up"] == {"input": 0.25}
    assert pickle.loads(pickle.dumps(scales)) == copy.deepcopy(scales) == scales
    assert vllm_scales(path) == {}
    scales.require_kind("linear")
    with pytest.raises(CheckpointError, match="for kv_cache, got a file for linear"):
        scales.require_kind("kv_cache")
    with pytest.raises(CheckpointError, match="for linear, got a file for kv_cache: octavo.calib"):
        ScaleSet({"a": SCALES}, ScaleHeader(kind="kv_cache")).require_kind("linear")


def test_input_scales_beside_those_of_attention(path):
    scales = ScaleSet({"attn": SCALES}, inputs=INPUTS)
    save_scales(path, scales)
    assert load_scales(path) == scales
    assert vllm_scales(path).keys() == {"attn"}
    assert load_scales(path) != ScaleSet({"attn": SCALES})
    scales.require(["attn"])
    scales.require_inputs(INPUTS)
    for require in (scales.require, scales.require_inputs):
        with pytest.raises(CheckpointError, match="for 'none', got none; the [12] layers with"):
            require(["none"])
    with pytest.raises(CheckpointError, match="expected input scales for 'attn', got none"):
        scales.require_inputs(["attn"])
    recipe = Recipe(linear={"scaling": "static"}, scales=scales.to_dict())
    assert ScaleSet.from_dict(Recipe.from_toml(recipe.to_toml()).scales) == scales


def test_another_word_for_an_input_scale(path):
    path.write_text('{"mlp.up": {"input_scale": 0.5}}')
    assert load_scales(path).inputs == {"mlp.up": 0.5}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"input": 0.0}, "layer 'a': expected input to be a positive finite number"),
        ({"input": -1}, "layer 'a': expected input to be a positive finite number"),
        ({"input": None}, "layer 'a': expected input to be a positive finite number"),
        ({"input": True}, "layer 'a': expected input to be a positive finite number"),
        ({"input": [1.0]}, "layer 'a': expected input to be a positive finite number"),
        ({"input": "1"}, "layer 'a': expected input to be a positive finite number"),
        ({"input": 1.0, "input_scale": 1.0}, "layer 'a': expected input alone, got 'input'"),
        ({**ENTRY, "input": 1.0}, "layer 'a': expected input alone, got 'q'"),
    ],
)
def test_input_scales_that_are_refused(entry, said, path):
    assert said in load_error(path, {"a": entry})


def test_a_layer_is_attention_or_linear():
    with pytest.raises(ConfigError, match="attention or of an input, got both: a"):
        ScaleSet({"a": SCALES}, inputs={"a": 1.0})
    with pytest.raises(ConfigError, match="input scale of a to be a positive finite number"):
        ScaleSet({}, inputs={"a": math.nan})
    with pytest.raises(ConfigError, match="at least one layer"):
        ScaleSet({}, inputs={})


MEANS = LayerScales(0.1, (0.2, 0.3), 0.4, k_mean=((1.5, -2e-7, 0.0), (-300.25, 1 / 3, 4)))


def test_means_and_rotation_survive(path):
    scales = ScaleSet({"a": MEANS, "b": SCALES}, ScaleHeader(kind="kv_cache", rotate_keys=True))
    save_scales(path, scales)
    assert load_scales(path) == scales and pickle.loads(pickle.dumps(scales)) == scales
    document = json.loads(path.read_text())
    assert document["octavo"]["rotate_keys"] is True and "k_mean" not in document["layers"]["b"]
    assert MEANS.per_tensor() == LayerScales(0.1, 0.3, 0.4, k_mean=MEANS.k_mean)
    settings = {"scaling": "static", "rotate_keys": True, "center_keys": True}
    recipe = Recipe(kv_cache=settings, scales=scales.to_dict())
    assert ScaleSet.from_dict(Recipe.from_toml(recipe.to_toml()).scales) == scales


def test_plain_keys_are_not_mentioned(path):
    save_scales(path, PER_HEAD)
    assert "rotate" not in path.read_text() and "mean" not in path.read_text()
    PER_HEAD.require_plain_keys("vLLM")


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (ScaleSet({"a": MEANS}), "for vLLM, got those of keys that were centered"),
        (ScaleSet({"a": SCALES}, ScaleHeader(rotate_keys=True)), "that were rotated, which"),
        (ScaleSet({"a": MEANS}, ScaleHeader(rotate_keys=True)), "were rotated and centered"),
    ],
)
def test_other_keys_than_plain_ones(scales, said):
    with pytest.raises(CheckpointError, match=said):
        scales.require_plain_keys("vLLM")


@pytest.mark.parametrize(
    ("mean", "said"),
    [
        ("null", "got null"),
        ("1.0", "head_dim numbers for each head"),
        ("[]", "head_dim numbers for each head"),
        ("[[], []]", "head_dim numbers for each head"),
        ("[1.0, 2.0]", "head_dim numbers for each head"),
        ("[[1.0, 2.0], [1.0]]", "all of one length"),
        ("[[1.0], [NaN]]", "finite numbers up to 2\\^127, got nan"),
        ("[[1.0], [1e39]]", "finite numbers"),
        ("[[1.0], [true]]", "finite numbers up to 2\\^127, got True"),
        ('[[1.0], ["1"]]', "finite numbers"),
        ("[[1.0], [2.0], [3.0]]", "as many heads in k_mean as in k, got 3, 2"),
    ],
)
def test_refused_means(mean, said, path):
    entry = f'{{"q": 1.0, "k": 2.0, "v": 1.0, "k_heads": [2.0, 1.0], "k_mean": {mean}}}'
    path.write_text(f'{{"a": {entry}}}')
    with pytest.raises(CheckpointError, match=f"layer 'a': .*{said}"):
        load_scales(path)


@pytest.mark.parametrize("value", ['"yes"', "1", "null"])
def test_rotate_keys_is_true_or_false(value, path):
    path.write_text(
        '{"octavo": {"format_version": 1, "rotate_keys": ' + value + '}, "layers": '
        '{"a": {"q": 1, "k": 1, "v": 1}}}'
    )
    with pytest.raises(CheckpointError, match="rotate_keys: expected a valid boolean"):
        load_scales(path)


def test_means_of_a_large_model_fit(path):
    # 126 layers with 16 KV heads of 128, twice those of the largest Llama.
    row = tuple((n - 64) / 7 for n in range(128))
    scales = LayerScales((0.1,) * 128, (0.1,) * 16, (0.1,) * 16, k_mean=(row,) * 16)
    save_scales(path, ScaleSet({f"layers.{n}": scales for n in range(126)}))
    assert len(load_scales(path).layers) == 126
