"""Questions with several options of which one is right.

Two forms are read. That of GPQA: `Question`, `Correct Answer`, `Incorrect Answer 1` to `3`, and
`Record ID`. That of MMLU and the like: `question`, `choices` or `options` (a list), and `answer`,
the number of the right one from 0 on or its letter. "generated" makes small ones that say all that
is needed to answer them.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError
from octavo.measure.evaluate.endpoint import Message
from octavo.measure.evaluate.question_files import Line, read_lines, unique_names

GENERATED = "generated"
NUM_GENERATED = 24
RIGHT, WRONG = "Correct Answer", "Incorrect Answer "

_TOWNS = ("Aldwick", "Brenna", "Corvale", "Dunmere", "Eskdale", "Farrow", "Glint", "Harrowby")
_TRADES = ("baker", "smith", "miller", "weaver", "tanner", "potter", "cooper", "mason")
_NAMES = ("Ada", "Bruno", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Iris", "Jonas")


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question, its right option and the wrong ones."""

    name: str
    text: str
    right: str
    wrong: tuple[str, ...]

    def __post_init__(self) -> None:
        options = [self.right, *self.wrong]
        if not self.text.strip() or not all(option.strip() for option in options):
            raise CheckpointError("expected a question and options with words in them")
        if not 2 <= len(options) <= len(ascii_uppercase):
            raise CheckpointError(
                f"expected 2 to {len(ascii_uppercase)} options, got {len(options)}"
            )


@dataclass(frozen=True)
class Shuffled:
    """A question as it is asked: options in an order, and the letter of the right one."""

    messages: tuple[Message, ...]
    letter: str
    letters: str


def shuffle_options(question: ChoiceQuestion, repetition: int, seed: int) -> Shuffled:
    """The options in an order of this repetition, the same for a seed."""
    options = [question.right, *question.wrong]
    order = list(range(len(options)))
    random.Random(f"{seed}, {question.name}, {repetition}").shuffle(order)
    letters = ascii_uppercase[: len(options)]
    lines = [f"{letter}) {options[i]}" for letter, i in zip(letters, order, strict=True)]
    text = (
        f"{question.text}\n\n" + "\n".join(lines) + "\n\n"
        "Think step by step, and then choose one of the options. The last line of your response "
        f"must be 'Answer: X' without quotes, where X is one of {', '.join(letters)}."
    )
    return Shuffled(({"role": "user", "content": text},), letters[order.index(0)], letters)


def load_choice_questions(
    data: str, subset: str | None = None, split: str | None = None
) -> list[ChoiceQuestion]:
    """The questions of `data`: "generated", a path or a data set of the hub."""
    if data == GENERATED:
        return generated_choice_questions()
    found = [_question(line) for line in read_lines(data, subset, split)]
    if not found:
        raise CheckpointError(f"expected questions in {data}, got none")
    names = unique_names([question.name for question in found])
    return [
        ChoiceQuestion(name, question.text, question.right, question.wrong)
        for name, question in zip(names, found, strict=True)
    ]


def generated_choice_questions(count: int = NUM_GENERATED, seed: int = 0) -> list[ChoiceQuestion]:
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
        found.append(ChoiceQuestion(f"generated-{number + 1}", text, names[asked], wrong))
    return found


def _question(line: Line) -> ChoiceQuestion:
    row, where = line
    try:
        return _gpqa(row) if RIGHT in row else _listed(row)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _gpqa(row: Mapping[str, Any]) -> ChoiceQuestion:
    wrong = [row.get(f"{WRONG}{number}") for number in (1, 2, 3)]
    texts = [row.get("Question"), row[RIGHT], *wrong]
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError(
            f"expected texts in Question, {RIGHT} and {WRONG}1 to 3, got {brief(texts)}"
        )
    question, right, *others = (str(text).strip() for text in texts)
    name = row.get("Record ID")
    return ChoiceQuestion(str(name or ""), question, right, tuple(others))


def _listed(row: Mapping[str, Any]) -> ChoiceQuestion:
    text, answer = row.get("question"), row.get("answer")
    options = row.get("choices", row.get("options"))
    if not isinstance(text, str) or not isinstance(options, list) or answer is None:
        raise CheckpointError(
            "expected the columns of GPQA, or question, choices and answer, "
            f"got {brief(sorted(map(str, row)))}"
        )
    if not all(isinstance(option, str) for option in options):
        raise CheckpointError(f"expected texts in choices, got {brief(options)}")
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip().isalpha():
        place = ascii_uppercase.find(answer.strip().upper())
    elif isinstance(answer, int) and not isinstance(answer, bool):
        place = answer
    else:
        place = int(answer) if isinstance(answer, str) and answer.isdecimal() else -1
    if not 0 <= place < len(options):
        raise CheckpointError(
            f"expected an answer that is one of {len(options)} choices, got {brief(answer)}"
        )
    texts = [option.strip() for option in options]
    wrong = tuple(option for i, option in enumerate(texts) if i != place)
    name = row.get("question_id", row.get("id"))
    return ChoiceQuestion("" if name is None else str(name), text.strip(), texts[place], wrong)
