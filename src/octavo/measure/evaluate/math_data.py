r"""Problems of mathematics with one final answer.

Columns are `problem` or `question`, and `answer`, or `solution` that ends in a \boxed one; `id` or
`unique_id` is their name: MATH-500, AIME and the like, whatever the case of the columns' names.
"generated" makes problems of arithmetic.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError
from octavo.measure.evaluate.endpoint import Message
from octavo.measure.evaluate.final_answer import last_boxed
from octavo.measure.evaluate.question_files import Line, read_lines, unique_names

GENERATED = "generated"
NUM_GENERATED = 24
TEXTS, NAMES = ("problem", "question"), ("unique_id", "id", "record_id")


@dataclass(frozen=True)
class MathQuestion:
    """A problem and its answer, in LaTeX or as a number."""

    name: str
    text: str
    answer: str

    def __post_init__(self) -> None:
        if not self.text.strip() or not self.answer.strip():
            raise CheckpointError("expected a problem and an answer with something in them")

    @property
    def messages(self) -> tuple[Message, ...]:
        """The problem as it is asked."""
        text = f"{self.text}\n\nReason step by step, and put your final answer within \\boxed{{}}."
        return ({"role": "user", "content": text},)


def load_math_questions(
    data: str, subset: str | None = None, split: str | None = None
) -> list[MathQuestion]:
    """The problems of `data`: "generated", a path or a data set of the hub."""
    if data == GENERATED:
        return generated_math_questions()
    found = [_question(line) for line in read_lines(data, subset, split)]
    if not found:
        raise CheckpointError(f"expected problems in {data}, got none")
    names = unique_names([question.name for question in found])
    return [
        MathQuestion(name, question.text, question.answer)
        for name, question in zip(names, found, strict=True)
    ]


def generated_math_questions(count: int = NUM_GENERATED, seed: int = 0) -> list[MathQuestion]:
    """Arithmetic of five kinds by turns, the same problems for a seed."""
    kinds = (_sum, _product, _fraction, _remainder, _share)
    return [
        MathQuestion(
            f"generated-{number + 1}",
            *kinds[number % len(kinds)](random.Random(f"{seed}, {number}")),
        )
        for number in range(count)
    ]


def _sum(draw: random.Random) -> tuple[str, str]:
    a, b, c = draw.randint(10, 99), draw.randint(10, 99), draw.randint(2, 9)
    return f"What is ${a} + {b} - {c}$?", str(a + b - c)


def _product(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(12, 99), draw.randint(3, 99)
    return f"What is ${a} \\times {b}$?", f"{a * b:,}"


def _fraction(draw: random.Random) -> tuple[str, str]:
    a, b, c, d = draw.randint(1, 5), draw.randint(6, 9), draw.randint(1, 5), draw.randint(6, 9)
    total = Fraction(a, b) + Fraction(c, d)
    text = f"What is $\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}$, as a fraction or a number?"
    if total.denominator == 1:
        return text, str(total)
    return text, f"\\frac{{{total.numerator}}}{{{total.denominator}}}"


def _remainder(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(100, 999), draw.randint(3, 19)
    return f"What is the remainder when {a} is divided by {b}?", str(a % b)


def _share(draw: random.Random) -> tuple[str, str]:
    percent, whole = 5 * draw.randint(1, 19), 20 * draw.randint(2, 50)
    return f"What is {percent}\\% of {whole}?", str(percent * whole // 100)


def _question(line: Line) -> MathQuestion:
    row = {str(name).strip().lower().replace(" ", "_"): value for name, value in line.row.items()}
    try:
        text = next((row[name] for name in TEXTS if row.get(name)), None)
        answer = _answer(row)
        if not isinstance(text, str) or answer is None:
            raise CheckpointError(
                "expected problem or question, and answer or a solution with a \\boxed one, "
                f"got {brief(sorted(row))}"
            )
        name = next((row[name] for name in NAMES if row.get(name) is not None), "")
        return MathQuestion(str(name), text.strip(), answer.strip())
    except CheckpointError as error:
        raise CheckpointError(f"{line.where}: {error}") from None


def _answer(row: Mapping[str, Any]) -> str | None:
    found = row.get("answer")
    if isinstance(found, int | float) and not isinstance(found, bool):
        # Of AIME, as some copies have it: 73.0 is 73.
        return str(int(found)) if float(found).is_integer() else str(found)
    if isinstance(found, str) and found.strip():
        return found
    solution = row.get("solution")
    return last_boxed(solution) if isinstance(solution, str) else None
