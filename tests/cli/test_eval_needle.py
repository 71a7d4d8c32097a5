"""octavo eval needle: the retrieval model, models of text and servers, to a table and records."""

import contextlib
import html
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("transformers")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.demo import retrieval_model as built
from octavo.measure import store
from octavo.measure.evaluate import language
from octavo_testkit.models.text_models import make_decoder, save_decoder

SMALL = ("--lengths", "64,150", "--depths", "0,1", "-n", "1")


def octavo(*args):
    return run(make_app(COMMANDS), ["eval", "needle", *map(str, args)])


@contextlib.contextmanager
def server(answer):
    """A server whose completion of a prompt is answer(prompt)."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.reply(200, {"data": [{"id": "served"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append((self.path, body, self.headers.get("Authorization")))
            found = answer(body["prompt"])
            if found is None:
                self.reply(500, {"error": "out of order"})
            else:
                self.reply(200, {"choices": [{"text": found}]})

        def reply(self, status, document):
            text = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    bodies = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", bodies
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def look_up(text):
    words = text.split()
    return " " + words[words.index(words[-1]) + 1]


def test_the_retrieval_model_on_a_cpu(capsys, tmp_path):
    path, page = tmp_path / "records.jsonl", tmp_path / "page.html"
    assert octavo(*SMALL, "-o", path, "--plot", page) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "needles found (%): retrieval-model, pairs, depths: 2, repetitions: 1" in text
    records = store.read(path)
    assert [r.case["recipe"] for r in records] == ["bf16"] * 4 + ["fp8 unit"] * 4
    assert all(r.op == "needle" and r.values["found_percent"] == 100 for r in records)
    assert records[-1].values["recovery_percent"] == 100 and records[-1].baseline == "bf16"
    assert "fp8 unit finds 100 % at every length and depth." in page.read_text()
    assert "Use FP8: it depends: check the quality." in text  # four needles prove little
    assert "quality 100.0 % (4 of 4 needles)" in text
    # The command repeats the search, and the records are all that --resume leaves of it.
    words = records[0].command.split()
    assert run(make_app(COMMANDS), [*words[1:], "-o", str(path), "--resume"]) == 0
    assert store.read(path) == records


def test_cells_survive_a_crash_and_are_resumed(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    answer_text, count = language.answer_text, iter(range(10))

    def fail_later(*args, **options):
        if next(count) == 5:
            raise KeyboardInterrupt
        return answer_text(*args, **options)

    monkeypatch.setattr(language, "answer_text", fail_later)
    assert octavo(*SMALL, "-o", path) == 130
    assert len(store.read(path)) == 5
    monkeypatch.setattr(language, "answer_text", answer_text)
    assert octavo(*SMALL, "-o", path, "--resume") == 0
    records = store.read(path)
    assert [r.case["recipe"] for r in records] == ["bf16"] * 4 + ["fp8 unit"] * 4


def test_rows_with_scales_calibrate_on_other_haystacks(capsys):
    rows = ("--recipe", "tensor", "--recipe", "head+rotate+promote=2")
    assert octavo("--lengths", "64", "--depths", "0.5", "-n", "1", *rows) == 0
    text = capsys.readouterr().out
    assert "fp8 tensor" in text and "fp8 head+rotate+promote=2" in text


@pytest.mark.slow
def test_one_level_is_a_row(capsys):
    rows = ("--recipe", "baseline", "--recipe", "unit+promote=none")
    assert octavo("--lengths", "200", "--depths", "0.5", "-n", "1", *rows) == 0
    assert "fp8 unit+promote=none" in capsys.readouterr().out


def test_a_model_of_text(capsys, tmp_path):
    save_decoder(tmp_path, make_decoder("llama", vocab_size=258), has_bos=False, num_tokens=258)
    (tmp_path / "text").write_text("Books in octavo have eight leaves to the sheet. " * 20)
    path = tmp_path / "records.jsonl"
    args = ("--lengths", "400", "--depths", "0.5", "-n", "1", "--recipe", "baseline", "-o", path)
    assert octavo(tmp_path, *args, "--num-keys", 2, "--data", tmp_path / "text") == 0
    (record,) = store.read(path)
    assert record.case["haystack"] == "text" and record.case["num_keys"] == 2
    assert record.values["found_percent"] == 0  # its weights are random
    assert octavo(tmp_path, "--lengths", "1M", "--recipe", "baseline") == 1
    assert "for which" in capsys.readouterr().err


def test_servers_are_rows(tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    with server(look_up) as (good, bodies), server(lambda text: "nothing") as (bad, _):
        words = ("--endpoint", f"good={good}/v1", "--endpoint", f"bad={bad}", "--api-key", "k")
        assert octavo(*SMALL, *words, "-o", path) == 0
    records = store.read(path)
    assert [r.values["found_percent"] for r in records] == [100] * 4 + [0] * 4
    assert records[0].impl == "http" and records[0].case["model"] == "served"
    assert records[4].values["recovery_percent"] == 0
    endpoint, body, key = bodies[0]
    assert endpoint == "/v1/completions" and key == "Bearer k"
    assert body["model"] == "served" and body["max_tokens"] == 1 and body["temperature"] == 0
    assert len(body["prompt"].split()) == 64
    assert "good" in capsys.readouterr().out and "--api-key" not in records[0].command


def test_texts_for_a_server_have_the_length_that_its_tokenizer_counts(tmp_path):
    save_decoder(tmp_path, make_decoder("llama", vocab_size=258), has_bos=False, num_tokens=258)
    with server(lambda text: "") as (url, bodies):
        args = ("--endpoint", url, "--tokenizer", tmp_path, "--lengths", "500", "--depths", "1")
        assert octavo(*args, "-n", "1") == 0
    assert bodies[0][1]["max_tokens"] == 12
    assert 400 < len(bodies[0][1]["prompt"].encode()) <= 488


def test_a_server_that_fails_ends_the_search(capsys):
    with server(lambda text: None) as (url, _):
        assert octavo(*SMALL, "--endpoint", url) == 1
    assert "status 500" in capsys.readouterr().err
    assert octavo(*SMALL, "--endpoint", "http://127.0.0.1:9") == 1
    assert "expected an answer from http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.slow
def test_the_retrieval_model_through_our_server(tmp_path):
    from octavo.measure.bench.serving import own_server

    built.save_retrieval_model(tmp_path / "model")
    path = tmp_path / "records.jsonl"
    arguments = [str(tmp_path / "model"), "--kv-cache-dtype", "fp8", "--max-model-len", "512"]
    with own_server(arguments) as url:
        assert octavo(*SMALL, "--endpoint", f"fp8={url}", "-o", path) == 0
    assert [r.values["found_percent"] for r in store.read(path)] == [100] * 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--endpoint", "localhost"), "expected a URL such as"),
        (("m", "--endpoint", "http://x"), "expected a MODEL or --endpoint"),
        (("--tokenizer", "t"), "--tokenizer is for --endpoint"),
        (("--data", "t"), "--data is a text to hide needles in"),
        (("--depths", "start"), "expected depths such as"),
        (("--lengths", "long"), "expected a number of tokens"),
        (("--api-key", "k"), "are for --endpoint"),
        (("--resume",), "--resume goes on with the records of --output"),
        (("--recipe", "unit", "--scales", "s.json"), "which are not asked for"),
        (("--recipe", "tensr"), "row tensr: expected words out of"),
    ],
)
def test_what_cannot_be_is_said(capsys, args, message):
    assert octavo(*args) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_default_lengths_end_at_the_context(tmp_path):
    model = make_decoder("llama", vocab_size=258, num_hidden_layers=1, max_position_embeddings=1500)
    save_decoder(tmp_path, model, has_bos=False, num_tokens=258)
    path = tmp_path / "records.jsonl"
    args = ("--depths", "0.5", "-n", "1", "--recipe", "baseline", "-o", path)
    assert octavo(tmp_path, *args, "--plot", tmp_path / "page.html") == 0
    (record,) = store.read(path)
    assert record.case["length"] == 1024 and "--lengths 1024 " in record.command
    assert record.command in html.unescape((tmp_path / "page.html").read_text())


def test_add_bos_is_for_texts(capsys):
    assert octavo(*SMALL, "--add-bos") == 1
    assert "--add-bos is for prompts of text" in capsys.readouterr().err
