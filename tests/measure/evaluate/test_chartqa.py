"""The evaluation: rows of one reader beside each other, and scales from other charts."""

import pytest
import torch

from octavo import LayerScales, Recipe, ScaleSet
from octavo.demo.charts import vocabulary
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.apply import apply_, restore_
from octavo.layers.encoder_attention import EncoderAttention
from octavo.measure.evaluate import language
from octavo.measure.evaluate.chartqa import (
    calibration_scales,
    chart_rows,
    chartqa_table,
    evaluate,
    load_reader,
)
from octavo.measure.evaluate.image_requests import ChartRequest
from octavo.measure.evaluate.question_files import ChartQuestion
from octavo.measure.report.tables import format_column
from octavo.measure.rows import Row

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from PIL import Image

from octavo.demo.chart_drawing import generated_questions
from octavo.demo.chart_reader import make_chart_reader, save_chart_reader

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time


@pytest.fixture(scope="module")
def reader():
    return make_chart_reader(vocabulary(), seed=1)


def noisy(num_images):
    return generated_questions(4 * num_images, "noisy")[::4]


class Scripted:
    """A reader whose answers are the question's own text, or wrong once FP8 is on."""

    name = "scripted"

    def __init__(self, num_wrong):
        self.model, self.num_wrong, self.is_fp8 = torch.nn.Linear(1, 1), num_wrong, False

    def answer(self, images, questions):
        return [
            "wrong" if self.is_fp8 and int(text) < self.num_wrong else text for text in questions
        ]


def scripted_rows(monkeypatch, num_wrong, right=str):
    reader = Scripted(num_wrong)
    monkeypatch.setattr(language, "apply_", lambda model, recipe: setattr(reader, "is_fp8", True))
    monkeypatch.setattr(language, "restore_", lambda model: setattr(reader, "is_fp8", False))
    image = Image.new("RGB", (1, 1))
    questions = [ChartQuestion(image, str(i), (right(i),)) for i in range(400)]
    rows = [Row.of("bf16", None), Row.of("fp8", Recipe(vision_attention="fp8"))]
    steps = []
    records = evaluate(
        reader, questions, rows, data="d", command="c", batch_size=150, on_step=steps.append
    )
    assert steps == [150, 150, 100] * 2 and not reader.is_fp8
    return records


def test_a_planted_loss_is_measured_and_called_a_difference(monkeypatch):
    first, second = scripted_rows(monkeypatch, 20)
    assert first.values["relaxed_accuracy_percent"] == 100 and first.baseline is None
    values = second.values
    assert (values["relaxed_accuracy_percent"], values["recovery_percent"]) == (95, 95)
    assert values["difference_points"] == -5 and values["difference_high_points"] < 0
    assert values["is_different"] == 1 and second.baseline == "bf16"
    table = chartqa_table([first, second])
    assert [row[-1] for row in table.rows] == [None, "differs"]
    assert "400 questions of d" in table.caption


def test_equal_rows_are_called_equal(monkeypatch):
    first, second = scripted_rows(monkeypatch, 0)
    assert second.values["recovery_percent"] == 100 and second.values["is_different"] == 0
    assert chartqa_table([first, second]).rows[1][-1] == "no difference from bf16"


def test_nothing_is_recovered_of_nothing(monkeypatch):
    first, second = scripted_rows(monkeypatch, 20, right=lambda i: "another")
    assert first.values["relaxed_accuracy_percent"] == 0
    assert "recovery_percent" not in second.values
    row = dict(zip((table := chartqa_table([first, second])).header, table.rows[1], strict=True))
    assert row["recovery (%)"] is None and row["difference (points)"] == 0
    assert "NaN" not in str([format_column(column) for column in zip(*table.rows, strict=True)])


def test_evaluate_with_random_weights(reader):
    questions = generated_questions(4)
    scales = calibration_scales(reader, noisy(3), data="noisy", batch_size=2)
    rows = chart_rows(["bf16", "dynamic", "static"], scales)
    before = {name: tensor.clone() for name, tensor in reader.model.state_dict().items()}
    records = evaluate(reader, questions, rows, data="generated", command="test", batch_size=3)
    assert [r.case["recipe"] for r in records] == ["bf16", "fp8 dynamic", "fp8 static"]
    assert all(r.op == "chartqa" and r.case["num_questions"] == 4 for r in records)
    assert all(0 <= r.values["relaxed_accuracy_percent"] <= 100 for r in records)
    after = reader.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert chartqa_table(records).texts()[1][0] == "fp8 dynamic"


