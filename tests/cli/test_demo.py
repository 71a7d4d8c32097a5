"""octavo demo: the flow of its stages with stages of the test's own, and the true one."""

import subprocess
import sys
from functools import partial

import pytest

pytest.importorskip("transformers")

from octavo.calibration.scale_file import load_scales
from octavo.cli.main import COMMANDS, make_app, run
from octavo.demo import story as demo
from octavo.demo.stages import Stage
from octavo.errors import UnsupportedError
from octavo.measure import store
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.tables import Table

row = partial(Measurement, machine=Machine.current(), command="pytest", impl="reference")


def canned_records():
    """A record and what it is compared with, of most stages."""
    read = {"model": "reader", "data": "plain", "num_questions": 100}
    text = {"model": "m", "data": "t", "context": 64, "chunk": 8, "num_windows": 2}
    said = {"model": "m", "prompt": "Why?"}
    drawn = {"model": "small-image", "num_pictures": 4}
    compared = {"difference_points": -1.0, "difference_low_points": -3.0}
    compared |= {"difference_high_points": 1.0, "recovery_percent": 98.9, "is_different": 0.0}
    right = "relaxed_accuracy_percent"
    return [
        row(op="chartqa", case=read | {"recipe": "bf16"}, values={right: 91.0}),
        row(
            op="chartqa",
            case=read | {"recipe": "fp8 static"},
            values={right: 90.0, **compared},
            baseline="bf16",
        ),
        row(op="perplexity", case=text | {"recipe": "bf16"}, values={"perplexity": 9.0}),
        row(
            op="perplexity",
            case=text | {"recipe": "fp8 token"},
            values={"perplexity": 9.1, "recovery_percent": 98.9},
            baseline="bf16",
        ),
        row(op="texts", case=said | {"recipe": "bf16", "text": "So."}, values={"num_tokens": 2}),
        row(
            op="texts",
            case=said | {"recipe": "fp8 token", "text": "Just so."},
            values={"num_tokens": 3, "num_same_tokens": 0},
            baseline="bf16",
        ),
        row(op="images", case=drawn | {"row": "bf16"}, values={}),
        row(
            op="images",
            case=drawn | {"row": "fp8"},
            values={"psnr_db": 36.4, "worst_psnr_db": 30.2},
            baseline="bf16",
        ),
    ]


@pytest.fixture
def canned(monkeypatch):
    """The demonstration with two stages of canned records; the list of what was watched."""
    watched = []

    def make_stages(records, results):
        def measure(some, watch):
            watch("measuring", 1, 1)
            watched.append(len(some))
            store.append(records, some)
            return some

        def tell(found):
            return [
                Table(caption="a table", header=("records",), rows=((len(found),),)),
                "a word",
            ]

        found = canned_records()
        return [
            Stage("the first stage", partial(measure, found[:4]), tell),
            Stage("the second stage", partial(measure, found[4:]), tell),
        ]

    monkeypatch.setattr(demo, "make_stages", make_stages)
    return watched


def octavo(*args):
    return run(make_app(COMMANDS), ["demo", *map(str, args)])


def test_stages_end_in_one_page_and_a_table(canned, capsys, tmp_path):
    pytest.importorskip("plotly")
    folder = tmp_path / "new" / "demo"
    assert octavo("-o", folder) == 0
    assert canned == [4, 4] and len(store.read(folder / "records.jsonl")) == 8
    text = " ".join(capsys.readouterr().out.split())
    assert "the first stage a table" in text and text.count("a word") == 2
    assert "100 questions about charts, right reader 91.0 % fp8 static 90.0 %" in text
    assert "perplexity of a text m 9.000 fp8 token 9.100, recovers 98.9 %" in text
    assert "2 tokens fp8 token the same for 0 of 3" in text
    assert "4 images, PSNR small-image bf16 fp8 36.4 dB, the worst 30.2 dB" in text
    assert "small-image, quality alone, recipe fp8 on" in text
    assert text.count("Use FP8: yes, if it is faster here.") == 1  # of what is good enough
    assert text.count("Use FP8: it depends: check the quality.") == 2
    page = (folder / "report.html").read_text()
    assert "<title>octavo demo</title>" in page and "Just so." in page
    assert "Questions about charts: reader" in page and "Not shown" not in page


def test_an_earlier_demo_is_replaced_only_if_asked_for(canned, capsys, tmp_path):
    pytest.importorskip("plotly")
    mine = tmp_path / "pictures" / "mine.jpg"
    mine.parent.mkdir()
    for path in (mine, tmp_path / "pictures" / "compared_old.jpg"):
        path.write_text("")
    store.append(tmp_path / "records.jsonl", canned_records()[:1])
    (tmp_path / "scales.json").write_text("old")
    assert octavo("-o", tmp_path) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "without an earlier demo, got" in error and "--force replaces it" in error
    assert canned == [] and (tmp_path / "scales.json").exists()
    assert octavo("-o", tmp_path, "--force") == 0
    assert len(store.read(tmp_path / "records.jsonl")) == 8
    assert [p.name for p in (tmp_path / "pictures").iterdir()] == ["mine.jpg"]
    assert not (tmp_path / "scales.json").exists()


