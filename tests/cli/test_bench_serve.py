"""octavo bench serve: against a scripted server, and against one that it starts itself."""

import json

import pytest

pytest.importorskip("httpx")
from octavo.cli.main import COMMANDS, make_app, run
from octavo.errors import OctavoError
from octavo.measure import store
from octavo.measure.bench.serving import own_server
from octavo_testkit.serving.scripted_server import scripted

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


def test_a_data_set_a_ramp_and_goodput(tmp_path, capsys):
    data, file = tmp_path / "own.jsonl", tmp_path / "records.jsonl"
    data.write_text('{"prompt": "hello", "output_tokens": 3}\n' * 4)
    options = ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "4"]
    options += ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100"]
    options += ["--ramp-up-end-rps", "200", "--goodput", "ttft:60000,tpot:60000"]
    with scripted() as server:
        assert octavo("--base-url", server.url, *options, "-o", str(file)) == 0
    assert {body["prompt"] for body in server.bodies} == {"hello"}
    assert "Request goodput (req/s)" in capsys.readouterr().out
    (record,) = store.read(file)
    assert record.case["dataset_file"] == "own.jsonl" and record.case["output_len"] == 3
    assert record.case["ramp_up"] == "linear 100 to 200 per second"
    assert record.values["request_goodput"] == record.values["request_throughput"]
    assert "--dataset-name custom --dataset-path own.jsonl" in record.command


def test_random_images_go_to_chat(capsys):
    pytest.importorskip("PIL")
    options = ["--dataset-name", "random-mm", "--random-mm-bucket-config", "{(8, 8, 1): 1}"]
    with scripted() as server:
        assert octavo("--base-url", server.url, *QUICK, *options, "--json") == 0
    assert set(server.paths) == {"/v1/chat/completions"}
    record = json.loads(capsys.readouterr().out)
    assert record["case"]["dataset"] == "random-mm" and record["values"]["completed"] == 4


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
        (["m", "--ramp-up-strategy", "linear"], "a ramp needs --ramp-up-strategy"),
        (["m", "--goodput", "ttft"], "expected --goodput such as ttft:200"),
        (["m", "--goodput", "itl:3"], "expected limits above 0 ms of ttft"),
        (["m", "--dataset-name", "hf"], "expected a data set of random, sharegpt"),
        (["m", "--dataset-name", "custom"], "expected a --dataset-path for sharegpt and custom"),
        (["m", "--custom-output-len", "3"], "is for --dataset-name custom, got random"),
        (["m", "--backend", "openai-chat"], "random prompts are tokens"),
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
    from octavo_testkit.models.text_models import save_decoder
    from octavo_testkit.serving.tiny_engine import make_model

    save_decoder(tmp_path / "model", make_model())
    file = tmp_path / "records.jsonl"
    options = ["--vocab-size", "257", "-o", str(file), "--", "--kv-cache-dtype", "fp8"]
    assert octavo(str(tmp_path / "model"), *QUICK, *options) == 0
    (record,) = store.read(file)
    assert record.impl == "octavo" and record.values["completed"] == 4
    assert record.values["total_output_tokens"] == 16
    assert record.case["server_options"] == "--kv-cache-dtype fp8"
    assert record.command.endswith("-- --kv-cache-dtype fp8")


@pytest.mark.slow
def test_images_to_a_server_of_its_own(tmp_path):
    """A small reader of charts; vLLM's file has the fields, and images count as tokens."""
    for package in ("fastapi", "transformers", "PIL"):
        pytest.importorskip(package)
    from octavo.demo.chart_reader import make_chart_reader, save_chart_reader

    save_chart_reader(make_chart_reader(["How", "many", "bars", "?"]), tmp_path / "model")
    options = ["--dataset-name", "random-mm", "--random-mm-bucket-config", "{(64, 64, 1): 1}"]
    options += ["--result-dir", str(tmp_path), "--result-filename", "r.json", "--save-detailed"]
    assert octavo(str(tmp_path / "model"), *QUICK, *options) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["backend"] == "openai-chat" and result["completed"] == 4
    assert min(result["input_lens"]) > 4 and result["output_lens"] == [4] * 4
