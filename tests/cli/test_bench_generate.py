"""octavo bench generate on a CPU, with tiny weights."""

import json

import pytest

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store

pytest.importorskip("transformers")


def octavo(*arguments):
    return run(make_app(COMMANDS), ["bench", "generate", *arguments])


def test_a_table_and_records(capsys, tmp_path):
    file = tmp_path / "records.jsonl"
    options = ["--context", "64,100", "--recipes", "bf16,fp8", "--layers", "1", "-o", str(file)]
    assert octavo(*options) == 0
    text = capsys.readouterr().out
    assert "1 × 64 tokens; baseline: bf16" in text and "cache ratio" in text
    assert "Use FP8: " in text and "memory 0.5" in text and "(KV cache)" in text
    records = store.read(file)
    assert [(r.case["context"], r.case["recipe"]) for r in records] == [
        (length, recipe) for length in (64, 100) for recipe in ("bf16", "fp8")
    ]
    assert records[0].case["layers"] == 1 and "--context 64" in records[0].command


def test_json(capsys):
    options = ["--context", "10", "--recipes", "bf16", "--layers", "1", "--json"]
    assert octavo(*options) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["op"] == "generate"


def test_a_context_that_is_no_number(capsys):
    assert octavo("--context", "64,k") == 1
    assert "expected a number of tokens" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:the model brings no scales")
def test_calls_of_generate(capsys, tmp_path):
    file = tmp_path / "records.jsonl"
    options = ["--calls", "--context", "12", "--recipes", "stock,kv", "--layers", "1"]
    assert octavo(*options, "-o", str(file)) == 0
    assert "1 × 12 tokens; baseline: stock" in capsys.readouterr().out
    records = store.read(file)
    assert [(r.op, r.case["recipe"]) for r in records] == [
        ("generate_call", "stock"),
        ("generate_call", "kv"),
    ]
    assert "--calls" in records[0].command


def test_linear_layers_are_for_calls(capsys):
    assert octavo("--recipes", "bf16,linear", "--layers", "1") == 1
    assert "linear layers take part in calls of generate() alone" in capsys.readouterr().err
