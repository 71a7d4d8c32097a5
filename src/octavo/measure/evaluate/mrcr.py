"""MRCR: which of several equal requests a model can tell apart, by length, BF16 beside FP8."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from octavo.amounts import parse_tokens
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens, text_tokens
from octavo.measure.evaluate.language import (
    Ask,
    Keys,
    Prompt,
    Reply,
    calibrate_rows,
    clients,
    counting_tokenizer,
    given_scales,
    load_model,
    participants,
)
from octavo.measure.evaluate.mrcr_data import Question, generated_questions, load_questions
from octavo.measure.evaluate.requests import LanguageRequest, MrcrRequest
from octavo.measure.evaluate.sampling import (
    Item,
    Sampler,
    SamplingPlan,
    local_samplers,
    make_plan,
    served_sampler,
)
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, tokens_text
from octavo.measure.run import (
    ALL,
    Outcome,
    Participant,
    Progress,
    Records,
    Values,
    Watch,
    Workload,
    run_workload,
)
from octavo.measure.statistics import (
    paired_values,
    pass_values,
    question_values,
    recovery,
    shift_values,
)

OF_ALL = ("score_percent", "score_standard_error_percent", "auc_percent", "recovery_percent")
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

    def prompt(self, repetition: int = 0) -> Prompt:
        """What a row is asked."""
        max_tokens = self.num_answer_tokens + SLACK_TOKENS
        return Prompt(self.question.messages, max_tokens, self.num_prompt_tokens, repetition)


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
    plan, repetitions = make_plan(request, text_model)
    request = replace(request, repetitions=repetitions)
    if text_model is not None and not scales:
        scales = calibrate_on_chats(request, text_model, watch)
    num_rows = len(request.endpoint or request.parsed_rows)
    total = num_rows * repetitions * sum(map(_length, buckets.values()))
    progress = Progress(watch, "answering", total)
    about = {
        "data": request.data_name,
        "num_needles": request.num_needles or ALL,
        "max_length": limit or ALL,
        "per_bucket": request.num_questions or ALL,
        "repetitions": repetitions,
        **plan.about(),
        "max_tokens": request.max_tokens or f"answer + {SLACK_TOKENS}",
    }
    return run_workload(
        _rows(request, text_model, scales, plan, progress),
        make_workload(buckets, about, request.command, repetitions),
        records,
        on_skip=lambda bucket: progress.add(repetitions * _length(buckets[int(bucket)])),
    )


def _rows(
    request: MrcrRequest,
    text_model: TextModel | None,
    scales: Mapping[Keys, ScaleSet],
    plan: SamplingPlan,
    progress: Progress,
) -> list[Participant[Ask]]:
    """Rows that answer by the plan: servers, a model in the engine, or greedily without it."""
    if text_model is None:
        tokenizer = {"tokenizer": request.tokenizer or ""}
        samplers = [served_sampler(client, plan, **tokenizer) for client in clients(request)]
    elif plan.is_greedy and request.max_tokens is None:
        calibration = ["generated chats", request.margin]
        return participants(request, text_model, scales, progress, calibration=calibration)
    else:
        samplers = local_samplers(request, text_model, plan, scales)
    return [
        Participant(
            name=one.name,
            impl=one.impl,
            about=one.about,
            machine=one.machine,
            open=partial(_open_sampler, one, progress),
            ran=one.ran,
        )
        for one in samplers
    ]


@contextmanager
def _open_sampler(row: Participant[Sampler], progress: Progress) -> Iterator[Ask]:
    with row.open() as sampler:

        def ask(prompts: Sequence[Prompt]) -> list[str]:
            items = [_item(prompt) for prompt in prompts]
            texts: dict[Item, str] = {}
            tokens = {item: one.num_tokens for item, one in zip(items, prompts, strict=True)}

            def keep(item: Item, reply: Reply) -> None:
                texts[item] = reply.text
                progress.add(tokens[item])

            sampler.ask(items, keep)
            return [texts[item] for item in items]

        yield ask


def _item(prompt: Prompt) -> Item:
    """What a sampler is asked; a question's name is a digest, by which it has a seed of its own."""
    assert not isinstance(prompt.content, str)
    asked = json.dumps(prompt.content, default=dict).encode()
    name = hashlib.sha256(asked).hexdigest()[:16]
    return Item(name, prompt.repetition, prompt.content, "", max_tokens=prompt.max_tokens)


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
    buckets: Mapping[int, Sequence[Counted]],
    about: Mapping[str, Scalar],
    command: str,
    repetitions: int = 1,
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
        numbers = range(repetitions)
        some = asked[bucket]
        texts = iter(ask([one.prompt(number) for one in some for number in numbers]))
        scores = [
            [grade(next(texts), one.question.answer, one.question.prefix) for _ in numbers]
            for one in some
        ]
        return Outcome(pass_values(scores) | question_values(list(map(fmean, scores))))

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


def joined_values(buckets: Sequence[Values]) -> dict[str, float]:
    """The values of all questions, from those that `pass_values` gave of each bucket."""
    counts = [values["num_questions"] for values in buckets]
    means = [values["score_percent"] / 100 for values in buckets]
    number = sum(counts)
    mean = sum(n * m for n, m in zip(counts, means, strict=True)) / number
    num_answers = sum(values["num_answers"] for values in buckets)
    joined = {"score_percent": 100 * mean, "num_questions": number, "num_answers": num_answers}
    repetition = "repetition_standard_error_percent"
    if all(repetition in values for values in buckets):
        parts = (n * own[repetition] for n, own in zip(counts, buckets, strict=True))
        joined[repetition] = math.hypot(*parts) / number
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
        f"{first['num_needles']}, {int(wholes[0].values['num_questions'])} questions × "
        f"{first.get('repetitions', 1)}",
        header=("recipe", *heads, "all", "± s.e.", area, "recovery (%)"),
        rows=tuple(rows),
    )
