"""octavo bench serve: against a scripted server, and against one that it starts itself."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx")
sys.path.insert(0, str(Path(__file__).parents[1] / "measure" / "bench"))
from scripted_server import scripted

from octavo.cli.main import COMMANDS, make_app, run
from octavo.errors import OctavoError
from octavo.measure import store
from octavo.measure.bench.own_server import own_server

QUICK = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "4"]
QUICK += ["--max-concurrency", "2"]


def octavo(*arguments):
    return run(make_app(COMMANDS), ["bench", "serve", *arguments])


def test_lines_record_and_vllm_s_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "records.jsonl"
    with scripted() as server:
        files = ["-o", str(file), "--save-result", "--metadata", "gpu=none"]
        assert octavo("--base-url", server.url, *QUICK, *files) == 0
    text = capsys.readouterr().out
    assert "Successful requests" in text and "Output token throughput (tok/s)" in text
    assert "TTFT" in text and "E2EL" in text and "parts" not in text
    (record,) = store.read(file)
    assert record.values["completed"] == 4 and server.url in record.command
    (path,) = tmp_path.glob("openai-infqps-concurrency2-scripted-*.json")
    result = json.loads(path.read_text())
    assert result["gpu"] == "none" and result["completed"] == 4 and "ttfts" not in result


def test_a_name_and_details_for_the_file(tmp_path, capsys):
    with scripted(["pairs"] * 5) as server:
        files = ["--result-dir", str(tmp_path), "--result-filename", "r.json", "--save-detailed"]
        assert octavo("--base-url", server.url, *QUICK, *files) == 0
    assert len(json.loads((tmp_path / "r.json").read_text())["ttfts"]) == 4
    assert "16 tokens came in 8 parts" in capsys.readouterr().out


def test_a_request_that_fails_ends_with_1(capsys):
    with scripted(["good", "refused"]) as server:
        assert octavo("--base-url", server.url, *QUICK, "--json") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["values"]["failed"] == 1
    assert "1 of 4 requests failed; the first: status 429" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected a model or --base-url"),
        (["m", "--base-url", "http://x"], "expected a model or --base-url"),
        (["m", "--metadata", "x"], "expected --metadata KEY=VALUE"),
        (["m", "--metric-percentiles", "x"], "expected percentiles"),
        (["m", "--request-rate", "0"], "expected a request rate"),
        (["--base-url", "http://x", "--", "m", "--kv-cache-dtype"], "expected a model or --base"),
    ],
)
def test_what_is_refused_before_anything_starts(capsys, options, message):
    assert octavo(*options) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_server_that_cannot_start_has_its_last_words_heard():
    pytest.importorskip("fastapi")
    with (
        pytest.raises(OctavoError, match=r"expected octavo serve to start, but it ended.*flavour"),
        own_server(["model", "--kv-cache-dtype", "flavour"]),
    ):
        pass


@pytest.mark.slow
def test_a_server_of_its_own(tmp_path, capsys):
    pytest.importorskip("fastapi")
    pytest.importorskip("transformers")
    sys.path.insert(0, str(Path(__file__).parents[1] / "serving" / "engine"))
    from tiny_engine import make_model, save_decoder

    save_decoder(tmp_path / "model", make_model())
    file = tmp_path / "records.jsonl"
    options = ["--vocab-size", "257", "-o", str(file), "--", "--kv-cache-dtype", "fp8"]
    assert octavo(str(tmp_path / "model"), *QUICK, *options) == 0
    (record,) = store.read(file)
    assert record.impl == "octavo" and record.values["completed"] == 4
    assert record.values["total_output_tokens"] == 16
    assert record.case["server_options"] == "--kv-cache-dtype fp8"
    assert record.command.endswith("-- --kv-cache-dtype fp8")
