"""MRCR: which of several equal requests a model can tell apart, by length, BF16 beside FP8."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.measure.evaluate.answering import answer_tokens, stop_tokens
from octavo.measure.evaluate.applied import applied
from octavo.measure.evaluate.chat_prompt import chat_tokens
from octavo.measure.evaluate.endpoint import Client, Endpoint
from octavo.measure.evaluate.mrcr_data import Question
from octavo.measure.evaluate.mrcr_scores import area_under_curve, bucket_of, grade, score_values
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
    on_question: Callable[[], None] = lambda: None,
) -> Row:
    """A local model with a recipe applied for as long as it answers."""
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
    return Row(name=row.name, impl="transformers", about=about, machine=machine, answer=answer)


def endpoint_row(
    endpoint: Endpoint, model: str, *, on_question: Callable[[], None] = lambda: None
) -> Row:
    """A server that answers chats; the machine of a record is the one that asked."""

    @contextmanager
    def answer() -> Iterator[Ask]:
        with Client(endpoint) as client:

            def ask(one: Counted) -> str:
                found = client.chat(one.question.messages, one.max_tokens)
                on_question()
                return found

            yield lambda questions: client.map(ask, questions)

    about = {"model": model, "url": endpoint.url}
    return Row(
        name=endpoint.name, impl="http", about=about, machine=Machine.current(), answer=answer
    )


def evaluate(
    rows: Sequence[Row],
    buckets: Mapping[int, Sequence[Counted]],
    *,
    about: Mapping[str, Scalar],
    command: str,
    on_record: Callable[[Measurement], None] = lambda record: None,
) -> list[Measurement]:
    """One record for each row and bucket, and one for all of a row, with its AUC.

    Every row after the first also has what it recovers of the first.
    """
    if not rows or len({row.name for row in rows}) != len(rows):
        raise ConfigError(f"expected rows of different names, got {[row.name for row in rows]}")
    records: list[Measurement] = []
    first: dict[Scalar, Measurement] = {}
    for row in rows:
        is_first = row is rows[0]

        def add(
            bucket: Scalar, values: dict[str, float], row: Row = row, is_first: bool = is_first
        ) -> None:
            if not is_first:
                values |= recovery(values, first[bucket].values)
            record = Measurement(
                op=OP,
                impl=row.impl,
                case={**row.about, **about, "recipe": row.name, "bucket": bucket},
                values=values,
                machine=row.machine,
                command=command,
                baseline=None if is_first else rows[0].name,
            )
            if is_first:
                first[bucket] = record
            records.append(record)
            on_record(record)

        scores: dict[int, list[float]] = {}
        with row.answer() as ask:
            for end, questions in buckets.items():
                pairs = zip(ask(questions), questions, strict=True)
                scores[end] = [
                    grade(text, one.question.answer, one.question.prefix) for text, one in pairs
                ]
                add(end, score_values(scores[end]))
        means = {end: 100 * statistics.fmean(some) for end, some in scores.items()}
        area = area_under_curve(means, max(means))
        assert area is not None
        whole = score_values([score for some in scores.values() for score in some])
        add(ALL, {**whole, "auc_percent": area, "auc_length": float(max(means))})
    return records


def mrcr_table(records: Sequence[Measurement]) -> Table:
    """One row for each recipe: scores by bucket, of all questions, AUC and recovery."""
    from octavo.measure.report.needle import tokens_text

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