def test_calibration_keeps_the_largest_of_all_batches(reader):
    scales = calibration_scales(reader, noisy(2), data="noisy", margin=1.0, batch_size=1)
    assert list(scales.layers) == [f"visual.blocks.{i}.attn.attn" for i in range(6)]
    questions = [generated_questions(8, "noisy")[index : index + 1] for index in (0, 4)]
    singles = [calibration_scales(reader, one, data="noisy", margin=1.0) for one in questions]
    dynamic = [calibrate_on(reader, one) for one in questions]
    for name, layer in scales.layers.items():
        for key in ("q", "k", "v"):
            assert getattr(layer, key) == max(getattr(one.layer(name), key) for one in singles)
            # Dynamic scales are found in a tower whose layers see what FP8 left of those before.
            expected = max(float(getattr(one[name], key)) for one in dynamic)
            is_first = name == "visual.blocks.0.attn.attn"
            rel = 1e-3 if is_first else 0.1
            assert getattr(layer, key) == pytest.approx(expected, rel=rel)
    wider = calibration_scales(reader, noisy(2), data="noisy", batch_size=1)
    first = "visual.blocks.0.attn.attn"
    assert wider.layer(first).q == pytest.approx(1.5 * scales.layer(first).q)
    assert not any(isinstance(m, EncoderAttention) for m in reader.model.modules())


def calibrate_on(reader, questions):
    """Scales of each layer after one pass, by hand."""
    apply_(reader.model, Recipe(vision_attention="fp8"))
    try:
        reader.answer([q.image for q in questions], [q.text for q in questions])
        layers = [m for m in reader.model.modules() if isinstance(m, EncoderAttention)]
        return {
            f"visual.blocks.{index}.attn.attn": layer.scaling.scales()
            for index, layer in enumerate(layers)
        }
    finally:
        restore_(reader.model)


def test_the_model_is_restored_after_an_error(reader):
    broken = [ChartQuestion(Image.new("RGB", (0, 0)), "How many bars are there?", ("3",))]
    with pytest.raises(ConfigError, match="0 × 0"):
        evaluate(reader, broken, chart_rows(["dynamic"], None), data="d", command="c")
    assert not any(isinstance(m, EncoderAttention) for m in reader.model.modules())


def test_rows_that_cannot_be():
    scales = ScaleSet({"visual.blocks.0.attn.attn": LayerScales(0.1, 0.1, 0.1)})
    assert chart_rows(["static"], scales)[0].recipe().is_static
    with pytest.raises(ConfigError, match="row fp8 static: .*needs scales, got none"):
        chart_rows(["static"], None)[0].recipe()
    for names, message in (
        ([], "expected different rows"),
        (["bf16", "bf16"], "expected different rows"),
        (["int8"], "bf16, .*dynamic, static"),
    ):
        with pytest.raises(ConfigError, match=message):
            chart_rows(names, None)


def test_rows_of_the_grammar_and_of_files(tmp_path):
    Recipe(vision_attention={"granularity": "head"}).save(tmp_path / "r.toml")
    rows = chart_rows(["bf16", "vision=head", str(tmp_path / "r.toml"), "fused-bf16"])
    assert [row.name for row in rows] == ["bf16", "vision=head", f"{tmp_path}/r.toml",
                                          "fp8 fused-bf16"]  # fmt: skip
    assert rows[1].recipe() == rows[2].recipe()
    Recipe(linear="fp8").save(tmp_path / "r.toml")
    with pytest.raises(ConfigError, match="expected vision attention, got linear layers"):
        chart_rows([str(tmp_path / "r.toml")])


def test_nothing_to_evaluate(reader):
    rows = chart_rows(["bf16"], None)
    for wrong in ({"num_questions": 0}, {"batch_size": 0}):
        with pytest.raises(ConfigError, match="of 1 or more, got 0"):
            ChartRequest(**wrong)
    with pytest.raises(ConfigError, match="different names"):
        evaluate(reader, generated_questions(1), [*rows, *rows], data="d", command="c")


def test_a_reader_from_a_folder(reader, tmp_path):
    save_chart_reader(reader, tmp_path)
    loaded = load_reader(str(tmp_path), "cpu")
    assert loaded.name == str(tmp_path) and loaded.model.dtype == torch.bfloat16
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="image-text model"):
        load_reader(str(empty), "cpu")
