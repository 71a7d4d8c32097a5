"""Models that come with octavo: which names and folders are theirs, and who loads them."""

import pytest

from octavo.integrations.embedded_models import (
    CHART_READER,
    RETRIEVAL_MODEL,
    SMALL_IMAGE_MODEL,
)


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
    stand_in = lambda folder, dtype: asked.append(folder)  # noqa: E731
    monkeypatch.setattr(CHART_READER.load_module(), CHART_READER.loader, stand_in)
    for name in (None, "chart-reader", tmp_path, str(tmp_path)):
        CHART_READER.load(name)
    assert asked == [CHART_READER.folder] * 2 + [tmp_path] * 2


def test_the_retrieval_model_is_made_without_files():
    pytest.importorskip("transformers")
    assert RETRIEVAL_MODEL.load_module().make_retrieval_model().name_or_path == RETRIEVAL_MODEL.name
