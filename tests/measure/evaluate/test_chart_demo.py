"""The chart reader's part of the demonstration: stages, examples and what they are told by."""

import pytest
import torch

from octavo.calibration.scale_file import load_scales
from octavo.errors import ConfigError
from octavo.layers.encoder_attention import EncoderAttention
from octavo.measure.evaluate.chart_demo import (
    ChartDemo,
    choose_examples,
    noisy_charts,
    one_thread,
)
from octavo.measure.evaluate.chartqa_data import Question
from octavo.measure.evaluate.charts import vocabulary

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from octavo.integrations.transformers.chart_reader import make_chart_reader


@pytest.mark.slow
def test_stages_calibrate_then_ask(tmp_path):
    reader = make_chart_reader(vocabulary(), seed=1)
    charts = ChartDemo(reader, tmp_path / "s.json", "test", num_images=3, num_questions=5)
    with pytest.raises(ConfigError, match="no answers yet"):
        charts.pictures()
    calibrate, ask = charts.stages
    steps = []
    calibrated = list(calibrate.run(steps.append))
    assert sum(steps) == calibrate.num_steps == 3 and len(calibrated) == 6 * 3
    scales = load_scales(tmp_path / "s.json")
    assert scales.header.data == "generated noisy charts" and scales.header.margin == 1.5
    steps.clear()
    answered = list(ask.run(steps.append))
    assert sum(steps) == ask.num_steps == 15
    assert [r.case["recipe"] for r in answered] == list(charts.answers)
    assert charts.num_changed().keys() == {"fp8 dynamic", "fp8 static"}
    pictures = charts.pictures()
    assert len(pictures) == 2 and all(p.png.startswith(b"\x89PNG") for p in pictures)
    words = [word for word, _ in pictures[0].facts]
    assert words == ["truth", "bf16", "fp8 dynamic", "fp8 static"]
    assert not any(isinstance(m, EncoderAttention) for m in reader.model.modules())


def test_changed_answers_are_counted():
    charts = ChartDemo(None, None, "test")
    charts.answers = {"bf16": ["1", "2", "3"], "a": ["1", "2", "3"], "b": ["1", "x", "y"]}
    assert charts.num_changed() == {"a": 0, "b": 2}


def test_examples_show_disagreement_and_other_charts():
    images = [object() for _ in range(10)]
    questions = [Question(images[i // 4], "q", ("a",)) for i in range(40)]
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
