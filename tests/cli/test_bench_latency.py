"""octavo bench latency on a CPU, with tiny weights."""

import json
import re
import shlex

import pytest

pytest.importorskip("transformers")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store
from octavo.measure.bench import engine

QUICK = ["--config", "tiny", "--output-len", "3", "--num-iters", "1", "--num-iters-warmup", "0"]


def octavo(*arguments):
    return run(make_app(COMMANDS), ["bench", "latency", *arguments])


@pytest.mark.slow
def test_tables_records_a_plot_and_vllm_s_files(capsys, tmp_path):
    file = tmp_path / "records.jsonl"
    options = ["--plot", str(tmp_path / "p.html"), "--output-json", str(tmp_path / "v.json")]
    assert octavo(*QUICK, "--input-len", "5,20,40,0.25k", "-o", str(file), *options) == 0
    text = capsys.readouterr().out
    assert "To the first token: 1 at once, 3 tokens out" in text
    assert "slope (µs per 1k tokens)" in text and re.search(
        "ITL: fp8 is .*faster.* than auto", text
    )
    assert re.search("TTFT: fp8 is .*faster.* than auto, by the curves between", text)
    assert "TTFT over the input: a · tokens² + b · tokens + c; in brackets intervals" in text
    records, lengths = store.read(file), (5, 20, 40, 256)
    assert [(r.op, r.case["row"], r.case.get("input_len")) for r in records] == [
        (op, row, length)
        for row in ("auto", "fp8")
        for op, length in [
            *(("latency", one) for one in lengths),
            ("latency_fit", None),
            ("ttft_fit", None),
        ]
    ]
    assert records[0].case["page_size"] == 64
    words = shlex.split(records[0].command)
    assert words[:5] == ["octavo", "bench", "latency", "--config", "tiny"]
    assert words.count("--kv-cache-dtype") == 2
    page = (tmp_path / "p.html").read_text()
    assert "Time between tokens over the input length" in page and "octavo bench latency" in page
    assert 'src="http' not in page and "<link" not in page
    names = {f"v-{row}-{length}.json" for row in ("auto", "fp8") for length in lengths}
    assert {file.name for file in tmp_path.glob("*.json")} == names
    result = json.loads((tmp_path / "v-fp8-256.json").read_text())
    assert result["model_id"] == "tiny" and len(result["latencies"]) == 1


def test_the_command_of_a_record_repeats_it(capsys):
    options = ["--input-len", "5", "--kv-cache-dtype", "fp8+unit+skip=0", "--page-size", "16"]
    assert octavo(*QUICK, *options, "--enforce-eager", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    first = json.loads(line)
    assert octavo(*shlex.split(first["command"])[3:], "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    again = json.loads(line)
    assert again["case"] == first["case"] and again["command"] == first["command"]
    assert first["case"]["skip_layers"] == "0" and first["case"]["page_size"] == 16


def test_a_row_that_is_wrong_ends_with_1_and_the_others_stay(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(engine.MAX_ERROR, "e4m3", 1e-9)
    monkeypatch.setitem(engine.TIMES_PLAIN, "e4m3", 0)
    file = tmp_path / "records.jsonl"
    assert octavo(*QUICK, "--input-len", "5", "-o", str(file)) == 1
    captured = capsys.readouterr()
    assert "error: fp8 is wrong" in captured.err and "auto" in captured.out
    assert [record.case["row"] for record in store.read(file)] == ["auto"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input-len", "5,k"], "expected a number of tokens"),
        (["--kv-cache-dtype", "int4"], "row int4: expected words out of"),
        (["model", "--config", "tiny"], "expected a model or a config"),
        (["--config", "huge"], "expected one of llama-3.1-8b"),
        (["-o", "/nowhere/x.jsonl"], "expected an existing folder"),
        (["--plot", "/nowhere/x.html"], "expected an existing folder"),
        (["--input-len", "5000"], "expected max_context up to 4096"),
        (["--plug-in"], "--plug-in: expected vLLM in the folder of --peers, got none"),
        (["--plug-in", "--peers", "/"], "--plug-in: expected vLLM in the folder of --peers, got /"),
    ],
)
def test_what_is_refused(capsys, options, message):
    assert octavo(*options) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_help_teaches(capsys):
    assert octavo("--help") == 0
    text = capsys.readouterr().out
    assert "--config llama-3.1-8b" in text and "break-even" in text


def test_default_lengths_end_at_the_context_of_the_model(capsys, tmp_path):
    from octavo.demo.retrieval_model import make_tokenizer
    from octavo_testkit.models.text_models import make_decoder

    make_decoder("llama", max_position_embeddings=300).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    options = ["--output-len", "3", "--num-iters", "1", "--num-iters-warmup", "0", "--json"]
    assert octavo(str(tmp_path), *options, "--kv-cache-dtype", "auto", "--device", "cpu") == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["case"]["input_len"] == 64 and "--input-len 64 " in record["command"] + " "


def test_a_batch_larger_than_the_tokens_of_a_pass_is_no_error_by_default():
    from octavo.cli.model_options import EngineOptions

    settings = EngineOptions(enforce_eager=True).settings(max_num_seqs=5000)
    assert settings.max_num_batched_tokens == 5000
