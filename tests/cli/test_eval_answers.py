"""octavo eval choice and math: a local model in the engine, and servers."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")


from octavo.cli.main import COMMANDS, make_app, run
from octavo.errors import UnsupportedError
from octavo.measure import store
from octavo.measure.evaluate.code_data import generated_problems
from octavo.measure.evaluate.sandbox import check_sandbox
from octavo.measure.evaluate.task_data import (
    generated_choice_questions,
    generated_math_questions,
)
from octavo_testkit.models.text_models import make_decoder, save_decoder
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import listening

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def octavo(*args):
    return run(make_app(COMMANDS), ["eval", *map(str, args)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = make_decoder("llama", vocab_size=258, num_hidden_layers=1)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.5
    model.generation_config.top_k = 7
    return save_decoder(folder, model, has_bos=False, num_tokens=258, chat_template=TEMPLATE)


def write_program(problem, *, is_wrong):
    """A solution of a generated problem."""
    factor, _, more = problem.text.rstrip(".").partition("times ")[2].partition(", plus ")
    more += " + 1" * is_wrong
    if problem.function:
        body = f"{problem.starter}\n        return {factor} * sum(numbers) + {more}"
    else:
        body = f"input()\nprint({factor} * sum(map(int, input().split())) + {more})"
    return f"<think>```python\npass\n```</think>Here it is.\n```python\n{body}\n```"


class Pupil(FakeEngine):
    """Knows the generated questions; thinks before it answers, and may be lazy."""

    is_lazy = False

    def _text(self, request, prompt):
        for question in generated_choice_questions():
            if question.text in prompt:
                lines = [line for line in prompt.splitlines() if line.endswith(question.answer)]
                is_late = self.is_lazy and "smith" in question.text
                letter = "Z" if is_late else lines[0][0]
                return f"<think>Answer: A, or so</think>Well.\n**Answer: {letter}**"
        for problem in generated_problems():
            if problem.text in prompt:
                return write_program(problem, is_wrong=self.is_lazy)
        found = [q.answer for q in generated_math_questions() if q.text in prompt]
        return f"It is $\\boxed{{{found[0]}}}$."


class LazyPupil(Pupil):
    is_lazy = True


def test_choice_through_our_own_servers(capsys, tmp_path):
    path, answers = tmp_path / "records.jsonl", tmp_path / "answers.jsonl"
    with listening(Pupil()) as (good, engine, _), listening(LazyPupil()) as (lazy, _, _):
        ends = ("--endpoint", f"good={good}", "--endpoint", f"lazy={lazy}/v1")
        flags = ("-n", 5, "-r", 2, "--temperature", 0.7, "--top-k", 5, "--max-tokens", 200)
        assert octavo("choice", *ends, *flags, "-o", path, "--answers", answers) == 0
        assert len(engine.added) == 10
        sampling = engine.added[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.7, 5, 200)
        assert len({request.sampling.seed for request in engine.added}) == 10
        assert octavo("choice", *ends, *flags, "--answers", answers, "--resume") == 0
        assert len(engine.added) == 10
    first, second = store.read(path)
    assert first.values["score_percent"] == 100 and first.impl == "http"
    late = sum("smith" in q.text for q in generated_choice_questions()[:5])
    assert second.values["num_unparsed"] == 2 * late > 0
    assert second.values["recovery_percent"] == pytest.approx(100 * (5 - late) / 5)
    assert second.case["repetitions"] == 2 and second.case["temperature"] == 0.7
    assert "--endpoint" in first.command and "--top-k 5" in first.command
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 20 and {line["row"] for line in lines} == {"good", "lazy"}
    assert "pass@1" in capsys.readouterr().out


def test_math_through_our_own_server(tmp_path):
    pytest.importorskip("math_verify")
    path = tmp_path / "records.jsonl"
    with listening(Pupil()) as (url, engine, _):
        assert octavo("math", "--endpoint", url, "-n", 6, "-o", path) == 0
        assert len(engine.added) == 6
        assert octavo("math", "--endpoint", url, "-n", 2, "--max-tokens", 3, "-o", path) == 0
    first, second = store.read(path)
    assert first.values["score_percent"] == 100 and first.case["checker"].startswith("math-verify")
    assert first.case["sampling"] == "server" and first.case["max_tokens"] == "context"
    assert second.values["num_cut"] == second.values["num_unparsed"] == 2
    assert second.values["score_percent"] == 0


def test_programs_through_our_own_servers(tmp_path, capsys):
    try:
        check_sandbox()
    except UnsupportedError:
        pytest.skip("no namespaces for this user: programs are refused here")
    path, answers = tmp_path / "records.jsonl", tmp_path / "answers.jsonl"
    with listening(Pupil()) as (good, engine, _), listening(LazyPupil()) as (lazy, _, _):
        ends = ("--endpoint", f"good={good}", "--endpoint", f"lazy={lazy}")
        flags = ("-n", 2, "-r", 2, "--answers", answers, "-o", path)
        assert octavo("code", *ends, *flags) == 1
        assert "add --allow-code" in capsys.readouterr().err and engine.added == []
        assert octavo("code", *ends, *flags, "--allow-code") == 0
    first, second = store.read(path)
    assert first.values["score_percent"] == 100 and second.values["score_percent"] == 0
    assert first.case["checker"].startswith("sandbox") and "--allow-code" in first.command
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 8 and all("sum(" in line["found"] for line in lines)
    assert "code, pass@1" in capsys.readouterr().out


def test_a_local_model_in_the_engine_in_its_own_dtype_and_fp8(folder, tmp_path, capsys):
    path, answers = tmp_path / "records.jsonl", tmp_path / "answers.jsonl"
    rows = ("--recipe", "baseline", "--recipe", "token")
    flags = ("-n", 2, "-r", 2, "--max-tokens", 6, "--num-pages", 64, "-o", path)
    assert octavo("choice", folder, *rows, *flags, "--answers", answers) == 0
    first, second = store.read(path)
    assert [r.case["recipe"] for r in (first, second)] == ["float32", "fp8 token"]
    assert first.impl == "engine" and second.baseline == "float32"
    assert [r.values["num_fp8_kv_cache_layers"] for r in (first, second)] == [0, 1]
    assert first.case["questions_sha256"] == second.case["questions_sha256"]
    # The model's own sampling parameters.
    assert (first.case["temperature"], first.case["top_k"]) == (0.5, 7)
    assert first.values["num_answers"] == 4 and first.values["num_unparsed"] == 4
    assert first.values["mean_answer_tokens"] == 6 and first.values["num_cut"] == 4
    texts = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    assert len(set(texts[:4])) > 1
    again = tmp_path / "again.jsonl"
    assert octavo("choice", folder, *rows[:2], "-n", 1, *flags[2:-2], "--answers", again) == 0
    assert replies(again).items() < replies(answers).items()  # a seed draws the same answer
    assert octavo("choice", folder, *rows[:2], "-n", 1, "--max-tokens", 1000) == 1
    assert "lower --max-tokens" in " ".join(capsys.readouterr().err.split())


def replies(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["key"]: line["text"] for line in lines}


@pytest.mark.slow
def test_static_scales_are_calibrated_on_generated_chats(folder, tmp_path):
    path = tmp_path / "records.jsonl"
    rows = ("--recipe", "baseline", "--recipe", "head+rotate+center", "--recipe", "tensor")
    answers = ("--answers", tmp_path / "answers.jsonl")
    flags = ("-n", 2, "--max-tokens", 4, "--num-pages", 64, "-o", path, *answers)
    assert octavo("math", folder, *rows, *flags) == 0
    assert octavo("math", folder, *rows, *flags, "--resume") == 0
    assert len(replies(answers[1])) == len(answers[1].read_text().splitlines()) == 6
    assert octavo("math", folder, *rows, *flags, "--resume", "--margin", 2) == 0
    assert len(replies(answers[1])) == 10  # other scales are other answers
    assert len(store.read(path)) == 9 and "--margin 1.5" in store.read(path)[0].command


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected a MODEL or --endpoint"),
        (("m", "--endpoint", "http://x"), "expected a MODEL or --endpoint"),
        (("--endpoint", "http://x", "--recipe", "unit"), "--recipe is for a model"),
        (("m", "--recipe", "unit", "--scales", "s.json"), "which are not asked for"),
        (("m", "--resume"), "--resume goes on with the file of --answers"),
        (("m", "-o", "no/where.jsonl"), "expected an existing folder"),
        (("m", "--recipe", "best"), "row best: expected words out of"),
        (("m", "--data", __file__), "a file of .csv"),
        (
            ("--endpoint", "http://x", "--temperature", "0", "-r", "2"),
            "greedy decoding, which repeats itself",
        ),
    ],
)
def test_what_cannot_be_is_said(capsys, args, message):
    assert octavo("math", *args) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_server_has_its_own_chat_template(capsys):
    words = ("choice", "--endpoint", "http://localhost:1", "--chat-template", TEMPLATE)
    assert octavo(*words) == 1
    assert "--add-bos and --chat-template are for a model" in capsys.readouterr().err
