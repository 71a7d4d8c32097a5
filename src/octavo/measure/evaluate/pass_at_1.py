"""pass@1 of questions with one right answer: rows, records and their table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.errors import ConfigError
from octavo.measure.evaluate.answer_file import AnswerFile, StoredAnswer
from octavo.measure.evaluate.choice_data import ChoiceQuestion, shuffle_options
from octavo.measure.evaluate.endpoint import Reply
from octavo.measure.evaluate.final_answer import read_letter, read_math
from octavo.measure.evaluate.math_data import MathQuestion
from octavo.measure.evaluate.math_equality import Checker
from octavo.measure.evaluate.pass_rate import paired_recovery, pass_values
from octavo.measure.evaluate.sampled_answers import Item, Row, SamplingPlan
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class Task:
    """Items to ask, and how their answers are read and compared.

    read: what a text answers, None if that cannot be read. is_right: of what was read.
    """

    op: str
    items: tuple[Item, ...] = field(repr=False)
    read: Callable[[str, Item], str | None]
    is_right: Callable[[str, Item], bool]
    about: Mapping[str, Scalar]


def choice_task(questions: Sequence[ChoiceQuestion], repetitions: int, seed: int) -> Task:
    """Multiple choice; every repetition has its own order of options."""
    items = []
    for question in questions:
        for repetition in range(repetitions):
            asked = shuffle_options(question, repetition, seed)
            items.append(
                Item(question.name, repetition, asked.messages, asked.letter, asked.letters)
            )
    return Task(
        op="choice",
        items=tuple(items),
        read=lambda text, item: read_letter(text, item.letters),
        is_right=lambda found, item: found == item.answer,
        about={"repetitions": repetitions},
    )


def math_task(questions: Sequence[MathQuestion], repetitions: int, checker: Checker) -> Task:
    """Problems with a boxed answer."""
    return Task(
        op="math",
        items=tuple(
            Item(question.name, repetition, question.messages, question.answer)
            for question in questions
            for repetition in range(repetitions)
        ),
        read=lambda text, item: read_math(text),
        is_right=lambda found, item: checker.is_equal(found, item.answer),
        about={"repetitions": repetitions, "checker": checker.name},
    )


def evaluate(
    rows: Sequence[Row],
    task: Task,
    plan: SamplingPlan,
    *,
    about: Mapping[str, Scalar],
    command: str,
    answers: AnswerFile,
    on_answer: Callable[[], None] = lambda: None,
    on_record: Callable[[Measurement], None] = lambda record: None,
) -> list[Measurement]:
    """One record for each row; every one after the first has what it recovers of the first.

    answers: where answers are written as they come, and those of before are found.
    """
    if not rows or len({row.name for row in rows}) != len(rows):
        raise ConfigError(f"expected rows of different names, got {[row.name for row in rows]}")
    records: list[Measurement] = []
    first: list[list[bool]] = []
    for row in rows:
        graded = _answer_all(row, task, plan, answers, on_answer)
        scores = _by_question(task, graded)
        values = pass_values(scores) | _counts(graded)
        if row is rows[0]:
            first = scores
        else:
            values |= paired_recovery(scores, first)
        record = Measurement(
            op=task.op,
            impl=row.impl,
            case={**row.about, **about, **task.about, **plan.about(), "recipe": row.name},
            values=values,
            machine=row.machine,
            command=command,
            baseline=None if row is rows[0] else rows[0].name,
        )
        records.append(record)
        on_record(record)
    return records


def _answer_all(
    row: Row,
    task: Task,
    plan: SamplingPlan,
    answers: AnswerFile,
    on_answer: Callable[[], None],
) -> dict[Item, StoredAnswer]:
    graded: dict[Item, StoredAnswer] = {}

    def grade(item: Item, reply: Reply) -> StoredAnswer:
        found = task.read(reply.text, item)
        is_right = found is not None and task.is_right(found, item)
        answer = StoredAnswer(
            key=row.key(item, plan),
            row=row.name,
            question=item.question,
            repetition=item.repetition,
            answer=item.answer,
            found=found,
            is_right=is_right,
            reply=reply,
        )
        graded[item] = answer
        on_answer()
        return answer

    todo = []
    for item in task.items:
        before = answers.reply(row.key(item, plan))
        if before is None:
            todo.append(item)
        else:
            grade(item, before)
    if todo:
        with row.answer() as ask:
            ask(todo, lambda item, reply: answers.append(grade(item, reply)))
    return {item: graded[item] for item in task.items}


def _by_question(task: Task, graded: Mapping[Item, StoredAnswer]) -> list[list[bool]]:
    scores: dict[str, list[bool]] = {}
    for item in task.items:
        scores.setdefault(item.question, []).append(graded[item].is_right)
    return list(scores.values())


def _counts(graded: Mapping[Item, StoredAnswer]) -> dict[str, float]:
    answers = list(graded.values())
    num_unparsed = sum(answer.found is None for answer in answers)
    values = {
        "num_unparsed": float(num_unparsed),
        "unparsed_percent": 100 * num_unparsed / len(answers),
        "num_cut": float(sum(answer.reply.is_cut for answer in answers)),
    }
    lengths = [answer.reply.num_tokens for answer in answers]
    known = [length for length in lengths if length is not None]
    if len(known) == len(lengths):
        values["mean_answer_tokens"] = sum(known) / len(known)
    return values


def pass_table(records: Sequence[Measurement]) -> Table:
    """One row for each recipe: pass@1, its errors, what could not be read, and recovery."""
    names = (
        *("score_percent", "score_standard_error_percent", "repetition_standard_error_percent"),
        *("num_unparsed", "num_cut", "recovery_percent", "recovery_standard_error_percent"),
    )
    first = records[0]
    return Table(
        caption=f"{first.op}, pass@1 (%): {first.case['model']}, {first.case['data']}, "
        f"{int(first.values['num_questions'])} questions × {first.case['repetitions']}",
        header=(
            *("recipe", "pass@1", "± s.e.", "± of repetitions"),
            *("unparsed", "cut", "recovery (%)", "± s.e. of it"),
        ),
        rows=tuple(
            (str(record.case["recipe"]), *(record.values.get(name) for name in names))
            for record in records
        ),
    )
