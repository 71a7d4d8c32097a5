"""The chart reader's part of the demonstration: stages, examples and what they are told by."""

import io

import pytest
import torch

from octavo.calibration.scale_file import load_scales
from octavo.demo.charts import vocabulary
from octavo.demo.stages import (
    GAP,
    LINE,
    WIDTH,
    ChartDemo,
    Sizes,
    choose_examples,
    draw_chart_sheet,
    noisy_charts,
    one_thread,
)
from octavo.errors import ConfigError
from octavo.layers.encoder_attention import EncoderAttention
from octavo.measure import store
from octavo.measure.evaluate.question_files import ChartQuestion

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from PIL import Image

from octavo.demo.chart_reader import make_chart_reader

SIZES = Sizes(calibration_images=3, chart_questions=5)


@pytest.mark.slow
def test_stages_calibrate_then_ask(tmp_path):
    reader = make_chart_reader(vocabulary(), seed=1)
    path = tmp_path / "records.jsonl"
    charts = ChartDemo(reader, path, SIZES)
    calibrate, ask = charts.stages
    steps = []
    calibrated = calibrate.run(lambda *step: steps.append(step))
    assert steps[-1] == ("calibrating", 3, 3) and len(calibrated) == 6 * 3
    assert store.read(path) == calibrated
    scales = load_scales(tmp_path / "scales.json")
    assert scales.header.data == "generated noisy charts" and scales.header.margin == 1.5
    assert calibrate.tell(calibrated) == ["Static scales of 6 layers: scales.json"]
    answered = ask.run(lambda *step: steps.append(step))
    assert steps[-1] == ("answering", 15, 15)
    assert [r.case["recipe"] for r in answered] == list(charts.answers)
    assert store.read(path) == [*calibrated, *answered]
    assert {r.case["picture"] for r in answered} == {"pictures/charts.jpg"}
    with Image.open(tmp_path / "pictures" / "charts.jpg") as sheet:
        assert sheet.format == "JPEG" and sheet.width == 2 * (WIDTH + GAP) + GAP  # two charts
    table, words = ask.tell(answered)
    assert len(table.rows) == 3 and "of 5: fp8 dynamic" in words and "fp8 static" in words
    assert not any(isinstance(m, EncoderAttention) for m in reader.model.modules())


def test_changed_answers_are_counted():
    answers = {"bf16": ["1", "2", "3"], "a": ["1", "2", "3"], "b": ["1", "x", "y"]}
    words = ChartDemo(None, None, SIZES, answers).changed()
    assert words == "Answers in other words than bf16's, of 3: a 0, b 2."


def test_a_sheet_has_charts_with_words_below():
    images = [Image.new("RGB", (30, 20), color) for color in ("blue", "red", "lime", "gray")]
    questions = [ChartQuestion(image, "Which? " * 40, ("a",)) for image in images]
    content = draw_chart_sheet(questions, {"bf16": ["a"] * 4, "fp8": ["b"] * 4}, [1, 3, 0, 2])
    sheet = Image.open(io.BytesIO(content))
    down = 200 + 4 * LINE + GAP  # a chart of 300 × 200, a question, the truth and two answers
    assert sheet.size == (3 * (WIDTH + GAP) + GAP, 2 * (down + GAP) + GAP)
    places = {0: (254, 0, 0), 1: (128, 128, 128), 2: (0, 0, 254), 3: (0, 255, 1)}
    for place, color in places.items():
        at = (GAP + place % 3 * (WIDTH + GAP) + 150, GAP + place // 3 * (down + GAP) + 100)
        assert max(abs(a - b) for a, b in zip(sheet.getpixel(at), color, strict=True)) < 8
    below = sheet.crop((GAP, GAP + 204, GAP + WIDTH, GAP + 204 + LINE))
    assert min(below.convert("L").tobytes()) < 90
    margin = sheet.crop((GAP + WIDTH + 2, 0, GAP + WIDTH + GAP - 2, sheet.height))
    assert min(margin.convert("L").tobytes()) > 230  # words end where their chart does


def test_examples_show_disagreement_and_other_charts():
    images = [object() for _ in range(10)]
    questions = [ChartQuestion(images[i // 4], "q", ("a",)) for i in range(40)]
    same = ["a"] * 40
    other = [*same]
    for index in (8, 9, 17, 30):  # 8 and 9 are about one chart
        other[index] = "b"
    chosen = choose_examples(questions, [same, other], 6)
    assert chosen[:3] == [8, 17, 30] and len(chosen) == 6
    assert len({id(questions[i].image) for i in chosen}) == 6
    assert len(choose_examples(questions, [same, same], 6)) == 6
    assert len(choose_examples(questions, [same, other], 50)) == 10
    assert len(choose_examples(questions[:1], [["a"], ["b"]], 4)) == 1


def test_noisy_charts_go_on_where_they_stopped():
    data = noisy_charts(3)
    first = [image.tobytes() for (image,) in data.prompts(3)]
    (rest,) = [image.tobytes() for (image,) in data.prompts(3, start=2)]
    assert len(set(first)) == 3 and rest == first[2]


def test_one_thread_is_undone():
    before = torch.get_num_threads()
    with pytest.raises(ConfigError), one_thread():
        assert torch.get_num_threads() == 1
        raise ConfigError("x")
    assert torch.get_num_threads() == before
