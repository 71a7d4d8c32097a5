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
    assert batch.ids.shape == batch.labels.shape == (2, 3, batch.ids.shape[2])
    is_label = batch.labels != script.IGNORED
    assert (batch.labels[is_label] == batch.ids[is_label]).all() and is_label.any(-1).all()
    ends = batch.labels == script.SPECIAL.index(script.END)
    assert (ends[0].sum(-1) == script.QUESTIONS + 1).all()
    assert (ends[1].sum(-1) > script.QUESTIONS + 2).all()
    image = script.SPECIAL.index("<image>")
    num_tokens = batch.images.shape[1] * batch.images.shape[2] // 32**2
    assert ((batch.ids == image).sum(-1) == num_tokens).all()
    assert (batch.ids[0] != batch.ids[1]).any()  # the second reading asks other questions
    again = script.make_batch(0, settings)
    assert all((getattr(again, x) == getattr(batch, x)).all() for x in ("images", "ids", "labels"))
    other = script.make_batch(1, settings)
    assert other.ids.shape != batch.ids.shape or (other.ids != batch.ids).any()


def test_many_batches_fit_their_length(script):
    settings = script.parse(["--batch", "40", "--reuse", "1"])
    assert {script.make_batch(seed, settings).ids.shape[2] - 2 for seed in range(4)} <= {
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
