"""octavo bench encoder and octavo bench mm-processor on this machine."""

import json

import pytest

from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.transformers import vision_language
from octavo.measure import store

pytest.importorskip("transformers")


def octavo(*arguments):
    return run(make_app(COMMANDS), ["bench", *map(str, arguments)])


def test_encoder_prints_and_records(capsys, tmp_path):
    path = tmp_path / "records.jsonl"
    options = (
        "--config",
        "tiny",
        "--resolutions",
        "HD",
        "--images",
        1,
        "--recipes",
        "bf16,fused-bf16,dynamic",
    )
    assert octavo("encoder", *options, "-o", path) == 0
    text = capsys.readouterr().out
    records = store.read(path)
    assert [(r.impl, r.case["recipe"]) for r in records] == [
        ("sdpa", "bf16"),
        ("octavo", "fused-bf16"),
        ("octavo", "dynamic"),
    ]
    assert records[0].command == (
        "octavo bench encoder --config tiny --resolutions hd --images 1 "
        "--recipes bf16,fused-bf16,dynamic"
    )
    assert all({"speedup", "fused_speedup"} <= r.values.keys() for r in records)
    assert "tiny, random weights, 2 layers" in text and "transformers sdpa BF16" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resolutions", "8k"), "got '8k'"),
        (("--recipes", "int4"), "got int4"),
        (("--config", "huge"), "got 'huge'"),
        (("--layers", "9"), "got 9"),
        (("--output", "none/here.jsonl"), "existing folder"),
    ],
)
def test_encoder_refuses(capsys, options, message):
    assert octavo("encoder", "--config", "tiny", *options) == 1
    assert message in capsys.readouterr().err


def test_mm_processor_in_two_steps(capsys, tmp_path):
    scales, results = tmp_path / "scales.json", tmp_path / "results.json"
    small = ("--random-mm-bucket-config", "{(64, 64, 1): 1}", "--mm-encoder-attn-dtype", "fp8")
    saving = ("--num-prompts", 15, "--mm-encoder-fp8-scale-save-path", scales)
    assert octavo("mm-processor", *small, *saving) == 0
    text = capsys.readouterr().out
    assert "Multimodal Processor Benchmark Results" in text and "encoder_forward" in text
    assert "Summary: 15 total encoder calls across 15 requests." in text
    loading = ("--num-prompts", 2, "--mm-encoder-fp8-scale-path", scales)
    assert octavo("mm-processor", *small, *loading, "--output-json", results) == 0
    assert json.loads(results.read_text())["completed"] == 2


def test_mm_processor_looks_for_the_folder_of_its_results_first(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(vision_language, "open_vision_language", None)  # nothing is loaded
    for place, message in ((tmp_path / "gone" / "r.json", "folder for"), (tmp_path, "of a file")):
        assert octavo("mm-processor", "--output-json", place) == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_mm_processor_refuses(capsys, tmp_path):
    path = tmp_path / "scales.json"
    assert octavo("mm-processor", "--mm-encoder-fp8-scale-save-path", path) == 1
    assert "expected attention in fp8" in capsys.readouterr().err
    assert octavo("mm-processor", "--metric-percentiles", "most") == 1
    assert "expected percentiles" in capsys.readouterr().err
