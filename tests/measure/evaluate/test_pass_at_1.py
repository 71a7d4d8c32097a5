"""pass@1: standard errors, recovery, records, the file of answers, sampling parameters."""

import json
import math
import statistics
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.transformers.text_model import (
    generation_sampling,
    load_generation_sampling,
)
from octavo.measure.evaluate.language import Reply
from octavo.measure.evaluate.math_judge import MathJudge
from octavo.measure.evaluate.requests import ChoiceRequest, MrcrRequest
from octavo.measure.evaluate.sampling import Sampler, SamplingPlan
from octavo.measure.evaluate.task_data import generated_choice_questions, generated_math_questions
from octavo.measure.evaluate.tasks import (
    AnswerFile,
    Task,
    make_workload,
    pass_table,
)
from octavo.measure.records import Machine
from octavo.measure.run import Participant, Records, ready, run_workload
from octavo.measure.statistics import paired_recovery, pass_values
from octavo.measure.store import TornLineWarning

PLAN = SamplingPlan(options={"temperature": 0.6}, max_tokens=100)
ABOUT = {"data": "generated", **PLAN.about()}


def evaluate(rows, task, answers, records=None):
    return run_workload(rows, make_workload(task, answers, ABOUT, "c"), records)


def choice_task(count, repetitions):
    questions = generated_choice_questions(count)
    return Task(op="choice", questions=questions, repetitions=repetitions)


def math_task(count, repetitions, judge=None):
    questions = generated_math_questions(count)
    return Task(op="math", questions=questions, repetitions=repetitions, judge=judge)


def test_errors_of_questions_and_of_repetitions():
    values = pass_values([[True, True], [True, False], [False, False], [True, False]])
    assert values["score_percent"] == 50 and values["num_answers"] == 8
    spread = statistics.stdev([1, 0.5, 0, 0.5])
    assert values["score_standard_error_percent"] == pytest.approx(100 * spread / 2)
    # Two questions of four vary: a variance of 1/2 each, over 2 repetitions.
    noise = math.sqrt(2 * 0.5 / 2) / 4
    assert values["repetition_standard_error_percent"] == pytest.approx(100 * noise)
    alone = pass_values([[True], [False]])
    assert "repetition_standard_error_percent" not in alone
    assert "score_standard_error_percent" not in pass_values([[True, False]])


def test_recovery_is_of_the_same_questions():
    first = [[True], [True], [False], [True]]
    same = paired_recovery(first, first)
    assert same["recovery_percent"] == 100 and same["recovery_standard_error_percent"] == 0
    assert same["difference_percent"] == same["difference_standard_error_percent"] == 0
    worse = paired_recovery([[True], [False], [False], [True]], first)
    assert worse["recovery_percent"] == pytest.approx(100 * 2 / 3)
    assert worse["difference_percent"] == -25
    rest = [1 - 2 / 3, -2 / 3, 0, 1 - 2 / 3]
    error = 100 * statistics.stdev(rest) / 2 / 0.75
    assert worse["recovery_standard_error_percent"] == pytest.approx(error)
    assert "recovery_percent" not in paired_recovery(first, [[False]] * 4)


def row(name, reply, asked=None, plan=PLAN):
    def ask(items, on_reply):
        for item in reversed(items):  # in any order
            if asked is not None:
                asked.append(item)
            on_reply(item, reply(item))

    sampler = Sampler(name=name, plan=plan, identity=name, ask=ask)
    machine = Machine.current()
    return Participant(
        name=name, impl="test", about={"model": "m"}, machine=machine, open=ready(sampler)
    )


def right(item):
    return Reply(f"Answer: {item.answer}", num_tokens=10)


def test_records_of_choice():
    task = choice_task(6, repetitions=3)

    def often(item):
        if item.repetition == 0:
            return Reply("I wonder", is_cut=True, num_tokens=100)
        return right(item)

    rows = [row("bf16", right), row("fp8", often), row("lost", lambda item: Reply("Answer: ?"))]
    told = []
    records = evaluate(rows, task, AnswerFile(), Records(on_record=told.append))
    assert told == records and [r.op for r in records] == ["choice"] * 3
    first, second, third = (r.values for r in records)
    assert first["score_percent"] == 100 and first["mean_answer_tokens"] == 10
    assert first["num_questions"] == 6 and first["num_answers"] == 18
    assert second["score_percent"] == second["recovery_percent"] == pytest.approx(200 / 3)
    assert second["num_unparsed"] == second["num_cut"] == 6
    assert second["unparsed_percent"] == pytest.approx(100 / 3)
    assert second["mean_answer_tokens"] == 40 and "mean_answer_tokens" not in third
    assert third["recovery_percent"] == 0 and third["num_unparsed"] == 18
    case = records[1].case
    assert (case["repetitions"], case["temperature"], case["max_tokens"]) == (3, 0.6, 100)
    assert records[1].baseline == "bf16" and records[0].baseline is None
    table = pass_table(records)
    assert "6 questions × 3" in table.caption and len(table.rows) == 3
    assert table.rows[1][:2] == ("fp8", pytest.approx(200 / 3)) and len(table.header) == 8


