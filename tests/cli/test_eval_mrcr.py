"""octavo eval mrcr: a local model and servers, to a table and records."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("transformers")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store
from octavo.measure.evaluate import mrcr as task
from octavo.measure.evaluate.mrcr_data import generated_questions
from octavo_testkit.models.text_models import make_decoder, save_decoder

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def octavo(*args):
    return run(make_app(COMMANDS), ["eval", "mrcr", *map(str, args)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = make_decoder("llama", vocab_size=258)
    return save_decoder(folder, model, has_bos=False, num_tokens=258, chat_template=TEMPLATE)


@contextlib.contextmanager
def chat_server(answer):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.reply({"data": [{"id": "served"}]})

        def do_POST(self):
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply({"choices": [{"message": {"content": answer(body)}}]})

        def reply(self, document):
            text = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_servers_are_rows(capsys, folder, tmp_path):
    answers = {q.messages[-1]["content"]: q.answer for q in generated_questions()}

    def know(body):
        assert body["temperature"] == 0 and body["model"] == "served" and body["max_tokens"] > 64
        return answers[body["messages"][-1]["content"]]

    path = tmp_path / "records.jsonl"
    with chat_server(know) as good, chat_server(lambda body: None) as bad:
        args = ("--endpoint", f"good={good}", "--endpoint", f"bad={bad}", "--tokenizer", folder)
        assert octavo(*args, "--temperature", 0, "-o", path) == 0
    records = store.read(path)
    whole = [r for r in records if r.case["bucket"] == "all"]
    assert [r.values["score_percent"] for r in whole] == [100, 0]
    assert whole[0].values["num_questions"] == 8 and whole[1].values["recovery_percent"] == 0
    assert len({r.case["bucket"] for r in records}) > 2
    # Nothing is right at any length.
    assert whole[1].values["is_shifted"] == 1 and whole[1].values["shift_points"] == -100
    said = capsys.readouterr().out
    assert "AUC@" in said and "bad is systematically lower than good: 1e+02 points" in said


def test_answers_are_drawn_with_a_seed_for_each_repetition(folder, tmp_path):
    answers = {q.messages[-1]["content"]: q.answer for q in generated_questions()}
    seeds: dict[str, set[int]] = {}

    def often(body):
        asked = body["messages"][-1]["content"]
        own = seeds.setdefault(asked, set())
        own.add(body["seed"])
        assert body["temperature"] == 0.7 and body["top_p"] == 0.8
        return answers[asked] if len(own) > 1 else "I forgot."

    path = tmp_path / "records.jsonl"
    with chat_server(often) as url:
        flags = ("--temperature", 0.7, "--top-p", 0.8, "--max-concurrency", 1, "-o", path)
        assert octavo("--endpoint", url, "--tokenizer", folder, *flags) == 0
    assert [len(own) for own in seeds.values()] == [5] * 8
    *_, whole = store.read(path)
    assert whole.case["repetitions"] == 5 and whole.case["temperature"] == 0.7
    assert whole.values["score_percent"] == 80 and whole.values["num_answers"] == 40
    assert whole.values["repetition_standard_error_percent"] == pytest.approx(
        100 * (0.2 / 5 / 8) ** 0.5
    )
    assert "--repetitions 5" in whole.command and "--temperature 0.7" in whole.command


def test_a_local_model_draws_in_the_engine(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(task, "SLACK_TOKENS", 2)
    path, data = tmp_path / "records.jsonl", small_chats(tmp_path / "chats.jsonl")
    rows = ("--data", data, "--recipe", "baseline", "--recipe", "token", "--num-pages", 64)
    drawn = ("--temperature", 0.9, "-r", 2, "-o", path)
    assert octavo(folder, *rows, *drawn) == 0
    records = store.read(path)
    assert [r.impl for r in records] == ["engine"] * 4
    assert records[0].case["repetitions"] == 2 and records[0].values["num_answers"] == 2
    assert len(records[2].case["recipe_digest"]) == 12
    assert octavo(folder, *rows, *drawn, "--resume") == 0 and store.read(path) == records
    assert octavo(folder, *rows, "-r", 2) == 1
    assert "greedy decoding, which repeats itself" in " ".join(capsys.readouterr().err.split())


def test_a_run_goes_on_with_its_records(folder, tmp_path, capsys):
    answers = {q.messages[-1]["content"]: q.answer for q in generated_questions()}
    asked, path = [], tmp_path / "records.jsonl"

    def know(body):
        asked.append(body)
        return answers[body["messages"][-1]["content"]]

    with chat_server(know) as good:
        args = ("--endpoint", f"good={good}", "--tokenizer", folder, "-o", path)
        assert octavo(*args) == 0
        records = store.read(path)
        assert len(asked) == 40 and records[0].case["tokenizer"] == str(folder)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:-2]))  # as if it had been stopped before its last bucket
        del asked[:]
        assert octavo(*args, "--resume") == 0
        again = store.read(path)
        assert 0 < len(asked) == again[-2].values["num_answers"] < 40
        assert [(r.case, r.values) for r in again] == [(r.case, r.values) for r in records]
        assert octavo(*args, "--resume") == 0 and store.read(path) == again
        assert octavo(*args) == 0 and len(store.read(path)) == 2 * len(again)
    assert "MRCR score" in capsys.readouterr().out


def small_chats(path):
    """Chats that fit a context of 1024 bytes."""
    request = {"role": "user", "content": "write a poem about tapirs"}
    chat = [request, {"role": "assistant", "content": "Tapirs walk."}, request]
    row = {"prompt": chat, "answer": "xyTapirs walk.", "random_string_to_prepend": "xy"}
    path.write_text(json.dumps({**row, "n_needles": 2}) + "\n")
    return path


def test_a_local_model_in_its_own_dtype_and_fp8(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(task, "SLACK_TOKENS", 2)
    path, data = tmp_path / "records.jsonl", small_chats(tmp_path / "chats.jsonl")
    rows = ("--recipe", "baseline", "--recipe", "token")
    assert octavo(folder, "--data", data, *rows, "-o", path) == 0
    records = store.read(path)
    names = list(dict.fromkeys(r.case["recipe"] for r in records))
    assert names == ["float32", "fp8 token"]
    assert "recipe_digest" not in records[0].case and len(records[2].case["recipe_digest"]) == 12
    assert octavo(folder, "--data", data, *rows, "-o", path, "--resume") == 0
    assert store.read(path) == records
    assert [r.case["bucket"] for r in records[:2]] == [2048, "all"]
    assert records[0].case["data"] == "chats.jsonl" and records[0].case["max_length"] == 1024
    assert octavo(folder, "--data", data, "--max-length", "4k", *rows) == 1
    assert "expected --max-length up to 1024" in capsys.readouterr().err
    assert octavo(folder, *rows) == 1
    assert "expected questions of up to 1024 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_static_scales_are_calibrated_on_generated_chats(folder, tmp_path):
    data = small_chats(tmp_path / "chats.jsonl")
    rows = ("--recipe", "baseline", "--recipe", "head+rotate+center", "--recipe", "tensor")
    assert octavo(folder, "--data", data, *rows, "-o", tmp_path / "records.jsonl") == 0
    assert len(store.read(tmp_path / "records.jsonl")) == 6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected a MODEL or --endpoint"),
        (("m", "--endpoint", "http://x"), "expected a MODEL or --endpoint"),
        (("--endpoint", "http://x"), "--endpoint needs --tokenizer"),
        (("m", "--recipe", "unit", "--resume"), "--resume goes on with the records of --output"),
        (("--endpoint", "http://x", "--recipe", "unit"), "--recipe is for a model"),
        (("m", "--recipe", "unit", "--scales", "s.json"), "which are not asked for"),
        (("m", "--data", "nowhere.jsonl", "--recipe", "unit"), "expected a path or a data set"),
    ],
)
def test_what_cannot_be_is_said(capsys, args, message, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def fail(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert octavo(*args) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_tokenizer_without_a_chat_template_is_refused(capsys, tmp_path):
    model = make_decoder("llama", vocab_size=258)
    save_decoder(tmp_path, model, has_bos=False, num_tokens=258, chat_template=None)
    assert octavo(tmp_path, "--recipe", "baseline") == 1
    told = capsys.readouterr().err
    assert "the model has no chat template" in told and "--chat-template FILE" in told


def test_a_chat_template_for_a_model_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "SLACK_TOKENS", 2)
    model = make_decoder("llama", vocab_size=258, num_hidden_layers=1)
    save_decoder(tmp_path, model, has_bos=False, num_tokens=258, chat_template=None)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    path, data = tmp_path / "records.jsonl", small_chats(tmp_path / "chats.jsonl")
    args = (tmp_path, "--recipe", "baseline", "--data", data, "-o", path)
    assert octavo(*args, "--chat-template", tmp_path / "chat.jinja") == 0
    # Prompts with BOS are others: --resume does not take the answers to those without.
    assert octavo(*args, "--chat-template", TEMPLATE, "--add-bos", "--resume") == 0
    first, _, second, _ = store.read(path)
    assert first.case["chat_template"] == second.case["chat_template"]
    assert second.case["add_bos"] is True and "--add-bos" in second.command
