"""What vLLM's loader tolerates in scale files is a warning that names it, or an error if strict."""

import json
import re

import pytest

from octavo.calibration.scale_file import (
    LayerScales,
    ScaleFileWarning,
    ScaleHeader,
    ScaleSet,
    load_scales,
    of_component,
    strict_reading,
)
from octavo.errors import CheckpointError

GOOD = {"q": 0.5, "k": 0.25, "v": 2.0}
SCALES = LayerScales(q=0.5, k=0.25, v=2.0)
CASES = {
    "extra keys": (
        {"layers": {"a": GOOD}, "model": "m", "version": 2},
        "ignored keys beside layers: 'model', 'version'",
        "expected nothing beside layers, got 'model', 'version'",
    ),
    "extra keys of a flat file": (
        {"a": GOOD, "model": "m", "layer_types": ["full"]},
        "ignored entries that are no objects: 'model', 'layer_types'",
        "layer 'model': expected an object with q, k and v, got 'm'",
    ),
    "strings": (
        {"a": {"q": "0.5", "k_scale": "2.5e-1", "v": 2}},
        "read strings as numbers in layers: 'a'",
        "layer 'a': expected q to be a positive finite number, 2^-126 to 2^126, got '0.5'",
    ),
    "strings for heads": (
        {"a": {**GOOD, "q": 0.5, "v_heads": ["2", "2.0"], "v": "2"}},
        "read strings as numbers in layers: 'a'",
        "layer 'a': expected v_heads to be a positive finite number, 2^-126 to 2^126, got '2'",
    ),
    "an incomplete entry": (
        {"a": GOOD, "other": {"q": 1.0, "v": 1.0}, "third": {}},
        "ignored incomplete entries of layers: 'other', 'third' (expected k or k_scale, got only "
        "'q', 'v')",
        "layer 'other': expected k or k_scale, got only 'q', 'v'",
    ),
    "unknown keys of a layer": (
        {"a": {**GOOD, "prob_scale": 1.0}},
        "ignored unknown keys of layers: 'a.prob_scale'",
        "layer 'a': expected only k, k_heads, k_mean, k_scale, q, q_heads, q_scale, v, v_heads, "
        "v_scale, got 'prob_scale'",
    ),
}


def write(path, document):
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(("document", "note", "refusal"), CASES.values(), ids=CASES)
def test_a_warning_or_an_error(document, note, refusal, tmp_path):
    path = write(tmp_path / "scales.json", document)
    with pytest.warns(ScaleFileWarning) as caught:
        scales = load_scales(path)
    assert [str(each.message) for each in caught] == [f"'{path}': {note}"]
    assert caught[0].filename == __file__
    assert scales.layer("a").per_tensor() == SCALES and list(scales.layers) == ["a"]
    with pytest.raises(CheckpointError, match=re.escape(f"scales.json': {refusal}") + "$"):
        load_scales(path, strict=True)
    with pytest.warns(ScaleFileWarning, match=re.escape(f"scales: {note}") + "$"):
        assert ScaleSet.from_dict(document) == scales
    with pytest.raises(CheckpointError, match=re.escape(refusal) + "$"):
        ScaleSet.from_dict(document, strict=True)


def test_strings_for_linear_layers():
    with pytest.warns(ScaleFileWarning, match="read strings as numbers in layers: 'up'"):
        assert ScaleSet.from_dict({"up": {"input": "0.5"}}).inputs == {"up": 0.5}


def test_a_layer_of_the_model_with_an_incomplete_entry_is_an_error():
    with pytest.warns(ScaleFileWarning):
        scales = ScaleSet.from_dict({"x.a": GOOD, "x.b": {"q": 1.0}})
    said = "for 'x.b', got an incomplete entry (expected k or k_scale, got only 'q'); the 1 layers"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        scales.require(["x.a", "x.b"])
    with pytest.raises(CheckpointError, match="for 'b', got an incomplete entry"):
        of_component(scales, "x").layer("b")


def test_strings_that_are_no_numbers_and_other_mistakes_are_errors_as_before(recwarn):
    for entry, said in [
        ({**GOOD, "q": "much"}, "expected q to be a positive finite number"),
        ({**GOOD, "q": "nan"}, "expected q to be a positive finite number"),
        ({**GOOD, "q": "-1"}, "expected q to be a positive finite number"),
        ({**GOOD, "q": True}, "expected q to be a positive finite number"),
        ({**GOOD, "q_scale": 0.5}, "expected q or q_scale, got both"),
        ({**GOOD, "input": 1.0}, "expected input alone"),
    ]:
        with pytest.raises(CheckpointError, match=f"layer 'a': {said}"):
            ScaleSet.from_dict({"a": entry})
    with pytest.raises(CheckpointError, match="expected the scales of at least one layer"):
        ScaleSet.from_dict({"a": {"q": 1.0}, "layers of": "nothing"})
    assert not recwarn.list


def test_strict_reading_is_for_all_files_until_it_ends(tmp_path):
    path = write(tmp_path / "scales.json", CASES["strings"][0])
    with pytest.raises(CheckpointError, match="got '0.5'"), strict_reading():
        load_scales(path)
    with pytest.warns(ScaleFileWarning, match="read strings as numbers"):
        load_scales(path)


def test_a_component_without_scales_is_an_error_that_lists_what_there_is():
    scales = ScaleSet({"transformer.a": SCALES}, header=ScaleHeader(kind="pipeline"))
    assert list(of_component(scales, "transformer").layers) == ["a"]
    with pytest.raises(CheckpointError, match=r"named vae\.…, got 'transformer\.a'"):
        of_component(scales, "vae")
