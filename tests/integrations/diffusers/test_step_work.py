"""What a step computes: the same from one block of each kind and from all, and from a folder."""

import json
import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

import diffusers

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.diffusers.full_size import named_step, step_of_folder
from octavo.measure.advise.advise import advise
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.shape import ModelShape, Workload
from octavo.patterns import Layer, match_layers

pytestmark = pytest.mark.slow


def test_flux_is_what_its_sizes_say():
    work = named_step("flux.1-dev")
    assert len(work.attention) == 19 + 38
    assert {(c.num_heads, c.head_dim, c.num_queries) for c in work.attention} == {(24, 128, 4608)}
    # For each token a block of either kind has 12 · 3072² weights that are reached.
    reached = sum(one.flops for one in work.linear if one.is_reached)
    assert reached == (19 + 38) * 2 * 4608 * 12 * 3072**2
    assert work.weight_bytes == pytest.approx(23.8e9, rel=0.01)
    assert "norm1.linear" in " ".join(work.kept)


@pytest.mark.parametrize("name", ["flux.1-dev", "qwen-image"])
def test_advice_names_what_modulation_takes(name):
    """And names its layers by patterns that match all of them, and nothing else."""
    work = named_step(name)
    advice = advise(ModelShape(name, step=work), find_gpu("h200"), Workload())
    text = next(text for text in advice.warnings if text.startswith("Modulation"))
    patterns = re.findall(r'"([^"]+)"', text)
    layers = [Layer(one.name) for one in work.linear]
    matched = {layer.name for layer in match_layers(patterns, layers)}
    assert matched == {n for n, why in work.kept.items() if why.startswith("modulation")}


def test_numbers_of_blocks():
    both, one = named_step("flux.1-dev", (2, 3)), named_step("flux.1-dev", (2,))
    assert (len(both.attention), len(one.attention)) == (5, 4)
    with pytest.raises(ConfigError, match="num_layers, num_single_layers, got"):
        named_step("flux.1-dev", (1, 2, 3))


def test_a_folder_is_what_a_name_is(tmp_path):
    kind = diffusers.WanTransformer3DModel
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2, "ffn_dim": 128}
    kind(**sizes, text_dim=64).save_config(tmp_path)
    work = step_of_folder(tmp_path)
    assert len(work.attention) == 4  # of the video itself, and to the words
    assert {call.num_keys for call in work.attention} == {75600, 512}


def test_what_is_not_known_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        step_of_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "SD3Transformer2DModel"}))
    with pytest.raises(UnsupportedError, match="one of FluxTransformer2DModel.*got SD3"):
        step_of_folder(tmp_path)
