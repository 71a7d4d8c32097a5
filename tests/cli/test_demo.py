"""octavo demo, from a real model to a report."""

import subprocess
import sys

import pytest

from octavo.cli.main import COMMANDS, make_app, run
from octavo.errors import UnsupportedError
from octavo.measure import store
from octavo.measure.evaluate import demo


def test_a_missing_model_is_one_sentence(capsys, monkeypatch, tmp_path):
    def missing():
        raise UnsupportedError("the model is not installed: pip install it")

    monkeypatch.setattr(demo, "prepare", missing)
    assert run(make_app(COMMANDS), ["demo", "-o", str(tmp_path)]) == 1
    assert "pip install it" in capsys.readouterr().err


def test_the_sample_is_a_page_of_text():
    assert 500 < len(demo.sample_text().split()) < 1500


@pytest.mark.slow
def test_the_demo_runs_to_its_end(tmp_path):
    command = [sys.executable, "-m", "octavo", "demo", "-o", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    records = store.read(tmp_path / "out" / "records.jsonl")
    assert {record.op for record in records} == {"quantize", "attention", "decode_attention"}
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