def test_what_was_measured_before_a_failure_is_kept(canned, capsys, monkeypatch, tmp_path):
    made = demo.make_stages

    def fail(watch):
        raise UnsupportedError("the model broke")

    def make_stages(records, results):
        return [*made(records, results)[:1], Stage("broken", fail, lambda found: [])]

    monkeypatch.setattr(demo, "make_stages", make_stages)
    assert octavo("-o", tmp_path) == 1
    assert "the model broke" in capsys.readouterr().err
    assert len(store.read(tmp_path / "records.jsonl")) == 4
    assert not (tmp_path / "report.html").exists()


def test_a_missing_model_is_one_sentence_and_costs_nothing(capsys, monkeypatch, tmp_path):
    def missing(*args):
        raise UnsupportedError("the model is not installed: pip install it")

    (tmp_path / "report.html").write_text("old")
    monkeypatch.setattr(demo, "make_stages", missing)
    assert octavo("-o", tmp_path, "--force") == 1
    assert "pip install it" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "old"


def test_without_diffusers_the_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert octavo("-o", tmp_path) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "octavo demo needs PIL, diffusers, " in error and "[demo]'" in error


def test_help_teaches(capsys):
    assert octavo("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("SmolLM2-135M-Instruct (pip install", "OUTPUT/report.html", "minutes", "--force"):
        assert words in text


def test_texts_are_some_pages():
    assert 500 < len(demo.sample_text().split()) < 1500
    assert demo.long_text().startswith(demo.sample_text())
    assert 2000 < len(demo.long_text().split()) < 4000


def test_advice_is_told_and_recorded(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "records.jsonl"
    stage = demo.advice_stage(path, tmp_path / "results")
    found = stage.run(lambda *_: None)
    assert store.read(path) == found and found[0].case["gpu"] == "NVIDIA H200"
    told = stage.tell(found)
    tables = [part for part in told if isinstance(part, Table)]
    words = "\n".join(part for part in told if isinstance(part, str))
    assert len(tables) == 2 and "[kv_cache]" in words and "octavo serve MODEL" in words
    assert all(reason in words for reason in found[0].case["reasons"].splitlines())
    assert found[0].command == "octavo advise llama-3.1-8b --gpu h200 --context 32768"


@pytest.mark.slow
def test_the_demo_runs_to_its_end(tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "octavo", "demo", "-o", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stderr
    records = store.read(folder / "records.jsonl")
    by_op = {}
    for record in records:
        by_op.setdefault(record.op, []).append(record)
    assert list(by_op) == [
        *("calibrate", "chartqa", "quantize_error", "attention_error", "decode_error"),
        *("accumulation_error", "perplexity", "needle", "texts", "images", "advice"),
    ]
    recipes = {op: [r.case["recipe"] for r in by_op[op]] for op in ("chartqa", "perplexity")}
    assert recipes["chartqa"] == ["bf16", "fp8 dynamic", "fp8 static"]
    assert recipes["perplexity"] == ["float32", "fp8 tensor", "fp8 token"]
    assert all(r.values["recovery_percent"] > 90 for r in by_op["perplexity"][1:])
    assert [(r.case["length"], r.values["found_percent"]) for r in by_op["needle"]] == [
        *((1024, 100), (4096, 100)),
        *((1024, 100), (4096, 100)),
    ]
    needle = {
        (record.case["accumulation"], record.case["length"]): record.values["is_found"]
        for record in by_op["accumulation_error"]
    }
    assert needle["two-level", 131072] == 1 and needle["one-level", 131072] == 0
    assert all(
        record.values["relative_rms"] < 0.15
        for record in by_op["decode_error"]
        if record.case["recipe"] != "bf16"
    )
    assert all("seasons" in record.case["text"] for record in by_op["texts"])
    assert by_op["images"][1].values["psnr_db"] > 25
    assert all(r.values.get("speedup", 2) > 1.1 for r in by_op["advice"])
    assert len(load_scales(folder / "scales.json").layers) == 6
    page = (folder / "report.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == 2
    assert "Why accumulation has two levels" in page and "Not shown" not in page
    assert "report.html" in result.stdout
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    drawn = {name for name in names if name.startswith(("pictures/0_bf16/", "pictures/1_fp8/"))}
    pictures = {"pictures/charts.jpg", "pictures/compared_fp8.jpg", "pictures/sheet.png"}
    assert len(drawn) == 8
    assert names - drawn == {"records.jsonl", "report.html", "scales.json", "text.txt"} | pictures
