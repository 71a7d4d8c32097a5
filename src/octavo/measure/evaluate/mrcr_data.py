"""Questions of MRCR: chats in which one of several equal requests is asked for again.

The form is that of openai/mrcr: `prompt`, a list of messages or its JSON text; `answer`, which
starts with `random_string_to_prepend`; and `n_needles`. It is read from a parquet or JSON Lines
file, from a folder of them, or by its name from the `datasets` hub. "generated" makes small ones.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.calibration.rows import parse_json
from octavo.errors import CheckpointError, ConfigError
from octavo.measure.evaluate.endpoint import Message
from octavo.measure.evaluate.question_files import Line, read_files, read_split

COLUMNS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
SUFFIXES = (".jsonl", ".parquet")
GENERATED = "generated"
ROLES = ("assistant", "system", "user")

_KINDS = ("poem", "riddle", "short story", "news report", "song", "letter", "speech", "recipe")
_TOPICS = ("tapirs", "rocks", "clouds", "harbors", "violins", "maps", "lemons", "trains", "owls")
_SUBJECTS = ("The old gardener", "A patient fox", "My neighbour", "The tallest ship", "An owl")
_VERBS = ("carries", "forgets", "paints", "follows", "sings about", "counts", "repairs")
_OBJECTS = ("the silver bell", "seven lanterns", "a paper kite", "the last apple", "a small drum")
_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")
GENERATED_SIZES = (20, 60)  # requests in a generated chat


@dataclass(frozen=True)
class Question:
    """A chat, the answer to its last message, and the prefix that the answer must have."""

    messages: tuple[Message, ...]
    answer: str
    prefix: str
    num_needles: int

    def __post_init__(self) -> None:
        if not self.messages or self.messages[-1]["role"] != "user":
            raise CheckpointError("expected messages that end with the user's")
        if not self.prefix or not self.answer.startswith(self.prefix):
            raise CheckpointError(
                f"expected an answer that starts with {brief(self.prefix)}, got "
                f"{brief(self.answer[:100])}"
            )


def load_questions(data: str, num_needles: int | None = None) -> list[Question]:
    """The questions of `data`; num_needles: only those with so many. ConfigError if none has."""
    if data == GENERATED:
        found = generated_questions()
    elif (path := Path(data)).exists():
        # Files of the data set lie in folders of 2, 4 and 8 needles.
        found = [_question(line) for line in read_files(path, COLUMNS, SUFFIXES)]
    else:
        found = [_question(line) for line in read_split(data, "train", COLUMNS)]
    if not found:
        raise CheckpointError(f"expected questions in {data}, got none")
    chosen = [q for q in found if num_needles in (None, q.num_needles)]
    if not chosen:
        there = ", ".join(map(str, sorted({q.num_needles for q in found})))
        raise ConfigError(f"expected questions with {num_needles} needles, got those with {there}")
    return chosen


def generated_questions(count: int = 8, seed: int = 0) -> list[Question]:
    """Small chats with 2 needles each, the same ones for a seed; half of them longer."""
    return [
        _generate(random.Random(f"{seed}, {i}"), GENERATED_SIZES[i * len(GENERATED_SIZES) // count])
        for i in range(count)
    ]


def _generate(draw: random.Random, num_requests: int, num_needles: int = 2) -> Question:
    asked = (draw.choice(_KINDS), draw.choice(_TOPICS))
    others = [(kind, topic) for kind in _KINDS for topic in _TOPICS if (kind, topic) != asked]
    requests = draw.choices(others, k=num_requests)
    for place in draw.sample(range(num_requests), num_needles):
        requests[place] = asked
    messages: list[Message] = []
    needles = []
    for kind, topic in requests:
        lines = [
            f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}."
            for _ in range(4)
        ]
        text = f"About {topic}: " + " ".join(lines)
        messages.append({"role": "user", "content": f"write a {kind} about {topic}"})
        messages.append({"role": "assistant", "content": text})
        if (kind, topic) == asked:
            needles.append(text)
    which = draw.randrange(num_needles)
    prefix = "".join(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghjkmnpqrstuvwxyz23456789", k=10))
    question = (
        f"Prepend {prefix} to the {_ORDINALS[which]} (1 indexed) {asked[0]} about {asked[1]}. "
        "Do not include any other text in your response."
    )
    messages.append({"role": "user", "content": question})
    return Question(tuple(messages), prefix + needles[which], prefix, num_needles)


def _question(line: Line) -> Question:
    row, where = line
    prompt = row["prompt"]
    messages = parse_json(prompt, f"{where}: prompt") if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise CheckpointError(f"{where}: expected messages in prompt, got {brief(messages)}")
    texts = (row["answer"], row["random_string_to_prepend"])
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{where}: expected texts of answer and prefix, got {brief(texts)}")
    own = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    try:
        return Question(own, *texts, int(row["n_needles"]))
    except (CheckpointError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )
