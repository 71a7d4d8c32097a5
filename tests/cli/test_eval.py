"""octavo eval chartqa: from a reader and questions to a table and records."""

import json
from dataclasses import replace

import pytest

from octavo.cli.main import COMMANDS, make_app, run
from octavo.demo.charts import vocabulary
from octavo.measure import store

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from octavo.calibration.scale_file import save_scales
from octavo.demo.chart_drawing import generated_questions
from octavo.demo.chart_reader import make_chart_reader, save_chart_reader
from octavo.integrations.embedded_models import CHART_READER
from octavo.measure.evaluate import chartqa


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    save_chart_reader(make_chart_reader(vocabulary(), seed=1), folder)
    return str(folder)


def octavo(*args):
    return run(make_app(COMMANDS), ["eval", "chartqa", *map(str, args)])


@pytest.mark.slow
def test_three_rows_with_scales_from_other_charts(capsys, model, tmp_path, monkeypatch):
    monkeypatch.setattr(chartqa, "NUM_CALIBRATION_IMAGES", 2)
    path = tmp_path / "records.jsonl"
    assert octavo(model, "-n", 2, "-o", path, "--batch-size", 2) == 0
    text = capsys.readouterr().out
    records = store.read(path)
    assert [record.case["recipe"] for record in records] == ["bf16", "fp8 dynamic", "fp8 static"]
    assert all(record.case["recipe"] in text for record in records)
    assert "95 % interval" in text and "no difference from bf16" in text and str(path) in text
    command = f"octavo eval chartqa {model} --data generated --num-questions 2 --recipe bf16"
    assert all(record.command.startswith(command) for record in records)


def test_a_scale_file_and_data_of_ones_own(capsys, model, tmp_path):
    from PIL import Image

    Image.new("RGB", (64, 64), "white").save(tmp_path / "one.png")
    row = {"image": "one.png", "query": "How many bars are there?", "label": ["3"]}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    reader = CHART_READER.load(model)
    noisy = generated_questions(1, "noisy")
    save_scales(tmp_path / "s.json", chartqa.calibration_scales(reader, noisy, data="noisy"))
    args = ("--data", tmp_path / "own.jsonl", "--recipe", "static", "--scales", tmp_path / "s.json")
    assert octavo(model, *args) == 0
    assert "fp8 static" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--recipe", "int8"), "row int8: expected words out of bf16,"),
        (("--recipe", "bf16", "--recipe", "bf16"), "expected different rows"),
        (("--recipe", "bf16", "--scales", "s.json"), "--scales is for rows with static scales"),
        (("--data", "questions.csv"), "questions.csv"),
        (("--scales", "nowhere.json"), "nowhere.json"),
        (("-o", "no/such/folder.jsonl"), "existing folder"),
    ],
)
def test_wrong_requests_are_one_sentence(capsys, model, monkeypatch, tmp_path, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.csv").touch()
    assert octavo(model, "-n", 1, *args) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_without_weights_the_way_to_make_them_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(chartqa, "CHART_READER", replace(CHART_READER, folder=tmp_path))
    assert octavo("-n", 1) == 1
    assert "scripts/train_chart_reader.py" in capsys.readouterr().err


def test_help_teaches(capsys):
    assert octavo("--help") == 0
    text = capsys.readouterr().out
    assert "HuggingFaceM4/ChartQA" in text and "bootstrap" in text
