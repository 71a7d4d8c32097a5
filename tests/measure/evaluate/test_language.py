"""Scales for rows: of a file that they can use, or calibrated for every kind of keys."""

import pytest

from octavo import LayerScales, ScaleSet, save_scales
from octavo.errors import ConfigError
from octavo.measure.evaluate import language
from octavo.measure.evaluate.language import (
    PLAIN_KEYS,
    Keys,
    calibrate_rows,
    given_scales,
)
from octavo.measure.evaluate.requests import LanguageRequest

SCALES = ScaleSet({"layers.0": LayerScales(0.5, 0.5, 0.5)})


def test_scales_of_a_file_are_for_the_rows_that_can_use_them(tmp_path):
    path = tmp_path / "scales.json"
    save_scales(path, SCALES)
    both = LanguageRequest(recipe=("tensor", "head"), scales=path)
    assert given_scales(both) == {PLAIN_KEYS: SCALES}
    assert given_scales(LanguageRequest(recipe=("tensor",))) == {}
    with pytest.raises(ConfigError, match="for the row head.rotate, of keys with rotate, got keys"):
        given_scales(LanguageRequest(recipe=("tensor", "head+rotate"), scales=path))


def test_every_kind_of_keys_is_calibrated_once(monkeypatch):
    asked, seen = [], []

    def calibrate(text_model, windows, keys, *, data, margin, on_window):
        asked.append((text_model, windows, keys, data, margin))
        for num_done in range(1, len(windows) * keys.num_passes + 1):
            on_window(num_done)
        return keys

    monkeypatch.setattr(language, "calibration_scales", calibrate)
    centered = Keys(center_keys=True)
    rows = ("tensor", "head+center", "head", "token+center")
    request = LanguageRequest(recipe=rows, margin=2.0)
    found = calibrate_rows(
        request, "model", lambda: ("words", ["a", "b"]), lambda *args: seen.append(args)
    )
    assert calibrate_rows(LanguageRequest(recipe=("token",)), "model", None, None) == {}
    assert found == {PLAIN_KEYS: PLAIN_KEYS, centered: centered}
    assert asked == [("model", ["a", "b"], keys, "words", 2.0) for keys in (PLAIN_KEYS, centered)]
    # Means take a second pass.
    assert seen == [("calibrating", num_done, 6) for num_done in range(1, 7)]