def test_records_of_math():
    pytest.importorskip("math_verify")
    judge = MathJudge()
    task = math_task(5, 1, judge)

    def spelled(item):
        return Reply(f"So it is \\boxed{{{item.answer}\\text{{ units}}}}.")

    (record,) = evaluate([row("a", spelled)], task, AnswerFile())
    judge.close()
    assert record.values["score_percent"] == 100
    assert record.case["checker"].startswith("math-verify 0.")
    with pytest.raises(ConfigError, match="rows of different names"):
        evaluate([], task, AnswerFile())


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    task = choice_task(4, repetitions=2)
    path, asked = tmp_path / "answers.jsonl", []

    def stops(item):
        if len(asked) == 4:
            raise KeyboardInterrupt
        return right(item)

    def run(reply, plan=PLAN, is_resumed=True):
        answers = AnswerFile(path, is_resumed=is_resumed)
        rows = [row("bf16", reply, asked, plan)]
        return evaluate(rows, task, answers)[0].values

    with pytest.raises(KeyboardInterrupt):
        run(stops, is_resumed=False)
    with pytest.raises(ConfigError, match="add --resume"):
        run(right, is_resumed=False)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3 and all(line["is_right"] for line in lines)
    assert lines[0]["text"] == f"Answer: {lines[0]['found']}" and lines[0]["row"] == "bf16"
    with open(path, "a") as file:
        file.write('{"key": "half a li')
    del asked[:]
    with pytest.warns(TornLineWarning, match="answers.jsonl:4: the last line is incomplete"):
        assert run(lambda item: Reply("none"))["score_percent"] == 100 * 3 / 8
    assert len(asked) == 5 and len(path.read_text().splitlines()) == 8
    del asked[:]
    assert run(right)["score_percent"] == 100 * 3 / 8 and not asked
    # Other sampling parameters are other answers.
    assert run(right, SamplingPlan(options={"temperature": 1.0}))["score_percent"] == 100
    assert len(asked) == 8


def test_files_of_answers_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="--resume goes on with"):
        AnswerFile(None, is_resumed=True)
    with pytest.raises(ConfigError, match="expected an existing folder"):
        AnswerFile(tmp_path / "no" / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("[1]\n")
    with pytest.raises(CheckpointError, match="a.jsonl:1: expected an answer"):
        AnswerFile(tmp_path / "a.jsonl", is_resumed=True)


def test_every_item_has_a_seed_of_its_own():
    task = choice_task(5, repetitions=4)
    seeds = [PLAN.seed_of(item) for item in task.items]
    assert len(set(seeds)) == 20 and all(0 <= seed < 2**31 for seed in seeds)
    assert SamplingPlan(options={}, seed=1).seed_of(task.items[0]) != seeds[0]
    problems = math_task(2, repetitions=3).items
    longer = SamplingPlan(options=PLAN.options, max_tokens=200)
    samplers = [Sampler(name=name, plan=plan, identity=name, ask=None)
                for name in "ab" for plan in (PLAN, longer)]  # fmt: skip
    keys = [sampler.key(item) for sampler in samplers for item in problems]
    assert len(set(keys)) == 24


@pytest.mark.parametrize(
    ("data", "repetitions"),
    [
        ("HuggingFaceH4/MATH-500", 5),
        ("math_500/test.jsonl", 5),
        ("opencompass/AIME2025", 10),
        ("aime25.parquet", 10),
        ("Idavidrein/gpqa", 5),
        ("gpqa_diamond.csv", 5),
        ("livecodebench/code_generation_lite", 10),
        ("generated", 1),
        ("cais/mmlu", 1),
    ],
)
def test_repetitions_are_those_of_published_evaluations(data, repetitions):
    assert ChoiceRequest(model="m", data=data).usual_repetitions == repetitions
    assert MrcrRequest(model="m", data=data).usual_repetitions == 5


def test_sampling_parameters_of_a_generation_config(tmp_path):
    config = SimpleNamespace(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=None)
    assert generation_sampling(config) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    greedy = {"temperature": 0.0}
    assert generation_sampling(SimpleNamespace(do_sample=False, temperature=0.6)) == greedy
    assert generation_sampling(None) == greedy
    penalized = SimpleNamespace(do_sample=None, repetition_penalty=1.05)
    assert generation_sampling(penalized) == {**greedy, "repetition_penalty": 1.05}
    text = json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20})
    (tmp_path / "generation_config.json").write_text(text)
    assert load_generation_sampling(str(tmp_path)) == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
    }
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="expected a generation_config.json"):
        load_generation_sampling(str(tmp_path))
