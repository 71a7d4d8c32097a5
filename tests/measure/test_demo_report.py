"""The demonstration's page, from records alone."""

from functools import partial

import pytest

from octavo.measure.records import Machine, Measurement
from octavo.measure.report.demo import average, demo_sections
from octavo.measure.report.html import render

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
