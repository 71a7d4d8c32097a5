"""Generated charts: the same for a seed, drawn, and with answers that their data confirm."""

import random
import re
from collections import Counter

import numpy as np
import pytest

from octavo.demo.charts import (
    COLORS,
    KINDS,
    SIZES,
    WEIGHTS,
    all_questions,
    description,
    make_chart,
    make_questions,
    practice,
    vocabulary,
)
from octavo.errors import ConfigError

pytest.importorskip("PIL")
from PIL import ImageColor

from octavo.demo.chart_drawing import draw_chart

SEEDS = range(200)


def value_of(chart, label, series=""):
    return chart.values[chart.series.index(series)][chart.labels.index(label)]


def recompute(chart, text):
    """The answer to a question, from its words and the chart's data alone."""
    words = re.findall(r"\w+", text)
    labels = [word for word in words if word in chart.labels]
    series = next((word for word in words if word in chart.series), "")
    color = next((word for word in words if word in COLORS), None)
    place = chart.colors.index(color) if color else None
    row = chart.values[chart.series.index(series)] if series in chart.series else None
    match words:
        case ["What", "is", "the", "value", "of", "the", *_]:
            return str(chart.values[0][place])
        case ["What", "is", "the", "value", *_]:
            return str(value_of(chart, labels[0], series))
        case ["Which", "label", "has", "the", word, *_]:
            return chart.labels[int({"highest": np.argmax, "lowest": np.argmin}[word](row))]
        case ["Is", first, "greater", "than", second, *_]:
            is_greater = value_of(chart, first, series) > value_of(chart, second, series)
            return "Yes" if is_greater else "No"
        case ["What", "is", "the", ("sum" | "difference") as word, *_]:
            first, second = (value_of(chart, label, series) for label in labels)
            return str(first + second if word == "sum" else abs(first - second))
        case ["What", "color", "are", *_]:
            return chart.colors[0]
        case ["What", "color", "is", name]:
            names = chart.labels if chart.is_colored_by_label else chart.series
            return chart.colors[names.index(name)]
        case ["Which", "label", "is", _]:
            return chart.labels[place]
        case ["Which", "series", "is", _]:
            return chart.series[place]
        case ["How", "many", *_]:
            return str(sum(map(len, chart.values)))
        case ["What", "is", "the", "title"]:
            return chart.title
    raise AssertionError(text)


def test_a_seed_gives_one_chart_and_one_picture():
    for distribution in SIZES:
        first, second = make_chart(7, distribution), make_chart(7, distribution)
        assert first == second and make_questions(first, 7, 5) == make_questions(second, 7, 5)
        assert draw_chart(first).tobytes() == draw_chart(second).tobytes()
        assert make_chart(8, distribution) != first


def test_what_a_seed_gives_is_pinned():
    chart = make_chart(0)
    assert (chart.kind, chart.title, chart.labels) == (
        "bar",
        "Animals seen",
        ("Cat", "Bee", "Dog", "Fox"),
    )


def test_the_callers_random_state_does_not_matter():
    random.seed(1)
    before = make_chart(3)
    random.seed(2)
    np.random.seed(5)
    assert make_chart(3) == before


@pytest.mark.parametrize("distribution", SIZES)
def test_answers_are_what_the_data_say(distribution):
    kinds = Counter()
    for seed in SEEDS:
        chart = make_chart(seed, distribution)
        for question in all_questions(chart):
            assert question.answer == recompute(chart, question.text), (chart, question)
            kinds[question.kind] += 1
    assert kinds.keys() == WEIGHTS.keys()


def test_charts_keep_their_promises():
    kinds = Counter()
    for seed in SEEDS:
        chart = make_chart(seed)
        kinds[chart.kind] += 1
        flat = [value for row in chart.values for value in row]
        assert len(set(flat)) == len(flat) and min(flat) > 0 and max(flat) <= chart.axis_max
        assert len(set(chart.labels)) == len(chart.labels) == len(chart.values[0])
        assert chart.kind != "pie" or sum(flat) == 100
    assert kinds.keys() == set(KINDS) and min(kinds.values()) > 20


