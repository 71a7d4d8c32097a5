"""The demonstration's page, from records alone."""

from functools import partial

import pytest

from octavo.measure.records import Machine, Measurement
from octavo.measure.report.chart_demo import reading_section
from octavo.measure.report.demo import average, demo_sections
from octavo.measure.report.html import Picture, render
from octavo.measure.report.tables import Table

row = partial(Measurement, machine=Machine.current(), command="pytest", impl="reference")


def test_average_joins_what_differs_only_in_the_layer():
    records = [
        row(op="quantize", case={"layer": layer, "tensor": tensor}, values={"sqnr_db": value})
        for layer, tensor, value in [(0, "q", 10.0), (1, "q", 20.0), (0, "k", 5.0)]
    ]
    means = average(records, over="layer")
    assert [(r.case["tensor"], r.values["sqnr_db"]) for r in means] == [("q", 15.0), ("k", 5.0)]
    assert all("layer" not in r.case for r in means)


@pytest.fixture
def records():
    quantized = [
        row(
            op="quantize",
            case={"layer": layer, "tensor": "q", "format": "e4m3", "granularity": "head"},
            values={"sqnr_db": 30.0 + layer},
        )
        for layer in (0, 1)
    ]
    attended = [
        row(op=op, case={"layer": 0, "recipe": "bf16", "length": 9}, values=values)
        for op, values in [
            ("attention", {"relative_rms": 0.003}),
            ("decode_attention", {"relative_rms": 0.004, "bytes_per_token": 768.0}),
        ]
    ]
    accumulated = [
        row(
            op="attention",
            case={"length": length, "accumulation": "one-level"},
            values={"relative_rms": 0.1, "is_found": found},
        )
        for length, found in [(1024, 1.0), (131072, 0.0)]
    ]
    return [*quantized, *attended, *accumulated]


def test_every_question_has_its_numbers(records):
    quantization, attention, decoding, accumulation = demo_sections(records)
    assert quantization.tables[0].rows == (("e4m3 per head", 30.5),)
    assert attention.tables[0].rows == (("bf16", 0.003),)
    assert decoding.tables[0].rows == (("bf16", 0.004),)
    assert "bf16 768" in decoding.text
    assert accumulation.tables[0].rows == (("one-level", "found", "lost"),)


def test_the_page_can_be_written(records):
    page = render(demo_sections(records), title="demo")
    assert "e4m3 per head" in page and "131,072" in page


def answered(recipe, accuracy, difference=0.0, is_different=False):
    values = {"relaxed_accuracy_percent": accuracy}
    baseline = None
    if recipe != "bf16":
        baseline = "bf16"
        values |= {
            "difference_points": difference,
            "difference_low_points": difference - 1,
            "difference_high_points": difference + 1,
            "is_different": float(is_different),
        }
    case = {"model": "reader", "recipe": recipe, "num_questions": 100}
    return row(op="chartqa", case=case, values=values, baseline=baseline)


def test_the_reading_says_what_differs():
    records = [
        answered("bf16", 90.0),
        answered("fp8 dynamic", 90.0),
        answered("fp8 static", 80.0, -10.0, is_different=True),
    ]
    table = Table(caption="scores", header=("recipe",), rows=(("bf16",),))
    changed = {"fp8 dynamic": 1, "fp8 static": 12}
    section = reading_section(records, table, [], changed)
    assert "100 questions" in section.text and "90.0 % right" in section.text
    assert "fp8 dynamic: 90.0 % right, +0.0 points" in section.text
    assert "no difference from bf16 that these questions could show; 1 of 100" in section.text
    assert "-10.0 points (95 % interval -11.0 to -9.0), it differs from bf16; 12" in section.text
    assert section.figures[0].data[0]["y"] == [90.0, 90.0, 80.0]


def test_pictures_are_inside_the_page_and_escaped():
    pictures = [Picture(caption="<b>Which?</b>", png=b"png", facts=(("truth", "<i>7</i>"),))]
    table = Table(caption="scores", header=("recipe",), rows=(("bf16",),))
    page = render([reading_section([answered("bf16", 50.0)], table, pictures, {})])
    assert 'src="data:image/png;base64,cG5n"' in page
    assert "&lt;b&gt;Which?" in page and "<b>Which?" not in page and "&lt;i&gt;7" in page
