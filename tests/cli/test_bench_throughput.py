"""octavo bench throughput on a CPU, with tiny weights."""

import json
import shlex

import pytest

pytest.importorskip("transformers")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store
from octavo.measure.bench import engine

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

QUICK = ["--config", "tiny-gpt-oss", "--num-prompts", "4", "--input-len", "20", "--output-len", "4"]


def octavo(*arguments):
    return run(make_app(COMMANDS), ["bench", "throughput", *arguments])


def test_tables_and_records(capsys, tmp_path):
    file = tmp_path / "records.jsonl"
    rows = ["auto", "fp8", "fp8+skip=sliding_window"]
    options = [word for row in rows for word in ("--kv-cache-dtype", row)]
    limits = ["--max-concurrency", "2", "--range-ratio", "0.15"]
    limits += ["--output-json", str(tmp_path / "v.json")]
    assert octavo(*QUICK, *limits, *options, "-o", str(file)) == 0
    text = capsys.readouterr().out
    assert "4 requests, 2 at once, 20 tokens in and 4 out, ± 15 %" in text
    assert "auto: throughput" in text and "output tokens/s" in text
    assert text.count("Use FP8: ") == 1 and "quality not measured" in text
    records = store.read(file)
    assert [record.case["row"] for record in records] == rows
    assert records[2].case["skip_layers"] == "sliding_window"
    assert records[1].values["output_throughput_gain"] > 0
    results = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results.keys() == {f"v-{row}.json" for row in rows}
    values = records[1].values
    assert results["v-fp8.json"] == {
        "model_id": "tiny-gpt-oss",
        "elapsed_time": values["duration"],
        "num_requests": 4,
        "total_num_tokens": values["total_input_tokens"] + values["total_output_tokens"],
        "requests_per_second": values["request_throughput"],
        "tokens_per_second": values["total_token_throughput"],
    }


def test_the_command_of_a_record_repeats_it(capsys):
    assert octavo(*QUICK, "--kv-cache-dtype", "auto", "--num-warmups", "0", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    first = json.loads(line)
    assert octavo(*shlex.split(first["command"])[3:], "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["case"] == first["case"]


def test_a_row_that_is_wrong_ends_with_1(capsys, monkeypatch):
    monkeypatch.setitem(engine.MAX_ERROR, "e4m3", 1e-9)
    monkeypatch.setitem(engine.TIMES_PLAIN, "e4m3", 0)
    assert octavo(*QUICK) == 1
    assert "error: fp8 is wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--range-ratio", "1"], "expected a range ratio"),
        (["--kv-cache-dtype", "auto", "--kv-cache-dtype-skip-layers", "0"], "for rows in FP8"),
    ],
)
def test_what_is_refused(capsys, options, message):
    assert octavo(*QUICK, *options) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_default_prompt_leaves_room_for_the_answer(capsys, tmp_path):
    from octavo.demo.retrieval_model import make_tokenizer
    from octavo_testkit.models.text_models import make_decoder

    make_decoder("llama", max_position_embeddings=200).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    words = ["--num-prompts", "2", "--output-len", "160", "--kv-cache-dtype", "auto", "--json"]
    words += ["--max-num-batched-tokens", "32", "--device", "cpu"]  # fewer than --max-num-seqs
    assert octavo(str(tmp_path), *words) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["case"]["input_len"] == 40
