"""Advice as records, and as a section of a page."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers")
from octavo.measure.advise.advise import advise
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.measured import advice_records
from octavo.measure.advise.shape import Workload, find_model
from octavo.measure.records import Measurement
from octavo.measure.report.pages import report_sections
from octavo.measure.report.speed import ADVICE


@pytest.fixture(scope="module")
def advice():
    return advise(find_model("llama-3.1-8b"), find_gpu("h200"), Workload(context=32768))


def test_each_time_and_size_is_a_record(advice):
    records = advice_records(advice, "octavo advise llama-3.1-8b")
    assert len(records) == len(advice.expectations) + len(advice.memory)
    token = records[0]
    assert token.case["what"] == advice.expectations[0].what and token.case["context"] == 32768
    assert token.values["speedup"] == pytest.approx(advice.expectations[0].speedup)
    assert token.case["serve"] == advice.command and "[kv_cache]" in token.case["recipe"]
    assert token.case["reasons"].splitlines() == list(advice.reasons)
    weights = next(r for r in records if r.case["what"] == "weights")
    assert weights.values["before_bytes"] == advice.memory[0].before
    assert all(Measurement.from_json(record.to_json()) == record for record in records)


def test_a_time_without_a_speed_up_says_why(advice):
    one = advice.expectations[0]
    bound = replace(one, before=replace(one.before, is_host_bound=True))
    records = advice_records(replace(advice, expectations=[bound]), "c")
    assert "speedup" not in records[0].values and records[0].case["note"] == bound.note
    (section,) = ADVICE.make(records)
    assert f"{bound.note}." in section.text
    assert section.tables[0].rows[0][-1] is None


def test_the_page_has_the_recipe_the_reasons_and_the_numbers(advice):
    records = advice_records(advice, "octavo advise llama-3.1-8b")
    section = next(s for s in report_sections(records) if s.title.startswith("Advice: llama"))
    assert section.title == "Advice: llama-3.1-8b on NVIDIA H200, 1 × 32,768 tokens"
    assert all(reason in section.text for reason in advice.reasons)
    assert all(warning in section.text for warning in advice.warnings)
    expected, recipe = section.tables
    assert [row[0] for row in expected.rows] == [r.case["what"] for r in records]
    assert expected.rows[0][-1] == records[0].values["speedup"]
    assert "16.06 GB" in [row[1] for row in expected.rows]
    assert ("kv_cache.format", "e4m3") in recipe.rows and (
        "linear.weight",
        "channel",
    ) in recipe.rows


def test_a_recipe_by_hand_is_shown_as_it_is(advice):
    records = advice_records(advice, "c")
    for text, rows in (("# nothing\n", ("nothing is quantized", "")), ("= x", ("recipe", "= x"))):
        some = [replace(r, case={**r.case, "recipe": text}) for r in records]
        assert ADVICE.make(some)[0].tables[1].rows == (rows,)
