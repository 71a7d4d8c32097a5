"""MRCR: which of several equal requests a model can tell apart, by length, BF16 beside FP8."""

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from octavo.amounts import parse_tokens
from octavo.brief import brief
from octavo.calibration.rows import Row as FileRow
from octavo.calibration.rows import parse_json
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens, text_tokens
from octavo.measure.evaluate.answering import Message
from octavo.measure.evaluate.language import (
    Ask,
    Keys,
    Prompt,
    calibrate_rows,
    counting_tokenizer,
    given_scales,
    load_model,
    participants,
)
from octavo.measure.evaluate.question_files import read_questions
from octavo.measure.evaluate.requests import GENERATED, LanguageRequest, MrcrRequest
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, tokens_text
from octavo.measure.run import (
    ALL,
    Outcome,
    Progress,
    Records,
    Values,
    Watch,
    Workload,
    run_workload,
)
from octavo.measure.statistics import (
    mean_values,
    paired_values,
    question_values,
    recovery,
    shift_values,
)

COLUMNS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
SUFFIXES = (".jsonl", ".parquet")
OF_ALL = ("score_percent", "score_standard_error_percent", "auc_percent", "recovery_percent")

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


# Generated chats to calibrate on, where an evaluation asks about others.
CHAT_LENGTH, NUM_CHATS = 2048, 4
# An answer may be so many tokens longer than the true one.
SLACK_TOKENS = 64
# Tokens of prompt and answer together, up to and with the end; as openai/mrcr has them from 8k on.
BUCKETS: tuple[int, ...] = tuple(2**power for power in range(11, 21))


@dataclass(frozen=True)
class Counted:
    """A question, and how many tokens its prompt and the true answer have."""

    question: Question
    num_prompt_tokens: int
    num_answer_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the true answer."""
        return self.num_prompt_tokens + self.num_answer_tokens

    @property
    def prompt(self) -> Prompt:
        """What a row is asked."""
        max_tokens = self.num_answer_tokens + SLACK_TOKENS
        return Prompt(self.question.messages, max_tokens, self.num_prompt_tokens)


def count_tokens(tokenizer: Any, question: Question) -> Counted:
    """A question as the tokenizer's chat template has it."""
    answer = text_tokens(tokenizer, question.answer, add_special_tokens=False)
    return Counted(question, len(chat_tokens(tokenizer, question.messages)), len(answer))


def choose_questions(
    questions: Sequence[Counted], max_length: int | None, per_bucket: int | None
) -> dict[int, list[Counted]]:
    """The questions of each bucket by its end: those that fit, and the first so many of them."""
    buckets: dict[int, list[Counted]] = {}
    for one in questions:
        if max_length is None or one.num_tokens + SLACK_TOKENS <= max_length:
            buckets.setdefault(bucket_of(one.num_tokens), []).append(one)
    if not buckets:
        shortest = min(one.num_tokens for one in questions) + SLACK_TOKENS
        raise ConfigError(
            f"expected questions of up to {max_length} tokens, the shortest has {shortest}"
        )
    return {end: buckets[end][:per_bucket] for end in sorted(buckets)}


def run(request: MrcrRequest, output: Path | None, watch: Watch) -> list[Measurement]:
    """Ask every row; a record is in the file `output` as soon as its bucket is done."""
    records = Records.of_file(output, is_resumed=request.resume)
    scales = given_scales(request)  # before a model is loaded
    questions = load_questions(request.data, request.num_needles)
    text_model = None if request.endpoint else load_model(request)
    tokenizer = counting_tokenizer(request, text_model)
    own = None if text_model is None else text_model.max_length
    asked = None if request.max_length is None else parse_tokens(request.max_length)
    if own is not None and asked is not None and asked > own:
        raise ConfigError(
            f"expected --max-length up to {own}, for which {request.model} was made, got {asked}"
        )
    limit = asked or own
    counting, counted = Progress(watch, "counting tokens", len(questions)), []
    for question in questions:
        counted.append(count_tokens(tokenizer, question))
        counting.add()
    buckets = choose_questions(counted, limit, request.num_questions)
    if text_model is not None and not scales:
        scales = calibrate_on_chats(request, text_model, watch)
    num_rows = len(request.endpoint or request.parsed_rows)
    progress = Progress(watch, "answering", num_rows * sum(map(_length, buckets.values())))
    calibration = ["generated chats", request.margin]
    about = {
        "data": request.data_name,
        "num_needles": request.num_needles or ALL,
        "max_length": limit or ALL,
        "per_bucket": request.num_questions or ALL,
    }
    return run_workload(
        participants(request, text_model, scales, progress, calibration=calibration),
        make_workload(buckets, about, request.command),
        records,
        on_skip=lambda bucket: progress.add(_length(buckets[int(bucket)])),
    )


def calibrate_on_chats(
    request: LanguageRequest, text_model: TextModel, watch: Watch
) -> dict[Keys, ScaleSet]:
    """Scales for the request's rows, by generated chats that nobody is asked about."""

    def make_windows() -> tuple[str, list[torch.Tensor]]:
        chats = generated_questions(NUM_CHATS, seed=-1)
        tokens = [chat_tokens(text_model.tokenizer, chat.messages) for chat in chats]
        data = f"{len(chats)} generated chats of up to {CHAT_LENGTH} tokens"
        return data, [torch.tensor(one[:CHAT_LENGTH]) for one in tokens]

    return calibrate_rows(request, text_model, make_windows, watch)


