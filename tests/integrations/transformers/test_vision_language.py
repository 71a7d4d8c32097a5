"""Vision-language models for benchmarks: by folder, by name, or the one that is shipped."""

from types import SimpleNamespace

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.integrations.transformers.vision_language import open_vision_language

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")


def fake_loading(monkeypatch, missing=()):
    """Lets transformers load a stand-in of every name; returns the names that it was asked for."""
    asked = []

    def load_processor(name, *, trust_remote_code):
        assert trust_remote_code is False
        asked.append(("processor", str(name)))
        return SimpleNamespace()

    def load_model(name, *, dtype, output_loading_info, trust_remote_code):
        assert trust_remote_code is False
        asked.append(("model", str(name)))
        return torch.nn.Linear(2, 2), {"missing_keys": list(missing), "unexpected_keys": []}

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", load_processor)
    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", load_model)
    return asked


def test_a_name_on_the_hub_is_loaded_by_transformers(monkeypatch):
    asked, name = fake_loading(monkeypatch), "Qwen/Qwen3-VL-8B-Instruct"
    opened = open_vision_language(name, CPU)
    assert asked == [("processor", name), ("model", name)]
    assert opened.name == name and not opened.model.training


def test_a_folder_is_called_by_its_own_name(monkeypatch, tmp_path):
    asked = fake_loading(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    assert open_vision_language(str(tmp_path), CPU).name == tmp_path.name
    assert asked == [("processor", str(tmp_path)), ("model", str(tmp_path))]


def test_what_cannot_be_loaded_is_named(monkeypatch, tmp_path):
    with pytest.raises(CheckpointError, match="expected a model's folder with a config.json"):
        open_vision_language(str(tmp_path), CPU)
    fake_loading(monkeypatch, missing=["model.visual.blocks.0.attn.qkv.weight"])
    with pytest.raises(CheckpointError, match=r"some/name: .* none for .*qkv\.weight"):
        open_vision_language("some/name", CPU)

    def fail(name, **options):
        raise OSError("no such model")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", fail)
    with pytest.raises(
        CheckpointError, match="some/name: expected an image-text model .*no such model"
    ):
        open_vision_language("some/name", CPU)
