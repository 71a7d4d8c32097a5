"""Problems in the form of LiveCodeBench, and what is not read of them."""

import base64
import json
import os
import pickle
import zlib

import pytest

pytest.importorskip("transformers")

from octavo.errors import CheckpointError
from octavo.measure.evaluate.code_data import generated_problems, load_problems

READS = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
CALLS = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]


def packed(thing) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(thing))).decode()


def row(**changes):
    return {
        "question_title": "t",
        "question_content": "Add one.",
        "question_id": "abc_1",
        "platform": "atcoder",
        "contest_date": "2025-01-04T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(READS),
        "private_test_cases": packed(json.dumps(READS * 2)),
        "metadata": "{}",
        **changes,
    }


def write(path, *rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_rows_of_version_6(tmp_path):
    starter = "class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        "
    function = row(
        question_id="3000",
        starter_code=starter,
        public_test_cases=json.dumps(CALLS),
        private_test_cases=json.dumps(CALLS),
        metadata='{"func_name": "add"}',
    )
    reads, calls = load_problems(write(tmp_path / "test6.jsonl", row(), function))
    assert (reads.name, reads.function, len(reads.tests())) == ("abc_1", None, 3)
    assert [test.kind for test in calls.tests()] == ["functional"] * 2 and calls.function == "add"
    system, asked = reads.item(2).messages
    assert "expert Python programmer" in system["content"] and reads.item(2).repetition == 2
    assert "Add one." in asked["content"] and "# YOUR CODE HERE" in asked["content"]
    assert starter.rstrip() in calls.item(0).messages[1]["content"]
    write(tmp_path / "test5.jsonl", row(question_id="other"))
    assert len(load_problems(str(tmp_path))) == 3


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/octavo-was-here",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"private_test_cases": packed(Evil())}, "it names posix.system"),
        ({"private_test_cases": packed([1, 2])}, "expected a pickled text, got list"),
        ({"private_test_cases": packed(b"[]")}, "expected a pickled text, got bytes|it names"),
        ({"private_test_cases": "!!"}, "expected JSON or packed JSON"),
        ({"private_test_cases": base64.b64encode(b"x").decode()}, "expected JSON or packed JSON"),
        ({"private_test_cases": packed("{")}, "private_test_cases: expected JSON"),
        ({"private_test_cases": "[1]"}, "expected input, output and testtype"),
        ({"private_test_cases": json.dumps(CALLS)}, "expected func_name in metadata"),
        ({"private_test_cases": "[]", "public_test_cases": "[]"}, "expected test cases, got none"),
        ({"private_test_cases": None}, "expected texts in"),
        ({"question_id": None}, "expected question_id"),
        ({"metadata": "{"}, "metadata: expected JSON"),
    ],
)
def test_damaged_rows_are_named(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_problems(write(tmp_path / "x.jsonl", row(**changes)))
    assert not os.path.exists("/tmp/octavo-was-here")


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.measure.evaluate.code_data.MAX_TEST_BYTES", 10_000)
    bomb = packed(json.dumps(READS) + " " * 1_000_000)
    with pytest.raises(CheckpointError, match="more than 10000 bytes"):
        load_problems(write(tmp_path / "x.jsonl", row(private_test_cases=bomb)))


def test_a_problem_is_there_once(tmp_path):
    with pytest.raises(CheckpointError, match="each question_id once, got abc_1 again"):
        load_problems(write(tmp_path / "x.jsonl", row(), row()))


def test_generated_problems_are_the_same_for_a_seed():
    problems = generated_problems(4)
    assert problems == generated_problems(4) != generated_problems(4, seed=1)
    assert [problem.function for problem in problems] == [None, "total"] * 2
    assert all(len(problem.tests()) == 3 for problem in problems)
