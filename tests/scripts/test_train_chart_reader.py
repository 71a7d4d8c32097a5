"""The chart reader's training: what workers make, and a run that goes on where it stopped."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.measure import store

pytest.importorskip("transformers")
pytest.importorskip("PIL")

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_chart_reader.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_chart_reader", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_batch_has_answers_as_labels_and_nothing_else(script):
    settings = script.parse(["--batch", "3", "--reuse", "2"])
    batch = script.make_batch(0, settings)
    assert batch.images.shape[0] == 3 and batch.images.dtype == np.uint8
    assert batch.texts.shape == (2, 3, 3, batch.texts.shape[3])
    ids, labels, segments = batch.texts.swapaxes(0, 1)
    is_label = labels != script.IGNORED
    assert (labels[is_label] == ids[is_label]).all() and is_label.any(-1).all()
    ends = labels == script.SPECIAL.index(script.END)
    assert (ends[0].sum(-1) == script.QUESTIONS + 1).all()
    assert (ends[1].sum(-1) > script.QUESTIONS + 2).all()
    assert (segments[is_label] > 0).all() and (np.diff(segments) >= 0).all()
    image = script.SPECIAL.index("<image>")
    num_tokens = batch.images.shape[1] * batch.images.shape[2] // 32**2
    assert ((ids == image).sum(-1) == num_tokens).all()
    assert (ids[0] != ids[1]).any()  # the second reading asks other questions
    again = script.make_batch(0, settings)
    assert all((getattr(again, x) == getattr(batch, x)).all() for x in vars(batch))
    other = script.make_batch(1, settings)
    assert other.texts.shape != batch.texts.shape or (other.texts != batch.texts).any()


def test_facts_stand_where_they_are_written(script):
    chart = script.make_chart(5, kinds=("grouped",))
    image, written = script.draw_with_places(chart)
    assert {place.kind for place in written} == {"label", "series", "value"}
    assert all(0 <= place.x < image.width and 0 <= place.y < image.height for place in written)
    places = script._places(chart, written)
    assert (places[len(written) :, 1:] == script.IGNORED).all()
    first = next(i for i, place in enumerate(written) if place.kind == "label")
    token, label, series, color, *digits = places[first].tolist()
    reader = script._reader_of_texts()
    assert token == int(written[first].y) // 32 * (image.width // 32) + int(written[first].x) // 32
    assert reader.decode([label]) == chart.labels[written[first].label]
    assert series == color == script.IGNORED  # both series have this label
    values = [row[written[first].label] for row in chart.values]
    encoded = [reader.encode(str(value)) for value in values]
    end = script.SPECIAL.index(script.END)
    assert digits == [x for one in encoded for x in ([end, *one] if len(one) == 1 else one)]
    value = next(place for place in written if place.kind == "value")
    facts = script._facts(chart, value)
    assert facts["series"] == chart.series[value.series]
    assert facts["color"] == chart.colors[value.series]


def test_no_chart_has_more_places_than_there_is_room_for(script):
    for seed in range(200):
        _, written = script.draw_with_places(script.make_chart(seed))
        assert 0 < len(written) <= script.MAX_PLACES


def test_many_batches_fit_their_length(script):
    settings = script.parse(["--batch", "40", "--reuse", "1"])
    assert {script.make_batch(seed, settings).texts.shape[3] - 2 for seed in range(4)} <= {
        script.TEXT_TOKENS + 56,
        script.TEXT_TOKENS + 54,
        script.TEXT_TOKENS + 63,
    }
    with pytest.raises(ConfigError, match=f"at most {script.TEXT_TOKENS} tokens"):
        script._conversation([("Apple " * 200, "Yes")], 4)


def test_training_charts_are_not_the_held_out_ones(script):
    assert script.FIRST_SEED > 10**8


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path):
    command = [sys.executable, SCRIPT, "--device", "cpu", "--batch", "2", "--workers", "1"]
    command += ["--state", tmp_path / "state", "--output", tmp_path / "reader"]
    command += ["--eval-questions", "4", "--final-questions", "4", "--steps"]
    for steps in ("2", "3"):
        subprocess.run([*command, steps], check=True, timeout=300, capture_output=True)
    progress = store.read(tmp_path / "state" / "progress.jsonl")
    assert [record.case["step"] for record in progress] == [2, 3]
    records = store.read(tmp_path / "reader" / "record.jsonl")
    assert all(record.values["weights_bytes"] < 10_000_000 for record in records)
