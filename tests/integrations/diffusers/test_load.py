"""Loading pipelines: which kind of folder is what, and what is said of those that are none."""

import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from safetensors.torch import load_file, save_file

from octavo.demo.small_image import (
    SmallImagePipeline,
    make_small_image_model,
    save_small_image_model,
)
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.diffusers import load
from octavo.integrations.diffusers.load import load_pipeline
from octavo.integrations.embedded_models import SMALL_IMAGE_MODEL
from octavo_testkit.models.tiny_pipelines import run_pipeline

TINY = {
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a small image model with random weights."""
    folder = tmp_path_factory.mktemp("small")
    save_small_image_model(make_small_image_model(["cat"], **TINY), folder)
    return folder


def test_a_folder_of_diffusers(folder_of):
    pipe = load_pipeline(folder_of("flux"), device="cpu")
    assert type(pipe).__name__ == "FluxPipeline"
    assert pipe.transformer.dtype is torch.bfloat16
    assert pipe._progress_bar_config == {"disable": True}
    assert run_pipeline(pipe, "flux").isfinite().all()
    assert load_pipeline(folder_of("flux"), torch.float32).transformer.dtype is torch.float32


def test_a_folder_of_a_small_image_model(small):
    pipe = load_pipeline(small, torch.float32)
    assert isinstance(pipe, SmallImagePipeline)
    assert pipe.transformer.dtype is torch.float32
    assert len(pipe("cat", num_inference_steps=1).images) == 1


@pytest.mark.parametrize("model", [None, "small-image"])
def test_the_model_that_comes_with_octavo(monkeypatch, small, model):
    monkeypatch.setattr(load, "SMALL_IMAGE_MODEL", replace(SMALL_IMAGE_MODEL, folder=small))
    pipe = load_pipeline(model)
    assert isinstance(pipe, SmallImagePipeline) and pipe.transformer.dtype == torch.bfloat16
    assert pipe.words.config.words == ["cat"]


def test_what_is_no_pipeline_is_said(tmp_path, small):
    with pytest.raises(ConfigError, match="got './gone', which is not there"):
        load_pipeline("./gone")
    with pytest.raises(ConfigError, match="hub name such as owner/name"):
        load_pipeline("smal-image")
    (tmp_path / "note.txt").touch()
    with pytest.raises(CheckpointError, match=r"expected model_index.json.*got 'note.txt'"):
        load_pipeline(tmp_path)
    with pytest.raises(CheckpointError, match="got the file"):
        load_pipeline(tmp_path / "note.txt")
    with pytest.raises(UnsupportedError, match="expected a device that is here"):
        load_pipeline(small, device="tpu")
    with pytest.raises(CheckpointError, match="no/such: expected a pipeline of diffusers"):
        load_pipeline("no/such")


def test_unknown_classes_and_missing_weights_raise(tmp_path, folder_of):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model_index.json").write_text('{"_class_name": "NoSuchPipeline"}')
    with pytest.raises(CheckpointError, match="got AttributeError.*NoSuchPipeline"):
        load_pipeline(tmp_path / "index")
    folder = shutil.copytree(folder_of("flux"), tmp_path / "flux")
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    del weights["x_embedder.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"transformer: .* got none for 'x_embedder.weight'"):
        load_pipeline(folder)


def test_fp8_weights_without_their_scales_raise(tmp_path, folder_of):
    folder = shutil.copytree(folder_of("flux"), tmp_path / "flux")
    part = folder / "text_encoder"
    path = next(part.glob("*.safetensors"))
    weights = load_file(path)
    name = next(n for n in weights if n.endswith("fc1.weight"))
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"text_encoder: .*fc1: .*no config says"):
        load_pipeline(folder)
    (part / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(CheckpointError, match=r"text_encoder: .*fc1: expected weight_scale"):
        load_pipeline(folder)
