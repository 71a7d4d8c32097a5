"""Questions of MRCR: files and data sets in the form of openai/mrcr, and generated chats."""

import random
from dataclasses import dataclass

from octavo.brief import brief
from octavo.calibration.rows import Row as FileRow
from octavo.calibration.rows import parse_json
from octavo.errors import CheckpointError, ConfigError
from octavo.measure.evaluate.answering import Message
from octavo.measure.evaluate.question_files import read_questions
from octavo.measure.evaluate.requests import GENERATED

COLUMNS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
SUFFIXES = (".jsonl", ".parquet")

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
    else:  # files of the data set lie in folders of 2, 4 and 8 needles
        found = read_questions(_question, data, columns=COLUMNS, suffixes=SUFFIXES)
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


def _question(row: FileRow) -> Question:
    prompt, answer, prefix, num_needles = (row.content[name] for name in COLUMNS)
    messages = parse_json(prompt, "prompt") if isinstance(prompt, str) else prompt
    own = []
    for message in messages if isinstance(messages, list) else [messages]:
        match message:
            case {"role": "assistant" | "system" | "user" as role, "content": str(content)}:
                own.append({"role": role, "content": content})
            case _:
                raise CheckpointError(f"expected messages in prompt, got {brief(messages)}")
    if not isinstance(answer, str) or not isinstance(prefix, str):
        raise CheckpointError(f"expected texts of answer and prefix, got {brief((answer, prefix))}")
    try:
        count = int(num_needles)
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    return Question(tuple(own), answer, prefix, count)
