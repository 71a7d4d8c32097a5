"""Problems of programming in the form of LiveCodeBench, and generated ones.

Its files (test.jsonl to test6.jsonl of livecodebench/code_generation_lite; the last one is what v6
adds) have the columns question_content, question_id, starter_code, public_test_cases,
private_test_cases and metadata. Private tests are JSON, or JSON that was pickled, compressed and
written in base64. Nothing but a text is read of a pickle.
"""

import base64
import binascii
import io
import json
import pickle
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.brief import brief
from octavo.calibration.rows import parse_json
from octavo.errors import CheckpointError
from octavo.measure.evaluate.question_files import read_questions
from octavo.measure.evaluate.requests import GENERATED
from octavo.measure.evaluate.sampling import Item

COLUMNS = ("question_content", "starter_code", "public_test_cases", "private_test_cases")
SUFFIXES = (".jsonl", ".parquet")
MAX_TEST_BYTES = 2**30  # of all tests of a problem
# The words of the benchmark, which scores depend on.
SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests."
)
WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your "
    "code within delimiters."
)
WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
)


@dataclass(frozen=True)
class Test:
    """What a program is given and should print; of a function: JSON of its arguments and result."""

    __test__ = False  # for pytest

    given: str
    expected: str
    kind: Literal["stdin", "functional"] = "stdin"


@dataclass(frozen=True)
class Problem:
    """A problem and its tests as the data set has them: they are large, and read when needed.

    function: the method of Solution that tests call; None where programs read and print.
    """

    name: str
    text: str
    starter: str
    public: str = field(repr=False)
    private: str = field(repr=False)
    function: str | None = None

    def item(self, repetition: int, seed: int = 0) -> Item:
        """The problem as it is asked."""
        told, code = WITHOUT_STARTER, "# YOUR CODE HERE"
        if self.starter:
            told, code = WITH_STARTER, self.starter
        text = (
            f"### Question:\n{self.text}\n\n### Format: {told}\n```python\n{code}\n```\n\n"
            "### Answer: (use the provided format with backticks)\n\n"
        )
        messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": text})
        return Item(self.name, repetition, messages, self.name)

    def tests(self) -> list[Test]:
        """All tests, public ones first."""
        found = [_test(one) for one in _cases(self.public, "public_test_cases")]
        found += [_test(one) for one in _cases(self.private, "private_test_cases")]
        if not found:
            raise CheckpointError("expected test cases, got none")
        if self.function is None and any(one.kind == "functional" for one in found):
            raise CheckpointError("expected func_name in metadata of tests that call a function")
        return found


def load_problems(data: str, subset: str | None = None, split: str | None = None) -> list[Problem]:
    """The problems of `data`: "generated", a path or a data set of the hub."""
    if data == GENERATED:
        return generated_problems()
    found = read_questions(
        lambda row: _problem(row.content), data, subset, split, columns=COLUMNS, suffixes=SUFFIXES
    )
    names = [problem.name for problem in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise CheckpointError(f"{data}: expected each question_id once, got {repeated[0]} again")
    return found


def _problem(row: Mapping[str, Any]) -> Problem:
    texts = [row[name] for name in COLUMNS]
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"expected texts in {', '.join(COLUMNS)}, got {brief(texts)}")
    metadata = row.get("metadata") or "{}"
    about = parse_json(metadata, "metadata") if isinstance(metadata, str) else metadata
    function = about.get("func_name") if isinstance(about, Mapping) else None
    name = row.get("question_id")
    if not isinstance(name, str) or not name or not texts[0].strip():
        raise CheckpointError(f"expected question_id and question_content, got {brief(name)}")
    text, starter, public, private = texts
    found = Problem(name, text.strip(), starter.strip("\n"), public, private, function)
    found.tests()  # damaged ones are found before a model is asked
    return found


def _cases(text: str, column: str) -> list[Any]:
    if not text.lstrip().startswith("["):
        text = _unpacked(text, column)
    found = parse_json(text, column)
    if not isinstance(found, list):
        raise CheckpointError(f"{column}: expected a list of tests, got {brief(found)}")
    return found


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpacked(text: str, column: str) -> str:
    """JSON out of base64, zlib and a pickle, which may hold a text alone."""
    try:
        reader = zlib.decompressobj()
        packed = reader.decompress(base64.b64decode(text, validate=True), MAX_TEST_BYTES)
        if reader.unconsumed_tail:
            raise ValueError(f"more than {MAX_TEST_BYTES} bytes")
        found = _TextUnpickler(io.BytesIO(packed)).load()
    except (binascii.Error, zlib.error, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{column}: expected JSON or packed JSON: {error}") from None
    except Exception as error:  # whatever a damaged pickle makes of itself
        raise CheckpointError(f"{column}: expected a pickled text: {error}") from None
    if not isinstance(found, str):
        raise CheckpointError(f"{column}: expected a pickled text, got {type(found).__name__}")
    return found


def _test(case: Any) -> Test:
    match case:
        case {"input": str(given), "output": str(expected), **rest}:
            kind = rest.get("testtype", "stdin")
            if kind in ("stdin", "functional"):
                return Test(given, expected, kind)
    raise CheckpointError(f"expected input, output and testtype, got {brief(case)}")


def generated_problems(count: int = 6, seed: int = 0) -> list[Problem]:
    """Small problems, every other one with a function to write, the same ones for a seed."""
    return [_generate(number, random.Random(f"{seed}, {number}")) for number in range(count)]


def _generate(number: int, draw: random.Random) -> Problem:
    factor, more = draw.randint(2, 9), draw.randint(1, 99)
    numbers = [[draw.randint(-99, 99) for _ in range(4)] for _ in range(3)]
    name, results = f"generated-{number + 1}", [factor * sum(some) + more for some in numbers]
    pairs = list(zip(numbers, results, strict=True))
    what = f"the sum of the numbers, times {factor}, plus {more}"
    if number % 2:
        cases = [
            {"input": json.dumps(some), "output": json.dumps(result), "testtype": "functional"}
            for some, result in pairs
        ]
        starter = "class Solution:\n    def total(self, numbers: List[int]) -> int:\n        "
        text, function = f"Return {what}.", "total"
    else:
        cases = [
            {"input": f"{len(some)}\n{' '.join(map(str, some))}\n", "output": f"{result}\n"}
            for some, result in pairs
        ]
        starter, function = "", None
        text = f"The first line has the count of numbers, the second one the numbers. Print {what}."
    return Problem(name, text, starter, json.dumps(cases[:1]), json.dumps(cases[1:]), function)
