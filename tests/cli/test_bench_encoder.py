"""octavo bench encoder and octavo bench mm-processor on this machine."""

import json
import re
import shlex
from pathlib import Path

import pytest

from octavo.calibration.scale_file import load_scales
from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.transformers import vision_language
from octavo.integrations.transformers.vision_language import TinyModel
from octavo.measure import store
from octavo.measure.bench import requests
from octavo.measure.bench.cases import RESOLUTIONS

pytest.importorskip("transformers")


def octavo(*arguments):
    return run(make_app(COMMANDS), ["bench", *map(str, arguments)])


@pytest.fixture
def small_hd(monkeypatch):
    """A CPU takes a while over images of that size."""
    monkeypatch.setitem(RESOLUTIONS, "hd", (180, 320))


def test_encoder_prints_and_records(small_hd, capsys, tmp_path):
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


def test_encoder_records_that_peers_were_there_but_not_where(small_hd, tmp_path):
    path, folder = tmp_path / "records.jsonl", tmp_path / "peers"
    folder.mkdir()
    options = ("--config", "tiny", "--resolutions", "hd", "--images", 1, "--recipes", "bf16")
    assert octavo("encoder", *options, "--peers", folder, "-o", path) == 0
    (record,) = store.read(path)
    assert record.command == (
        "octavo bench encoder --config tiny --resolutions hd --images 1 --recipes bf16 "
        "--peers FOLDER"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resolutions", "8k"), "got '8k'"),
        (("--recipes", "int4"), "got 'int4'"),
        (("--config", "huge"), "got 'huge'"),
        (("--layers", "9"), "got 9"),
        (("--output", "none/here.jsonl"), "existing folder"),
    ],
)
def test_encoder_refuses(capsys, options, message):
    assert octavo("encoder", "--config", "tiny", *options) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_two_steps_of_the_docs(capsys, tmp_path, monkeypatch):
    """As they stand there, one after the other; only the images are small here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requests, "BUCKETS", {(64, 64, 1): 1.0})
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "vision-encoder.md").read_text()
    commands = re.findall(r"^octavo (bench mm-processor .*)$", page, flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert run(make_app(COMMANDS), shlex.split(command)) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert printed.count("(ms): chart reader") == 2 and "Scales: scales.json" in printed
    assert load_scales(tmp_path / "scales.json").header.passes >= 16


def test_mm_processor_takes_a_model_as_vllm_does(capsys, monkeypatch):
    """By --model or without it, a folder or a name; --disable-tqdm leaves the bar out."""
    opened = []

    def open_tiny(model, device):
        opened.append(model)
        return TinyModel(device)

    monkeypatch.setattr(vision_language, "open_vision_language", open_tiny)
    small = ("--random-mm-bucket-config", "{(64, 64, 1): 1}", "--num-prompts", 1)
    name = "Qwen/Qwen3-VL-8B-Instruct"
    for given in (("--model", name), (name,), (name, "--model", name)):
        assert octavo("mm-processor", *given, *small) == 0
    assert "requests" in capsys.readouterr().err
    assert octavo("mm-processor", "--model", "folder", *small, "--disable-tqdm") == 0
    assert "requests" not in capsys.readouterr().err
    assert opened == [name, name, name, "folder"]
    assert octavo("mm-processor", "one", "--model", "other", *small) == 1
    assert "expected one model, got one and --model other" in capsys.readouterr().err
    assert len(opened) == 4


def test_mm_processor_looks_for_the_folder_of_its_results_first(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(vision_language, "open_vision_language", None)  # nothing is loaded
    for place, message in ((tmp_path / "gone" / "r.json", "folder for"), (tmp_path, "of a file")):
        assert octavo("mm-processor", "--output-json", place) == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_mm_processor_refuses(capsys, tmp_path):
    path = tmp_path / "scales.json"
    assert octavo("mm-processor", "--mm-encoder-fp8-scale-save-path", path) == 1
    assert "expected attention in fp8" in capsys.readouterr().err
    assert octavo("mm-processor", "--graph-budgets", "many") == 1
    assert "expected budgets such as 1024,4096; got 'many'" in capsys.readouterr().err
    assert octavo("mm-processor", "--metric-percentiles", "most") == 1
    assert "expected percentiles" in capsys.readouterr().err
