"""Errors of attention, and advice, as sections of a page."""

from functools import partial

import pytest

from octavo.measure.records import Machine, Measurement
from octavo.measure.report.html import render
from octavo.measure.report.layers import ERRORS, average
from octavo.measure.report.pages import report_sections

row = partial(Measurement, machine=Machine.current(), command="pytest", impl="reference")


def test_average_joins_what_differs_only_in_the_layer():
    records = [
        row(op="x", case={"layer": layer, "tensor": tensor}, values={"sqnr_db": value})
        for layer, tensor, value in [(0, "q", 10.0), (1, "q", 20.0), (0, "k", 5.0)]
    ]
    means = average(records, over="layer")
    assert [(r.case["tensor"], r.values["sqnr_db"]) for r in means] == [("q", 15.0), ("k", 5.0)]
    assert all("layer" not in r.case for r in means)


E4M3 = {"format": "e4m3", "granularity": "head"}


@pytest.fixture
def records():
    quantized = [
        row(
            op="quantize_error",
            case={"model": "m", "layer": layer, "tensor": "q"} | E4M3,
            values={"sqnr_db": 30.0 + layer},
        )
        for layer in (0, 1)
    ]
    case = {"model": "m", "layer": 0, "recipe": "bf16", "length": 9}
    attended = [
        row(op=op, case=case, values=values)
        for op, values in [
            ("attention_error", {"relative_rms": 0.003}),
            ("decode_error", {"relative_rms": 0.004, "bytes_per_token": 768.0}),
        ]
    ]
    accumulated = [
        row(
            op="accumulation_error",
            case={"length": length, "accumulation": "one-level"},
            values={"relative_rms": 0.1, "is_found": found},
        )
        for length, found in [(1024, 1.0), (131072, 0.0)]
    ]
    return [*quantized, *attended, *accumulated]


def sections_of(records):
    by_kind = [(kind, [row for row in records if row.op in kind.ops]) for kind in ERRORS]
    return [section for kind, own in by_kind for section in kind.make(own)]


def test_every_question_has_its_numbers(records):
    quantization, attention, decoding, accumulation = sections_of(records)
    assert quantization.tables[0].rows == (("e4m3 per head", 30.5),)
    assert quantization.title == "Queries, keys and values in 8 bits: m"
    assert attention.tables[0].rows == (("bf16", 0.003),)
    assert decoding.tables[0].rows == (("bf16", 0.004),)
    assert "bf16 768" in decoding.text
    assert accumulation.tables[0].rows == (("one-level", "found", "lost"),)
    assert accumulation.headline.startswith("A needle among 131,072 keys is lost")


def test_levels_have_their_time_and_error():
    case = {"shape": "1x8192", "causal": False, "value_mean": 1.0, "is_selected": True}
    records = [
        row(
            op="attention_levels",
            case=case | {"promote_every": every},
            values={"median_ms": ms, "relative_rms": error},
        )
        for every, ms, error in [("none", 2.0, 0.3), (1, 3.0, 0.05)]
    ]
    (section,) = sections_of(records)
    assert [line[3::2] for line in section.tables[0].rows] == [("none", True, 0.3), (1, True, 0.05)]
    titles = [section.title for section in report_sections(records)]
    assert "Levels of accumulation" in titles


def test_the_newest_of_two_runs_counts(records):
    again = row(op="attention_error", case=dict(records[2].case), values={"relative_rms": 0.5})
    (section,) = sections_of([records[2], again])
    assert section.tables[0].rows == (("bf16", 0.5),)


def test_a_page_shows_all_of_it_and_names_what_is_incomplete(records):
    sections = report_sections(records)
    assert [section.title for section in sections][-1] == "Machines, versions and commands"
    page = render(sections, title="demo")
    assert "e4m3 per head" in page and "131,072" in page
    broken = row(op="decode_error", case={"layer": 0}, values={"relative_rms": 0.1})
    hidden = report_sections([*records, broken])[-1]
    assert hidden.tables[0].rows == (
        ("decode_error", "reference", 1, "without recipe, bytes_per_token"),
    )
