"""MRCR: loaders, the published score, buckets, AUC and recovery."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.measure.evaluate.mrcr import (
    Counted,
    area_under_curve,
    bucket_of,
    choose_questions,
    grade,
    joined_values,
    make_workload,
    mrcr_table,
)
from octavo.measure.evaluate.mrcr_data import generated_questions, load_questions
from octavo.measure.records import Machine
from octavo.measure.run import Participant, Records, run_workload
from octavo.measure.statistics import pass_values

MACHINE = Machine.current()
MESSAGES = [
    {"role": "user", "content": "write a poem about tapirs"},
    {"role": "assistant", "content": "Tapirs walk."},
    {"role": "user", "content": "Prepend aYoo to the 1st (1 indexed) poem about tapirs."},
]
ROW = {
    "prompt": json.dumps(MESSAGES),
    "answer": "aYooTapirs walk.",
    "random_string_to_prepend": "aYoo",
    "n_needles": 2,
    "n_chars": 100,
}


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return str(path)


def test_rows_of_json_lines_with_messages_as_text_or_list(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", ROW, {**ROW, "prompt": MESSAGES, "n_needles": 4})
    first, second = load_questions(path)
    assert first.messages == second.messages == tuple(MESSAGES)
    assert (first.answer, first.prefix, first.num_needles) == ("aYooTapirs walk.", "aYoo", 2)
    assert load_questions(path, num_needles=4) == [second]
    with pytest.raises(ConfigError, match="with 8 needles, got those with 2, 4"):
        load_questions(path, num_needles=8)


def test_rows_of_parquet_in_folders_of_a_folder(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "2needle").mkdir()
    table = pyarrow.Table.from_pylist([ROW, ROW])
    parquet.write_table(table, tmp_path / "2needle" / "2needle_0.parquet")
    write_jsonl(tmp_path / "more.jsonl", ROW)
    assert len(load_questions(str(tmp_path))) == 3
    parquet.write_table(table.drop_columns(["answer"]), tmp_path / "bad.parquet")
    with pytest.raises(CheckpointError, match="got no \\['answer'\\]"):
        load_questions(str(tmp_path / "bad.parquet"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "expected prompt, answer, random_string_to_prepend, n_needles"),
        ({**ROW, "prompt": "[{"}, "prompt: expected JSON"),
        ({**ROW, "prompt": "[1]"}, "expected messages in prompt"),
        ({**ROW, "prompt": [{"role": "robot", "content": "x"}]}, "expected messages in prompt"),
        ({**ROW, "prompt": MESSAGES[:2]}, "expected messages that end with the user's"),
        ({**ROW, "answer": "Tapirs"}, "expected an answer that starts with"),
        ({**ROW, "answer": None}, "expected texts of answer and prefix"),
        ({**ROW, "n_needles": "two"}, "x.jsonl:1"),
    ],
)
def test_damaged_rows_are_named(tmp_path, row, message):
    with pytest.raises(CheckpointError, match=message):
        load_questions(write_jsonl(tmp_path / "x.jsonl", row))


def test_no_questions_are_no_data(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="got none"):
        load_questions(str(tmp_path))
    with pytest.raises(CheckpointError, match="expected questions"):
        load_questions(write_jsonl(tmp_path / "x.jsonl"))
    (tmp_path / "x.csv").touch()
    with pytest.raises(ConfigError, match="a file of .jsonl, .parquet"):
        load_questions(str(tmp_path / "x.csv"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **o: {"train": [ROW]})
    assert len(load_questions("openai/mrcr")) == 1

    def fail(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UnsupportedError, match="no network"):
        load_questions("openai/mrcr")


def test_generated_chats_have_their_answer_at_its_place():
    questions = generated_questions(6)
    assert questions == generated_questions(6) != generated_questions(6, seed=1)
    assert len(questions[0].messages) < len(questions[-1].messages)
    for question in questions:
        last = question.messages[-1]["content"]
        which = int(last.split(" to the ")[1][0])
        asked = last.split("(1 indexed) ")[1].split(".")[0]
        texts = [
            answer["content"]
            for request, answer in zip(
                question.messages[:-1:2], question.messages[1::2], strict=True
            )
            if request["content"] == f"write a {asked}"
        ]
        assert len(texts) == question.num_needles == 2
        assert question.answer == question.prefix + texts[which - 1]


def test_the_published_score():
    answer = "abcPoems have lines."
    assert grade(answer, answer, "abc") == 1
    assert grade("Poems have lines.", answer, "abc") == 0
    assert grade(" " + answer, answer, "abc") == 0
    # difflib: 2 · matches / all characters.
    assert grade("abcPoems have", answer, "abc") == pytest.approx(2 * 10 / (10 + 17))


def test_buckets_end_at_powers_of_two():
    assert [bucket_of(n) for n in (1, 2048, 2049, 8192, 8193)] == [2048, 2048, 4096, 8192, 16384]
    with pytest.raises(ConfigError, match="up to 1048576 tokens, got 1048577; --max-length"):
        bucket_of(2**20 + 1)


def test_auc_is_that_of_published_tables():
    # gpt-4.1, 8 needles, on contextarena.ai: AUC @128k 61.6 %, @1M 53.2 %.
    scores = [87.6, 68.0, 70.4, 57.5, 55.5, 57.1, 55.6, 42.1]
    curve = {2**13 << i: score for i, score in enumerate(scores)}
    assert area_under_curve(curve, 2**17) == pytest.approx(61.6, abs=0.05)
    assert area_under_curve(curve, 2**20) == pytest.approx(53.2, abs=0.05)
    assert area_under_curve(curve, 2**13) == 87.6
    assert area_under_curve(curve, 4096) is None


def counted(num_tokens):
    question = generated_questions(1)[0]
    return Counted(question, num_tokens - 10, 10)


def test_questions_that_do_not_fit_are_left_out():
    questions = [counted(n) for n in (5000, 1000, 1500, 3000)]
    buckets = choose_questions(questions, 3064, None)
    assert {end: [q.num_tokens for q in some] for end, some in buckets.items()} == {
        2048: [1000, 1500],
        4096: [3000],
    }
    first = choose_questions(questions, None, 1)
    assert [[q.num_tokens for q in some] for some in first.values()] == [[1000], [3000], [5000]]
    with pytest.raises(ConfigError, match="up to 100 tokens, the shortest has 1064"):
        choose_questions(questions, 100, None)


def row(name, answer):
    def asked_by(prompt):
        return next(q for q in generated_questions(2) if q.messages == prompt.content)

    @contextmanager
    def enter():
        yield lambda prompts: [answer(asked_by(prompt)) for prompt in prompts]

    return Participant(name=name, impl="test", about={"model": "m"}, machine=MACHINE, open=enter)


def evaluate(rows, buckets, *, about, command, **options):
    return run_workload(rows, make_workload(buckets, about, command), **options)


def test_records_of_buckets_and_of_all():
    buckets = choose_questions([counted(n) for n in (1000, 1500, 3000)], None, None)
    rows = [
        row("bf16", lambda q: q.answer),
        row("fp8", lambda q: q.prefix + q.answer.removeprefix(q.prefix) * 2),
        row("lost", lambda q: "I cannot."),
    ]
    told = []
    about = {"data": "generated", "num_needles": "all"}
    records = evaluate(
        rows, buckets, about=about, command="c", records=Records(on_record=told.append)
    )
    assert told == records
    assert [r.case["bucket"] for r in records] == [2048, 4096, "all"] * 3
    first, second, third = records[2], records[5], records[8]
    assert first.values["score_percent"] == first.values["auc_percent"] == 100
    assert first.values["auc_length"] == 4096 and first.values["num_questions"] == 3
    assert second.values["recovery_percent"] == pytest.approx(100 * 2 / 3)
    assert third.values["recovery_percent"] == 0 and third.baseline == "bf16"
    table = mrcr_table(records)
    assert table.header[1:3] == ("≤ 2k", "≤ 4k") and "AUC@4k" in table.header
    assert table.rows[2][0] == "lost" and table.rows[2][-1] == 0


@pytest.mark.parametrize("repetitions", [1, 3])
@pytest.mark.parametrize("scores", [[[0.5]], [[0.25, 1.0], [0.0]], [[0.1, 0.7, 0.4], [0.9, 0.3]]])
def test_scores_of_buckets_are_joined_as_if_they_were_one(scores, repetitions):
    repeated = [
        [[one * (n + 1) / 3 for n in range(repetitions)] for one in some] for some in scores
    ]
    joined = joined_values([pass_values(some) for some in repeated])
    assert joined == pytest.approx(pass_values([one for some in repeated for one in some]))


ABOUT = {"data": "generated", "num_needles": "all"}


def test_what_was_measured_before_is_not_asked_again():
    """Stopped in the second row, after its first bucket; then all of it, as if it never had."""
    buckets = choose_questions([counted(n) for n in (1000, 1500, 3000)], None, None)
    asked, told, skipped = [], [], []

    def half(question):
        asked.append(question)
        return question.answer[: len(question.answer) // 2]

    def stops(question):
        if len(asked) == 5:
            raise KeyboardInterrupt
        return half(question)

    with pytest.raises(KeyboardInterrupt):
        evaluate(
            [row("bf16", half), row("fp8", stops)],
            buckets,
            about=ABOUT,
            command="c",
            records=Records(on_record=told.append),
        )
    assert [(r.case["recipe"], r.case["bucket"]) for r in told] == [
        *(("bf16", 2048), ("bf16", 4096), ("bf16", "all"), ("fp8", 2048)),
    ]
    rows, before = [row("bf16", half), row("fp8", half)], list(told)
    del asked[:], told[:]
    settings = {"about": ABOUT, "command": "d"}
    records = evaluate(
        rows,
        buckets,
        **settings,
        records=Records(before, told.append),
        on_skip=skipped.append,
    )
    assert len(asked) == 1 and skipped == [2048, 4096, 2048]
    assert records[:4] == before and records[4:] == told and len(told) == 2
    whole = evaluate(rows, buckets, **settings)
    for resumed, fresh in zip(records, whole, strict=True):
        assert resumed.case == fresh.case and resumed.values == pytest.approx(fresh.values)
    del asked[:]
    assert evaluate(rows, buckets, **settings, records=Records(records)) == records and not asked


@pytest.mark.parametrize("change", ["recipe", "machine", "about", "questions", "baseline", "op"])
def test_records_of_something_else_are_asked_again(change):
    buckets = choose_questions([counted(1000)], None, None)
    asked = []
    rows = [row("bf16", lambda q: q.answer), row("fp8", lambda q: asked.append(q) or q.answer)]
    done = evaluate(rows, buckets, about=ABOUT, command="c")
    del asked[:]
    about = ABOUT | ({"max_length": 5} if change == "about" else {})
    match change:
        case "recipe":
            rows[1] = replace(rows[1], about={**rows[1].about, "recipe_digest": "x"})
        case "machine":
            rows = [replace(r, machine=replace(MACHINE, gpu="Another GPU")) for r in rows]
        case "questions":
            other = generated_questions(2)[1]
            buckets = {end: [replace(some[0], question=other)] for end, some in buckets.items()}
        case "baseline":
            rows[0] = replace(rows[0], name="fp16")
        case "op":
            done = [replace(record, op="needle") for record in done]
    evaluate(rows, buckets, about=about, command="c", records=Records(done))
    assert len(asked) == 1
