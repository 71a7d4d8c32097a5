"""Latency as a section of a page: points, fits again, break-even, and what fits cannot say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.fit import Interval
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.html import render
from octavo.measure.report.latency import latency_sections, with_interval

RESULTS = Path(__file__).parents[2] / "results"
MACHINE = Machine.current(gpu="NVIDIA H200", capability=(9, 0))
CASE = {"model": "llama", "dtype": "bfloat16", "batch_size": 1, "output_len": 128}
LENGTHS = (256, 4096, 8192, 32768, 128000)
# Of the lengths in turn, the same for all rows.
NOISE = (0.01, -0.02, 0.02, -0.01, 0.0)


def times(
    row, intercept, slope, *, constant=50, square=4e-7, lengths=LENGTHS, baseline=None, **changes
):
    """The records of a row whose ITL is a line and whose TTFT is a curve, with some noise."""
    found = []
    for index, length in enumerate(lengths):
        itl = intercept + slope * (length + 64) + NOISE[index % 5]
        ttft = constant + 0.02 * length + square * length**2 + 100 * NOISE[index % 5]
        values = {"median_itl_ms": itl, "p10_itl_ms": itl - 0.125, "p90_itl_ms": itl + 0.25}
        values |= {"median_ttft_ms": ttft, "p10_ttft_ms": ttft - 1, "p90_ttft_ms": ttft + 2}
        found.append(
            Measurement(
                op="latency",
                impl="octavo",
                case={**CASE, "row": row, "input_len": length, **changes},
                values=values,
                machine=MACHINE,
                command="octavo bench latency",
                baseline=baseline,
                date="2026-11-01T00:00:00Z",
            )
        )
    return found


BLOG = [*times("auto", 6.44, 4.37e-5), *times("fp8", 6.58, 2.37e-5, square=2e-7, baseline="auto")]


def test_points_fits_and_break_even():
    (section,) = latency_sections(BLOG)
    assert section.title == "Latency over the input length: llama"
    itl, ttft = section.figures
    points, line, _, _ = itl.data
    assert points["x"] == list(LENGTHS) and points["mode"] == "markers"
    assert points["error_y"]["array"] == pytest.approx([0.25] * 5)
    assert points["error_y"]["arrayminus"] == pytest.approx([0.125] * 5)
    assert line["y"] == pytest.approx([6.44, 6.44 + 128000 * 4.37e-5], abs=0.03)
    assert points["meta"] == line["meta"] == {"series": 0}
    (mark,), (words,) = itl.layout["shapes"], itl.layout["annotations"]
    assert mark["x0"] == pytest.approx(7000 - 64, rel=1e-6)
    assert words["text"] == "break-even, fp8: 7,000"
    assert "fp8 is faster from 7,000 tokens on than auto (95 %: 7,000 to 7,000)" in itl.caption
    assert itl.layout["xaxis"]["title"]["text"] == "input length (tokens)"
    assert (itl.layout["yaxis"]["title"]["text"], ttft.layout["yaxis"]["title"]["text"]) == (
        "ITL (ms)",
        "TTFT (ms)",
    )
    assert ttft.layout["xaxis"]["type"] == "log" and len(ttft.data[1]["x"]) == 60
    # 4,096 is too close to the next one.
    assert ttft.layout["xaxis"]["ticktext"] == ["256", "8k", "32k", "125k"]
    assert ttft.layout["yaxis"]["ticktext"] == ["30", "100", "300", "1,000", "3,000", "10k"]
    lines, curves = section.tables
    assert lines.rows[1][3].startswith("0.542") and lines.rows[0][3] is None
    assert curves.rows[1][4].startswith("0.500")
    assert curves.rows[0][3].startswith("0.40") and "[0.3" in curves.rows[0][3]


@pytest.mark.parametrize(
    ("own", "words", "at"),
    [
        (
            {"constant": 75},
            "faster from 11,180 tokens on than auto (95 %: 11,180 to 11,180)",
            11180,
        ),
        ({"constant": 40}, "always faster than auto.", None),
        ({"square": 4e-7, "constant": 60}, "never faster than auto.", None),
        ({"square": 6e-7, "constant": 30}, "faster up to 10,000 tokens than auto", 10000),
    ],
    ids=["from", "always", "never", "up to"],
)
def test_curves_of_ttft_break_even(own, words, at):
    fp8 = times("fp8", 6.58, 2.37e-5, baseline="auto", **{"square": 2e-7, **own})
    (section,) = latency_sections([*BLOG[:5], *fp8])
    _, ttft = section.figures
    assert f"By the curves, between the lengths that were measured: fp8 is {words}" in ttft.caption
    first, second = section.tables[1].rows
    assert first[-1] is None and words.startswith(second[-1].split(" (")[0])
    assert section.tables[1].header[-1] == "break-even"
    marks = [mark["x0"] for mark in ttft.layout["shapes"]]
    assert marks == ([] if at is None else [pytest.approx(at, rel=1e-3)])
    for text in ttft.layout["annotations"]:  # whose x is a logarithm
        assert 10 ** text["x"] == pytest.approx(at, rel=1e-3)
        assert text["text"] == f"break-even, fp8: {at:,}"


def test_the_page_has_it_all_inside():
    page = render(latency_sections(BLOG))
    assert "Student" in page and "break-even, fp8: 7,000" in page
    assert "coloured" in page and 'src="http' not in page


def test_the_newest_counts_and_other_models_have_sections_of_their_own():
    old = [replace(r, date="2026-10-01T00:00:00Z") for r in times("auto", 9.0, 1e-3)]
    other = times("auto", 1.0, 1e-5, model="gpt")
    llama, gpt = latency_sections([*BLOG, *old, *other])
    assert llama.figures[0].data[0]["y"][0] == pytest.approx(6.46, abs=0.01)
    assert gpt.title.endswith("gpt") and "break-even" not in gpt.figures[0].caption
    assert [len(one.figures[0].data) for one in (llama, gpt)] == [4, 2]


def test_runs_of_other_commands_are_not_mixed():
    """Two lengths of a later command: the rows keep their five, the new row has its own first."""
    later = [*times("auto", 7.0, 4e-5, lengths=LENGTHS[:2])]
    later += times("fp8+linear", 7.2, 2e-5, lengths=LENGTHS[:2], baseline="auto")
    later = [replace(r, command="other", date="2026-12-01T00:00:00Z") for r in later]
    (section,) = latency_sections([*BLOG, *later])
    assert section.paragraphs[-1].startswith("fp8+linear: 2 lengths: a line needs two")
    auto, fp8, linear = section.figures[0].data[::2]
    assert (len(auto["x"]), len(fp8["x"]), len(linear["x"])) == (5, 5, 2)
    assert auto["y"][0] == pytest.approx(6.46, abs=0.01)
    assert "fp8 is faster from 7,000 tokens on than auto" in section.figures[0].caption
    assert "fp8+linear is faster from 10,000 tokens on than auto." in section.figures[0].caption
    # In a sweep, each row has a command of its own.
    own = [replace(r, command=f"sweep {r.case['row']}") for r in BLOG]
    assert (
        latency_sections(own)[0].figures[0].caption == latency_sections(BLOG)[0].figures[0].caption
    )


def test_what_a_few_lengths_cannot_say():
    few = [*times("auto", 6, 4e-5, lengths=LENGTHS[:2])]
    few += times("fp8", 7, 3e-5, lengths=LENGTHS[:2], baseline="auto")
    (section,) = latency_sections(few)
    assert "2 lengths: a line needs two and a curve three" in section.paragraphs[-1]
    (lines,) = section.tables
    assert all("[" not in str(cell) for row in lines.rows for cell in row)
    assert len(section.figures[1].data) == 2 and "fitted" not in section.figures[1].caption
    (one,) = latency_sections(few[:1])
    assert "1 length:" in one.paragraphs[-1] and one.tables == ()


def test_a_baseline_that_is_not_there_is_no_comparison():
    (section,) = latency_sections(times("fp8", 6, 4e-5, baseline="auto"))
    assert "faster" not in section.figures[0].caption
    assert section.tables[0].rows[0][-1] is None


def test_a_term_that_is_held_is_said_so():
    rows = times("auto", 6, 4e-5)
    rows = [
        replace(r, values={**r.values, "median_ttft_ms": 1e-6 * int(r.case["input_len"]) ** 2 - x})
        for r, x in zip(rows, (90, 100, 110, 100, 100), strict=True)
    ]
    (section,) = latency_sections(rows)
    assert "auto: the constant" in section.paragraphs[-1] and "held at zero" in section.text
    assert "below zero by more than its interval" in section.text


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ((6.40, 2.37e-5), "always faster than auto (95 %: the lines cross at no length)"),
        ((6.60, 8e-5), "never faster than auto"),
        ((6.30, 8e-5), "faster up to 3,857 tokens than auto"),
    ],
)
def test_other_ways_to_break_even(own, words):
    (section,) = latency_sections([*BLOG[:5], *times("fp8", *own, baseline="auto")])
    assert words in section.figures[0].caption


def test_records_that_exist_are_readable():
    """From before fits had intervals; every figure is what plotly takes."""
    sections = latency_sections(store.read(RESULTS / "latency_h200.jsonl"))
    assert len(sections) >= 2
    for section in sections:
        assert len(section.figures) == len(section.tables) == 2
        for figure in section.figures:
            json.dumps(figure.data, allow_nan=False)
            assert "fitted to each row" in figure.caption


def test_no_records_of_latency():
    with pytest.raises(ConfigError, match="expected records of octavo bench latency, got none"):
        latency_sections([])
    with pytest.raises(ConfigError, match="got serve"):
        latency_sections([replace(BLOG[0], op="serve")])


def test_numbers_with_intervals():
    assert with_interval(1.5, None) == "1.500"
    assert with_interval(2.0, Interval(0.001, 0.003), 1e3) == "2 [1, 3]"
    assert with_interval(0.5, Interval(float("-inf"), float("inf"))) == "0.5000 [−∞, ∞]"
