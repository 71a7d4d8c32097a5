"""Models that come with octavo: which names and folders are theirs, and who loads them."""

from importlib import import_module

import pytest

from octavo.integrations.embedded_models import CHART_READER, SMALL_IMAGE_MODEL


@pytest.mark.parametrize("model", [CHART_READER, SMALL_IMAGE_MODEL], ids=lambda model: model.name)
def test_names_and_folders_of_a_kind(model, tmp_path):
    assert model.is_installed and model.matches(model.folder)
    assert model.matches(model.name) and not model.matches(f"./{model.name}")
    assert not model.matches(tmp_path)
    (tmp_path / model.mark).touch()
    assert model.matches(tmp_path) and model.matches(str(tmp_path))


def test_a_name_or_none_is_the_one_that_comes_with_octavo(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    asked = []
    module, _, function = CHART_READER.loader.partition(":")
    stand_in = lambda folder, dtype: asked.append(folder)  # noqa: E731
    monkeypatch.setattr(import_module(module), function, stand_in)
    for name in (None, "chart-reader", tmp_path, str(tmp_path)):
        CHART_READER.load(name)
    assert asked == [CHART_READER.folder] * 2 + [tmp_path] * 2