def make_workload(
    buckets: Mapping[int, Sequence[Counted]], about: Mapping[str, Scalar], command: str
) -> Workload[Ask, Scalar]:
    """The scores of each bucket, and those of all questions with their AUC.

    Rows after the first also have what they retain of the first.
    """
    asked: dict[Scalar, Sequence[Counted]] = {end: some for end, some in buckets.items()}
    asked[ALL] = [one for some in buckets.values() for one in some]

    def summarize(values: Mapping[Scalar, Values]) -> dict[str, float]:
        """The scores of all questions, and AUC, from those of each bucket."""
        scores = {int(end): own["score_percent"] for end, own in values.items()}
        longest = max(scores)
        area = area_under_curve(scores, longest)
        assert area is not None
        whole = joined_values(list(values.values()))
        shift = shift_values(list(values.values()))
        return {**whole, "auc_percent": area, "auc_length": float(longest), **shift}

    def measure(ask: Ask, bucket: Scalar) -> Outcome:
        texts = ask([one.prompt for one in asked[bucket]])
        pairs = zip(texts, (one.question for one in asked[bucket]), strict=True)
        scores = [grade(text, q.answer, q.prefix) for text, q in pairs]
        return Outcome(score_values(scores) | question_values(scores))

    return Workload(
        op="mrcr",
        command=command,
        cells={
            bucket: {**about, "bucket": bucket, "questions_sha256": _digest(some)}
            for bucket, some in asked.items()
        },
        measure=measure,
        compare=lambda own, first: recovery(own, first) | paired_values(own, first),
        summary=(ALL, summarize),
    )


def _length(questions: Sequence[Counted]) -> int:
    return sum(one.num_prompt_tokens for one in questions)


def _digest(questions: Sequence[Counted]) -> str:
    """Of all that is asked, in its order: a file may change and keep its name."""
    asked = [(q.messages, q.answer, q.prefix) for q in (one.question for one in questions)]
    return hashlib.sha256(json.dumps(asked, default=dict).encode()).hexdigest()[:16]


def grade(response: str, answer: str, prefix: str) -> float:
    """How like the answer a response is, 0 to 1; 0 if it does not start with the prefix."""
    if not response.startswith(prefix):
        return 0.0
    own, true = response.removeprefix(prefix), answer.removeprefix(prefix)
    return float(SequenceMatcher(None, own, true).ratio())


def bucket_of(num_tokens: int) -> int:
    """The end of the bucket with so many tokens; the first has all that are shorter."""
    if num_tokens > BUCKETS[-1]:
        raise ConfigError(
            f"expected questions of up to {BUCKETS[-1]} tokens, got {num_tokens}; --max-length "
            "leaves longer ones out"
        )
    return next(end for end in BUCKETS if num_tokens <= end)


def score_values(scores: Sequence[float]) -> dict[str, float]:
    """The mean score in percent, and its standard error where there are two or more."""
    return {**mean_values(scores), "num_questions": float(len(scores))}


def joined_values(buckets: Sequence[Values]) -> dict[str, float]:
    """The values of all questions, from those that `score_values` gave of each bucket."""
    counts = [values["num_questions"] for values in buckets]
    means = [values["score_percent"] / 100 for values in buckets]
    number = sum(counts)
    mean = sum(n * m for n, m in zip(counts, means, strict=True)) / number
    joined = {"score_percent": 100 * mean, "num_questions": number}
    if number > 1:
        squares = 0.0  # of what scores are away from the mean of all
        for values, n, m in zip(buckets, counts, means, strict=True):
            error = values.get("score_standard_error_percent", 0.0) / 100
            squares += (n - 1) * n * error**2 + n * (m - mean) ** 2
        joined["score_standard_error_percent"] = 100 * math.sqrt(squares / (number - 1) / number)
    return joined


def area_under_curve(scores: Mapping[int, float], length: int) -> float | None:
    """AUC@length: the mean height of the line through the scores of buckets that end by `length`.

    scores: end of a bucket -> its score. The line is straight between the ends of buckets, on an
    axis of tokens, so that long ones count most. One bucket is its own mean; None without any.
    """
    ends = sorted(end for end in scores if end <= length)
    if not ends:
        return None
    if len(ends) == 1:
        return scores[ends[0]]
    areas = [(b - a) * (scores[a] + scores[b]) / 2 for a, b in zip(ends, ends[1:], strict=False)]
    return sum(areas) / (ends[-1] - ends[0])


def mrcr_table(records: Sequence[Measurement]) -> Table:
    """One row for each recipe: scores by bucket, of all questions, AUC and recovery."""
    wholes = [record for record in records if record.case["bucket"] == ALL]
    ends = sorted({b for r in records if isinstance(b := r.case["bucket"], int)})
    scores = {(r.case["recipe"], r.case["bucket"]): r.values["score_percent"] for r in records}
    rows = []
    for whole in wholes:
        name = whole.case["recipe"]
        by_bucket = [scores[name, end] for end in ends]
        rows.append((name, *by_bucket, *map(whole.get, OF_ALL)))
    first = wholes[0].case
    heads = [f"≤ {tokens_text(end)}" for end in ends]
    area = f"AUC@{tokens_text(ends[-1])}"
    return Table(
        caption=f"MRCR score (%): {first['model']}, {first['data']}, needles: "
        f"{first['num_needles']}, {int(wholes[0].values['num_questions'])} questions",
        header=("recipe", *heads, "all", "± s.e.", area, "recovery (%)"),
        rows=tuple(rows),
    )