def test_every_word_is_in_the_vocabulary():
    words = vocabulary()
    assert len(set(words)) == len(words)
    for seed in SEEDS:
        chart = make_chart(seed)
        short = practice(chart, 0, 99)
        for question in [*all_questions(chart), description(chart), *short]:
            pieces = re.findall(r"[A-Za-z]+|\d|[^\sA-Za-z\d]", f"{question.text} {question.answer}")
            assert set(pieces) <= set(words), question


def test_yes_and_no_are_asked_as_often():
    answers = Counter(
        question.answer
        for seed in range(600)
        for question in make_questions(make_chart(seed), seed, 4)
        if question.kind == "compare"
    )
    assert sum(answers.values()) > 150 and 0.4 < answers["Yes"] / sum(answers.values()) < 0.6


def test_short_questions_have_the_answers_of_long_ones():
    for seed in range(60):
        chart = make_chart(seed)
        true = {(q.text, q.answer) for q in all_questions(chart)}
        asked = practice(chart, seed, 99)
        assert practice(chart, seed, 3) == asked[:3]
        assert len({str(practice(chart, other, 99)) for other in range(9)}) > 1
        for question in asked:
            what = question.text.removesuffix("?").split()
            long = {
                f"What is the value of {' in '.join(what)}?",
                f"What color is {what[0]}?",
                f"Which label is {what[0]}?",
                f"Which series is {what[0]}?",
            }
            assert any((text, question.answer) in true for text in long), question


def test_the_description_has_every_value():
    for seed in SEEDS:
        chart = make_chart(seed)
        numbers = [int(n) for n in re.findall(r"\d+", description(chart).answer)]
        assert sorted(numbers) == sorted(value for row in chart.values for value in row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distribution", SIZES)
def test_every_kind_is_drawn_in_its_colors(kind, distribution):
    for seed in range(3):
        chart = make_chart(seed, distribution, [kind])
        image = draw_chart(chart)
        assert image.mode == "RGB" and image.size in SIZES[distribution]
        pixels = np.asarray(image, dtype=int).reshape(-1, 3)
        for name in chart.colors:
            color = ImageColor.getrgb(chart.style.palette[COLORS.index(name)])
            count = (np.abs(pixels - color).max(1) < 4).sum()
            assert count > 20, (name, count)


def test_bars_are_as_high_as_their_values():
    chart = next(
        c for seed in SEEDS if (c := make_chart(seed, "plain", ["bar"])).is_colored_by_label
    )
    pixels = np.asarray(draw_chart(chart), dtype=int)
    heights = []
    for name in chart.colors:
        color = ImageColor.getrgb(chart.style.palette[COLORS.index(name)])
        rows = np.flatnonzero((np.abs(pixels - color).max(2) < 4).any(1))
        heights.append(rows.max() - rows.min() + 1)
    per_unit = np.array(heights) / np.array(chart.values[0])
    assert np.ptp(per_unit) * max(chart.values[0]) < 5


def test_the_distributions_differ_in_every_size_and_palette():
    plain = {make_chart(seed).style.palette for seed in SEEDS}
    noisy = {make_chart(seed, "noisy").style.palette for seed in SEEDS}
    assert not set(SIZES["plain"]) & set(SIZES["noisy"]) and not plain & noisy
    spreads = [np.asarray(draw_chart(make_chart(1, d)))[:4, :8].std((0, 1)).max() for d in SIZES]
    assert spreads[0] == 0 < spreads[1]


@pytest.mark.parametrize("count", [0, -1])
def test_no_questions_is_an_error(count):
    with pytest.raises(ConfigError, match="one question or more"):
        make_questions(make_chart(0), 0, count)


def test_unknown_choices_are_errors():
    with pytest.raises(ConfigError, match="plain, noisy, got 'photo'"):
        make_chart(0, "photo")
    for kinds in ([], ["radar"]):
        with pytest.raises(ConfigError, match="expected kinds"):
            make_chart(0, kinds=kinds)
