"""Questions with one right answer: multiple choice, and problems of mathematics.

Two forms of multiple choice are read. That of GPQA: `Question`, `Correct Answer`,
`Incorrect Answer 1` to `3`, and `Record ID`. That of MMLU and the like: `question`, `choices` or
`options` (a list), and `answer`, the number of the right one from 0 on or its letter. Problems have
`problem` or `question`, and `answer`, or `solution` that ends in a \\boxed one; `id` or `unique_id`
is their name: MATH-500, AIME and the like, whatever the case of the columns' names. "generated"
makes small questions, and problems of arithmetic.
"""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from string import ascii_uppercase
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError
from octavo.measure.evaluate.answering import Message
from octavo.measure.evaluate.question_files import read_questions
from octavo.measure.evaluate.requests import GENERATED
from octavo.measure.evaluate.sampling import Item

NUM_GENERATED = 24
RIGHT, WRONG = "Correct Answer", "Incorrect Answer "
TEXTS, NAMES = ("problem", "question"), ("unique_id", "id", "record_id")

_TOWNS = ("Aldwick", "Brenna", "Corvale", "Dunmere", "Eskdale", "Farrow", "Glint", "Harrowby")
_TRADES = ("baker", "smith", "miller", "weaver", "tanner", "potter", "cooper", "mason")
_NAMES = ("Ada", "Bruno", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Iris", "Jonas")


@dataclass(frozen=True)
class Question:
    """A problem and its answer, or a question, its right option and the wrong ones."""

    name: str
    text: str
    answer: str
    wrong: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(text.strip() for text in (self.text, self.answer, *self.wrong)):
            raise CheckpointError("expected a question and answers with words in them")

    def item(self, repetition: int, seed: int = 0) -> Item:
        """The question as it is asked; options are in an order of this repetition and seed."""
        if not self.wrong:
            told = "Reason step by step, and put your final answer within \\boxed{}."
            return Item(self.name, repetition, _chat(f"{self.text}\n\n{told}"), self.answer)
        options = [self.answer, *self.wrong]
        order = list(range(len(options)))
        random.Random(f"{seed}, {self.name}, {repetition}").shuffle(order)
        letters = ascii_uppercase[: len(options)]
        lines = [f"{letter}) {options[i]}" for letter, i in zip(letters, order, strict=True)]
        text = (
            f"{self.text}\n\n" + "\n".join(lines) + "\n\n"
            "Think step by step, and then choose one of the options. The last line of your "
            f"response must be 'Answer: X' without quotes, where X is one of {', '.join(letters)}."
        )
        return Item(self.name, repetition, _chat(text), letters[order.index(0)], letters)


def _chat(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _load(
    data: str,
    subset: str | None,
    split: str | None,
    make: Callable[[Mapping[str, Any]], Question],
) -> list[Question]:
    """The questions of a path or a data set of the hub; numbers are names if some are missing."""
    found = read_questions(lambda row: make(row.content), data, subset, split)
    names = [question.name for question in found]
    if all(names) and len(set(names)) == len(names):
        return found
    return [replace(one, name=str(number)) for number, one in enumerate(found, 1)]


def load_choice_questions(
    data: str, subset: str | None = None, split: str | None = None
) -> list[Question]:
    """The questions of `data`: "generated", a path or a data set of the hub."""
    if data == GENERATED:
        return generated_choice_questions()
    return _load(data, subset, split, lambda row: _gpqa(row) if RIGHT in row else _listed(row))


def generated_choice_questions(count: int = NUM_GENERATED, seed: int = 0) -> list[Question]:
    """Questions about facts that they tell themselves, the same ones for a seed."""
    found = []
    for number in range(count):
        draw = random.Random(f"{seed}, {number}")
        size = 4
        trades, names = draw.sample(_TRADES, size), draw.sample(_NAMES, size)
        town, asked = draw.choice(_TOWNS), draw.randrange(size)
        facts = " ".join(
            f"{name} is the {trade}." for name, trade in zip(names, trades, strict=True)
        )
        text = f"Four people live in {town}. {facts} Who is the {trades[asked]} of {town}?"
        wrong = tuple(name for i, name in enumerate(names) if i != asked)
        found.append(Question(f"generated-{number + 1}", text, names[asked], wrong))
    return found


def _gpqa(row: Mapping[str, Any]) -> Question:
    wrong = [row.get(f"{WRONG}{number}") for number in (1, 2, 3)]
    texts = [row.get("Question"), row[RIGHT], *wrong]
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError(
            f"expected texts in Question, {RIGHT} and {WRONG}1 to 3, got {brief(texts)}"
        )
    question, right, *others = (str(text).strip() for text in texts)
    name = row.get("Record ID")
    return Question(str(name or ""), question, right, tuple(others))


def _listed(row: Mapping[str, Any]) -> Question:
    text, answer = row.get("question"), row.get("answer")
    options = row.get("choices", row.get("options"))
    if not isinstance(text, str) or not isinstance(options, list) or answer is None:
        raise CheckpointError(
            "expected the columns of GPQA, or question, choices and answer, "
            f"got {brief(sorted(map(str, row)))}"
        )
    if not all(isinstance(option, str) for option in options):
        raise CheckpointError(f"expected texts in choices, got {brief(options)}")
    if not 2 <= len(options) <= len(ascii_uppercase):
        raise CheckpointError(f"expected 2 to {len(ascii_uppercase)} options, got {len(options)}")
    said = str(answer).strip()
    if len(said) == 1 and said.isalpha():
        place = ascii_uppercase.find(said.upper())
    else:  # True is no number here, and neither is 1.5
        place = int(said) if said.isdecimal() else -1
    if not 0 <= place < len(options):
        raise CheckpointError(
            f"expected an answer that is one of {len(options)} choices, got {brief(answer)}"
        )
    texts = [option.strip() for option in options]
    wrong = tuple(option for i, option in enumerate(texts) if i != place)
    name = row.get("question_id", row.get("id"))
    return Question("" if name is None else str(name), text.strip(), texts[place], wrong)


def load_math_questions(
    data: str, subset: str | None = None, split: str | None = None
) -> list[Question]:
    """The problems of `data`: "generated", a path or a data set of the hub."""
    if data == GENERATED:
        return generated_math_questions()
    return _load(data, subset, split, _math_question)


def generated_math_questions(count: int = NUM_GENERATED, seed: int = 0) -> list[Question]:
    """Arithmetic of five kinds by turns, the same problems for a seed."""
    return [
        Question(f"generated-{i + 1}", *_problem(i % 5, random.Random(f"{seed}, {i}")))
        for i in range(count)
    ]


def _problem(kind: int, draw: random.Random) -> tuple[str, str]:
    """A problem of one of five kinds, and its answer."""
    between = draw.randint
    match kind:
        case 0:
            a, b, c = between(10, 99), between(10, 99), between(2, 9)
            return f"What is ${a} + {b} - {c}$?", str(a + b - c)
        case 1:
            a, b = between(12, 99), between(3, 99)
            return f"What is ${a} \\times {b}$?", f"{a * b:,}"
        case 2:
            a, b, c, d = between(1, 5), between(6, 9), between(1, 5), between(6, 9)
            text = (
                f"What is $\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}$, as a fraction or a number?"
            )
            total = Fraction(a, b) + Fraction(c, d)
            if total.denominator == 1:
                return text, str(total)
            return text, f"\\frac{{{total.numerator}}}{{{total.denominator}}}"
        case 3:
            a, b = between(100, 999), between(3, 19)
            return f"What is the remainder when {a} is divided by {b}?", str(a % b)
    percent, whole = 5 * between(1, 19), 20 * between(2, 50)
    return f"What is {percent}\\% of {whole}?", str(percent * whole // 100)


def _math_question(cells: Mapping[str, Any]) -> Question:
    row = {str(name).strip().lower().replace(" ", "_"): value for name, value in cells.items()}
    text = next((row[name] for name in TEXTS if row.get(name)), None)
    answer, solution = row.get("answer"), row.get("solution")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        # Of AIME, as some copies have it: 73.0 is 73.
        answer = str(int(answer) if float(answer).is_integer() else answer)
    elif not isinstance(answer, str) or not answer.strip():
        answer = last_boxed(solution) if isinstance(solution, str) else None
    if not isinstance(text, str) or answer is None:
        raise CheckpointError(
            "expected problem or question, and answer or a solution with a \\boxed one, "
            f"got {brief(sorted(row))}"
        )
    name = next((row[name] for name in NAMES if row.get(name) is not None), "")
    return Question(str(name), text.strip(), answer.strip())


_COMMAND = r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|mathsf)\s*\{[ \t$(*]*"
_LETTER = r"([A-Za-z])(?![A-Za-z0-9'’])"
# Answer: C, **Answer:** (C), Answer: $\boxed{\text{C}}$
_CHOICE = re.compile(rf"(?i:\banswer)[*_]*[ \t]*:[ \t*_$(\[{{]*(?:{_COMMAND})*{_LETTER}")
_BOXED_CHOICE = re.compile(rf"[\s$(*]*(?:{_COMMAND})*[A-Za-z](?![A-Za-z0-9])")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def visible(text: str) -> str | None:
    """The text after its thoughts; None if they never end."""
    before, end, after = text.rpartition("</think>")
    if end:
        return after
    return None if "<think>" in text else before + after


def last_boxed(text: str) -> str | None:
    """What the last whole box holds, braces in it and all; None without any."""
    for mark in reversed(list(_BOX.finditer(text))):
        if text[mark.end() : mark.end() + 1] == "{":
            inside = braced(text, mark.end())
        else:  # \boxed 5
            word = re.match(r"[^\s${}]+", text[mark.end() :])
            inside = word[0] if word else None
        if inside is not None and inside.strip():
            return inside.strip()
    return None


def read_letter(text: str, letters: str) -> str | None:
    """The letter that the text ends up with: its last "Answer: X", else its last box.

    None if there is none, or if it is none of the options' letters.
    """
    shown = visible(text)
    if shown is None:
        return None
    found = None
    for match in _CHOICE.finditer(shown):
        # "answer: a good one" is no choice; "answer: a" is.
        rest = shown[match.end() :].split("\n", 1)[0]
        if match[1].isupper() or not re.search(r"[A-Za-z]", rest):
            found = match[1].upper()
    if found is None and (boxed := last_boxed(shown)) is not None:
        match_boxed = _BOXED_CHOICE.match(boxed)
        found = match_boxed[0][-1].upper() if match_boxed else None
    return found if found is not None and found in letters else None


def braced(text: str, start: int) -> str | None:
    """What is between the brace at `start` and the one that closes it; None if none does."""
    depth, place = 0, start
    while place < len(text):
        match text[place]:
            case "\\":
                place += 1  # \{ is no brace
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return text[start + 1 : place]
        place += 1
    return None
