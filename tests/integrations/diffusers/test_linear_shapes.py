"""Sizes of linear layers, from configs without weights."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
from diffusers import FluxTransformer2DModel

from octavo.errors import CheckpointError
from octavo.integrations.diffusers.full_size import read_linear_shapes

FLUX = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "pooled_projection_dim": 48,
    "axes_dims_rope": [4, 4, 8],
}


@pytest.fixture
def config(tmp_path):
    """The config that diffusers itself writes."""
    with torch.device("meta"):
        FluxTransformer2DModel(**FLUX).save_config(tmp_path)
    return tmp_path


def test_only_what_fp8_reaches_counts_and_every_size_once(config):
    # Hidden 32: attention, MLP, and out of a single block; not x_embedder (16) nor modulation.
    expected = {(32, 32), (32, 128), (128, 32), (160, 32)}
    assert set(read_linear_shapes(config)) == expected
    assert read_linear_shapes(config / "config.json") == read_linear_shapes(config)
    assert len(read_linear_shapes(config)) == len(expected)


def test_all_transformers_of_a_pipeline_count(config, tmp_path):
    pipe = tmp_path / "pipe"
    for name, heads in (("transformer", 2), ("transformer_2", 4), ("vae", 8)):
        (pipe / name).mkdir(parents=True)
        own = json.loads((config / "config.json").read_text())
        own["num_attention_heads"] = heads
        (pipe / name / "config.json").write_text(json.dumps(own))
    (pipe / "model_index.json").write_text("{}")
    found = set(read_linear_shapes(pipe))
    assert (32, 32) in found and (64, 64) in found and (128, 128) not in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "expected the _class_name of a model of diffusers, got None"),
        ('{"_class_name": "FluxPipeline"}', "got 'FluxPipeline'"),
        ('{"_class_name": "NoSuchModel"}', "got 'NoSuchModel'"),
        ("[]", "expected an object"),
        ("{", "config.json: expected JSON in UTF-8"),
    ],
)
def test_other_configs_raise(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_linear_shapes(tmp_path)


def test_a_pipeline_without_a_transformer_raises(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected a pipeline with a transformer"):
        read_linear_shapes(tmp_path)
