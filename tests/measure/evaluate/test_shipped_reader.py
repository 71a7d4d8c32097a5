"""The chart reader that comes with octavo: as good as its record says, and the default model."""

import math

import pytest
import torch

from octavo.measure import store
from octavo.measure.evaluate.chartqa import chart_rows, evaluate, load_reader

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from octavo.demo.chart_drawing import generated_questions
from octavo.demo.chart_reader import FOLDER, WEIGHTS
from octavo.integrations.embedded_models import CHART_READER
from octavo.integrations.transformers.calibrate import load_image_model
from octavo.integrations.transformers.vision_language import open_vision_language

pytestmark = pytest.mark.skipif(
    not CHART_READER.is_installed, reason="the chart reader's weights are not in this checkout"
)

# What the shipped weights must at least have reached when they were trained.
FLOOR_PERCENT = 90.0
NUM_QUESTIONS = 64
ACCURACY = "relaxed_accuracy_percent"


@pytest.fixture(scope="module")
def record():
    (found,) = [r for r in store.read(FOLDER / "record.jsonl") if r.case["recipe"] == "bf16"]
    return found


def test_the_record_is_good_enough(record):
    assert record.op == "chartqa" and record.case["data"] == "generated"
    assert record.case["num_questions"] >= 500 and record.values[ACCURACY] >= FLOOR_PERCENT
    assert (FOLDER / WEIGHTS).stat().st_size == record.values["weights_bytes"] <= 10_000_000


@pytest.mark.slow
def test_the_weights_are_those_of_the_record(record):
    """The first of the record's questions are answered as well, within their sampling error."""
    questions = generated_questions(NUM_QUESTIONS)
    rows = chart_rows(["bf16"], None)
    (again,) = evaluate(load_reader(None, "cpu"), questions, rows, data="generated", command="x")
    share = record.values[ACCURACY] / 100
    error = 100 * math.sqrt(share * (1 - share) / NUM_QUESTIONS)
    assert abs(again.values[ACCURACY] - record.values[ACCURACY]) <= 3.5 * error + 2


def test_it_is_the_default_model():
    assert load_reader(None, "cpu").name == "chart reader"
    assert open_vision_language(None, torch.device("cpu")).name == "chart reader"
    image_model = load_image_model(None, device="cpu")
    assert image_model.name == "chart reader"
    assert next(image_model.model.parameters()).dtype == torch.bfloat16
