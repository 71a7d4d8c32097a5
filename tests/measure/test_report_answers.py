"""pass@1 and texts as sections of a page."""

from dataclasses import replace
from functools import partial

from octavo.measure.records import Machine, Measurement
from octavo.measure.report import quality
from octavo.measure.report.html import render
from octavo.measure.report.pages import report_sections

MACHINE = Machine(cpu="A CPU", python="3.12", platform="Linux", gpu="A GPU", capability=(9, 0))
row = partial(Measurement, impl="octavo", machine=MACHINE, command="octavo x")


def answered(op, recipe, score, baseline=None, **values):
    case = {"model": "m", "data": "gpqa", "subset": "diamond", "recipe": recipe, "repetitions": 4}
    case |= {"temperature": 0.6, "max_tokens": "context", "seed": 0}
    values = {"score_percent": score, "num_questions": 198.0, "num_unparsed": 2.0, **values}
    return row(op=op, case=case, values=values, baseline=baseline)


def test_pass_at_1_with_errors_and_recovery():
    error = {"score_standard_error_percent": 2.5, "repetition_standard_error_percent": 0.75}
    again = {"recovery_percent": 98.0, "recovery_standard_error_percent": 1.25}
    records = [
        answered("choice", "bfloat16", 50.0, **error),
        answered("choice", "fp8 head", 49.0, "bfloat16", **again, difference_percent=-1.0),
        answered("math", "bfloat16", 0.0),
    ]
    choice, math = quality.PASS_AT_1.make(records)
    assert choice.title == ("Multiple choice: m, gpqa, diamond, 198 questions × 4, temperature 0.6")
    scores, recovery = choice.figures
    (trace,) = scores.data
    assert trace["x"] == [50.0, 49.0] and trace["error_x"]["array"] == [2.5, 0.0]
    (trace,) = recovery.data
    assert trace["x"] == [98.0] and trace["error_x"]["arrayminus"] == [1.25]
    titles = [figure.layout["xaxis"]["title"]["text"] for figure in choice.figures]
    assert titles == ["pass@1 (%)", "recovery (%)"] and "that of bfloat16" in recovery.caption
    heads = choice.tables[0].header
    assert "± of repetitions (%)" in heads and "unparsed" in heads and "cut" not in heads
    assert "difference (points)" in heads and heads[1] == "pass@1 (%)"
    assert math.title.startswith("Mathematics: m")
    assert len(math.figures) == 1


def test_other_questions_and_other_sampling_are_other_sections():
    first = answered("math", "bfloat16", 50.0)
    others = [
        replace(first, values={**first.values, "num_questions": 20.0}),
        replace(first, case={**first.case, "temperature": 1.0}),
        replace(first, case={**first.case, "max_tokens": 100}),
    ]
    found = report_sections([first, *others])
    titles = [section.title for section in found]
    assert len(set(titles)) == len(titles) == 5
    assert sum(title.endswith(" (2)") for title in titles) == 1


def test_texts_of_each_recipe():
    def said(recipe, text):
        case = {"model": "m", "recipe": recipe, "prompt": "What is FP8?", "text": text}
        return row(op="texts", case=case, values={})

    long = "It has eight bits. " * 5
    section, *_ = report_sections([said("bf16", long), said("fp8", "<b>8</b>")])
    assert section.tables[0].header == ("prompt", "recipe", "text")
    page = render([section])
    assert f'<td class="long">{long}</td>' in page and "&lt;b&gt;8&lt;/b&gt;" in page
