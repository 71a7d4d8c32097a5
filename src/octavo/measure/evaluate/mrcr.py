"""MRCR: which of several equal requests a model can tell apart, by length, BF16 beside FP8."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure.evaluate.answering import answer_tokens, stop_tokens
from octavo.measure.evaluate.applied import applied
from octavo.measure.evaluate.endpoint import Client, Endpoint
from octavo.measure.evaluate.mrcr_data import Question
from octavo.measure.evaluate.mrcr_scores import (
    area_under_curve,
    bucket_of,
    grade,
    joined_values,
    score_values,
)
from octavo.measure.evaluate.perplexity_rows import RecipeRow
from octavo.measure.evaluate.recovery import recovery
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.measure.report.tables import Table

OP = "mrcr"
ALL = "all"
# An answer may be so many tokens longer than the true one.
SLACK_TOKENS = 64


@dataclass(frozen=True)
class Counted:
    """A question with its prompt in tokens, and how many the true answer has."""

    question: Question
    tokens: tuple[int, ...] = field(repr=False)
    num_answer_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the true answer."""
        return len(self.tokens) + self.num_answer_tokens

    @property
    def max_tokens(self) -> int:
        """How long an answer may be."""
        return self.num_answer_tokens + SLACK_TOKENS


Ask = Callable[[Sequence[Counted]], list[str]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: who answers, from when `answer` is entered until it is left."""

    name: str
    impl: str
    about: Mapping[str, Scalar]
    machine: Machine
    answer: Callable[[], AbstractContextManager[Ask]] = field(repr=False)


def count_tokens(tokenizer: Any, question: Question) -> Counted:
    """A question as the tokenizer's chat template has it."""
    tokens = chat_tokens(tokenizer, question.messages)
    answer = tokenizer(question.answer, add_special_tokens=False, verbose=False)["input_ids"]
    return Counted(question, tokens, len(answer))


def choose_questions(
    questions: Sequence[Counted], max_length: int | None, per_bucket: int | None
) -> dict[int, list[Counted]]:
    """The questions of each bucket by its end: those that fit, and the first so many of them."""
    buckets: dict[int, list[Counted]] = {}
    for one in questions:
        if max_length is None or len(one.tokens) + one.max_tokens <= max_length:
            buckets.setdefault(bucket_of(one.num_tokens), []).append(one)
    if not buckets:
        shortest = min(len(one.tokens) + one.max_tokens for one in questions)
        raise ConfigError(
            f"expected questions of up to {max_length} tokens, the shortest has {shortest}"
        )
    return {end: buckets[end][:per_bucket] for end in sorted(buckets)}


def local_row(
    text_model: TextModel,
    row: RecipeRow,
    *,
    chunk: int,
    machine: Machine,
    recipe_digest: str | None = None,
    on_question: Callable[[], None] = lambda: None,
) -> Row:
    """A local model with a recipe applied for as long as it answers.

    recipe_digest: of what its name does not say of the recipe.
    """
    stop = stop_tokens(text_model)

    def answer_one(model: Any, one: Counted) -> str:
        tokens = answer_tokens(
            model,
            torch.tensor(one.tokens),
            max_tokens=one.max_tokens,
            chunk=chunk,
            stop=stop,
        )
        on_question()
        return str(text_model.tokenizer.decode(tokens, skip_special_tokens=True))

    @contextmanager
    def answer() -> Iterator[Ask]:
        with applied(text_model.model, row.recipe) as model:
            yield lambda questions: [answer_one(model, one) for one in questions]

    about: dict[str, Scalar] = {"model": text_model.name, "dtype": text_model.dtype, "chunk": chunk}
    about |= text_model.prompts.about
    if recipe_digest is not None:
        about["recipe_digest"] = recipe_digest
    return Row(name=row.name, impl="transformers", about=about, machine=machine, answer=answer)


def endpoint_row(
    endpoint: Endpoint,
    model: str,
    *,
    tokenizer: str,
    on_question: Callable[[], None] = lambda: None,
) -> Row:
    """A server that answers chats; the machine of a record is the one that asked.

    tokenizer: the name of the one that counts tokens.
    """

    @contextmanager
    def answer() -> Iterator[Ask]:
        with Client(endpoint) as client:

            def ask(one: Counted) -> str:
                found = client.chat(one.question.messages, one.max_tokens)
                on_question()
                return found

            yield lambda questions: client.map(ask, questions)

    about = {"model": model, "url": endpoint.url, "tokenizer": tokenizer}
    return Row(
        name=endpoint.name, impl="http", about=about, machine=Machine.current(), answer=answer
    )


def evaluate(
    rows: Sequence[Row],
    buckets: Mapping[int, Sequence[Counted]],
    *,
    about: Mapping[str, Scalar],
    command: str,
    done: Sequence[Measurement] = (),
    on_record: Callable[[Measurement], None] = lambda record: None,
    on_skip: Callable[[int], None] = lambda num_questions: None,
) -> list[Measurement]:
    """One record for each row and bucket, and one for all of a row, with its AUC.

    Every row after the first also has what it recovers of the first. done: records of an earlier
    run; a bucket that is among them is not asked again. on_record is told of each new one, on_skip
    of the questions of each other.
    """
    if not rows or len({row.name for row in rows}) != len(rows):
        raise ConfigError(f"expected rows of different names, got {[row.name for row in rows]}")
    known = {_identity(r.impl, r.machine, r.case, r.baseline): r for r in done if r.op == OP}
    digests: dict[Scalar, str] = {end: _digest(some) for end, some in buckets.items()}
    digests[ALL] = _digest([one for some in buckets.values() for one in some])
    records: list[Measurement] = []
    first: dict[Scalar, Measurement] = {}
    for row in rows:
        baseline = None if row is rows[0] else rows[0].name
        about_row = {**row.about, **about, "recipe": row.name}
        measured: dict[Scalar, Measurement] = {}  # so far
        for bucket, digest in digests.items():
            case = {**about_row, "bucket": bucket, "questions_sha256": digest}
            before = known.get(_identity(row.impl, row.machine, case, baseline))
            if before is not None:
                measured[bucket] = before
        for bucket in measured.keys() & buckets.keys():
            on_skip(len(buckets[int(bucket)]))
        for bucket, values in _ask_rest(row, buckets, measured):
            if baseline is not None:
                values |= recovery(values, first[bucket].values)
            measured[bucket] = Measurement(
                op=OP,
                impl=row.impl,
                case={**about_row, "bucket": bucket, "questions_sha256": digests[bucket]},
                values=values,
                machine=row.machine,
                command=command,
                baseline=baseline,
            )
            on_record(measured[bucket])
        first = first or measured
        records += [measured[bucket] for bucket in digests]
    return records


def _ask_rest(
    row: Row, buckets: Mapping[int, Sequence[Counted]], measured: Mapping[Scalar, Measurement]
) -> Iterator[tuple[Scalar, dict[str, float]]]:
    """The values of each bucket that is not measured yet, then those of all; one at a time."""
    left = [end for end in buckets if end not in measured]
    if left:
        with row.answer() as ask:
            for end in left:
                yield end, score_values(_scores(ask, buckets[end]))
    if left or ALL not in measured:
        yield ALL, _values_of_all({end: measured[end].values for end in buckets})


def _scores(ask: Ask, questions: Sequence[Counted]) -> list[float]:
    pairs = zip(ask(questions), questions, strict=True)
    return [grade(text, one.question.answer, one.question.prefix) for text, one in pairs]


def _values_of_all(values: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The scores of all questions, and AUC, from those of each bucket."""
    longest = max(values)
    area = area_under_curve({end: own["score_percent"] for end, own in values.items()}, longest)
    assert area is not None
    return {
        **joined_values(list(values.values())),
        "auc_percent": area,
        "auc_length": float(longest),
    }


def _digest(questions: Sequence[Counted]) -> str:
    """Of all that is asked, in its order: a file may change and keep its name."""
    asked = [(q.messages, q.answer, q.prefix) for q in (one.question for one in questions)]
    return hashlib.sha256(json.dumps(asked, default=dict).encode()).hexdigest()[:16]


def _identity(
    impl: str, machine: Machine, case: Mapping[str, Scalar], baseline: str | None
) -> object:
    """What must be the same for a bucket to be done already."""
    return impl, str(machine), frozenset(case.items()), baseline


def mrcr_table(records: Sequence[Measurement]) -> Table:
    """One row for each recipe: scores by bucket, of all questions, AUC and recovery."""
    from octavo.measure.report.quality import tokens_text

    names = list(dict.fromkeys(str(record.case["recipe"]) for record in records))
    ends = sorted({b for r in records if isinstance(b := r.case["bucket"], int)})
    found = {(r.case["recipe"], r.case["bucket"]): r.values for r in records}
    rows = []
    for name in names:
        whole = found[name, ALL]
        rows.append(
            (
                name,
                *(found[name, end]["score_percent"] for end in ends),
                whole["score_percent"],
                whole.get("score_standard_error_percent"),
                whole["auc_percent"],
                whole.get("recovery_percent"),
            )
        )
    first = records[0].case
    heads = (f"≤ {tokens_text(end)}" for end in ends)
    return Table(
        caption=f"MRCR score (%): {first['model']}, {first['data']}, needles: "
        f"{first['num_needles']}, {int(found[names[0], ALL]['num_questions'])} questions",
        header=(
            *("recipe", *heads, "all", "± s.e."),
            *(f"AUC@{tokens_text(ends[-1])}", "recovery (%)"),
        ),
        rows=tuple(rows),
    )
