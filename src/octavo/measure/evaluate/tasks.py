"""pass@1 of questions with one right answer: choices, mathematics, programs; BF16 beside FP8.

Answers are drawn by a model's sampling parameters, by the engine here or by a server. Their file
has what each row said to each question, and whether it was right: JSON Lines, appended as answers
come, with the lock and the care of records (measure/store.py), so that more than one run may write
to it. A run that is resumed takes the answers that are there already; their keys say by what they
were made.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError
from octavo.measure import store
from octavo.measure.evaluate.code_data import Problem, load_problems
from octavo.measure.evaluate.code_judge import CodeJudge
from octavo.measure.evaluate.language import Reply, clients, given_scales, load_model
from octavo.measure.evaluate.math_judge import MathJudge
from octavo.measure.evaluate.mrcr import calibrate_on_chats
from octavo.measure.evaluate.requests import ChoiceRequest, CodeRequest, MathRequest
from octavo.measure.evaluate.sampling import (
    Item,
    OnReply,
    Sampler,
    local_samplers,
    make_plan,
    served_sampler,
)
from octavo.measure.evaluate.task_data import (
    Question,
    load_choice_questions,
    load_math_questions,
    read_letter,
    visible,
)
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, filled_table
from octavo.measure.run import ALL, Outcome, Progress, Records, Watch, Workload, run_workload
from octavo.measure.statistics import paired_recovery, pass_values


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """A reply, what was read of it, and whether that is the true answer."""

    key: str
    row: str
    question: str
    repetition: int
    answer: str
    found: str | None
    is_right: bool
    reply: Reply


class AnswerFile:
    """Answers of a run; path: None keeps none. is_resumed: whether those in it are used again."""

    def __init__(self, path: Path | None = None, *, is_resumed: bool = False) -> None:
        self._path, self._lock = path, threading.Lock()
        self._replies: dict[str, Reply] = {}
        if path is None:
            if is_resumed:
                raise ConfigError("--resume goes on with the file of --answers, which is not given")
            return
        store.check_folder(path)
        if not path.exists():
            return
        if not is_resumed:
            raise ConfigError(f"{path} is there already: add --resume to go on with it")
        self._replies = dict(store.read_lines(path, ANSWERS))

    def reply(self, key: str) -> Reply | None:
        """The reply of before with this key."""
        return self._replies.get(key)

    def append(self, answer: StoredAnswer) -> None:
        """Write an answer at the end of the file; it is on disk when this returns."""
        if self._path is None:
            return
        fields: dict[str, Any] = {**vars(answer), **vars(answer.reply)}
        del fields["reply"]
        with self._lock:
            store.append_lines(self._path, [json.dumps(fields)], ANSWERS)


def _parse(line: str) -> tuple[str, Reply]:
    """The key and the reply of one line."""
    try:
        row = json.loads(line)
        key, text, is_cut, tokens = (row[name] for name in ("key", "text", "is_cut", "num_tokens"))
    except (LookupError, TypeError, ValueError):
        raise CheckpointError(f"expected an answer, got {brief(line)}") from None
    return str(key), Reply(str(text), bool(is_cut), tokens)


ANSWERS = store.RowFormat(_parse, start=b'{"key": ')


class Judge(Protocol):
    """Reads what a text answers, and tells whether it is the true answer; for many threads.

    name: for records. num_workers: how many answers are judged at once.
    """

    name: str
    num_workers: int

    def judge(self, text: str, true: str) -> tuple[str | None, bool]:
        """What a text answers, None if that cannot be read, and whether it is right."""

    def close(self) -> None:
        """End what judging has started."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions, each asked some times; seed: of the order of options.

    judge: of problems and programs; None where answers are letters of options.
    """

    op: str
    questions: Sequence[Question | Problem] = field(repr=False)
    repetitions: int = 1
    seed: int = 0
    judge: Judge | None = None

    @cached_property
    def items(self) -> list[Item]:
        """All that is asked, question by question."""
        numbers = range(self.repetitions)
        return [one.item(number, self.seed) for one in self.questions for number in numbers]

    @property
    def digest(self) -> str:
        """Of all questions, in their order: a file may change and keep its name."""
        asked = [vars(question) for question in self.questions]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    def grade(self, text: str, item: Item) -> tuple[str | None, bool]:
        """What a text answers, None if that cannot be read, and whether it is right."""
        if self.judge is None:
            found = read_letter(text, item.letters)
            return found, found == item.answer
        shown = visible(text)
        return (None, False) if shown is None else self.judge.judge(shown, item.answer)


def run(request: ChoiceRequest, output: Path | None, watch: Watch) -> list[Measurement]:
    """Ask every row; a record is in the file `output` as soon as its row is done."""
    records = Records.of_file(output)
    answers = AnswerFile(request.answers, is_resumed=request.resume)
    scales = given_scales(request)  # before a model is loaded
    questions, judge = _questions(request)
    text_model = None if request.endpoint else load_model(request)
    # Options are in another order in each repetition, so that greedy ones differ.
    plan, repetitions = make_plan(request, text_model, may_repeat_greedily=judge is None)
    request = replace(request, repetitions=repetitions)
    if text_model is None:
        rows = [served_sampler(client, plan) for client in clients(request)]
    else:
        found = scales or calibrate_on_chats(request, text_model, watch)
        rows = local_samplers(request, text_model, plan, found)
    task = Task(
        op=request.task,
        questions=questions,
        repetitions=repetitions,
        seed=request.seed,
        judge=judge,
    )
    progress = Progress(watch, "answering", len(rows) * len(task.items))
    about = request.about | plan.about()
    workload = make_workload(task, answers, about, request.command, progress.add)
    try:
        return run_workload(rows, workload, records)
    finally:
        if judge is not None:
            judge.close()


def _questions(request: ChoiceRequest) -> tuple[Sequence[Question | Problem], Judge | None]:
    """The request's first questions, and who judges their answers."""
    asked = request.data, request.subset, request.split
    match request:
        case CodeRequest():
            problems = load_problems(*asked)[: request.num_questions]
            return problems, CodeJudge(problems)
        case MathRequest():
            judge = MathJudge()
            return load_math_questions(*asked)[: request.num_questions], judge
    return load_choice_questions(*asked)[: request.num_questions], None


def make_workload(
    task: Task,
    answers: AnswerFile,
    about: Mapping[str, Scalar],
    command: str,
    on_answer: Callable[[], None] = lambda: None,
) -> Workload[Sampler, str]:
    """pass@1 of each row; every one after the first has what it retains of the first.

    answers: where answers are written as they come, and those of before are found.
    """
    first: list[list[bool]] = []

    def measure(row: Sampler, cell: str) -> Outcome:
        nonlocal first
        graded = _answer_all(row, task, answers, on_answer)
        by_question: dict[str, list[bool]] = {}
        for answer in graded:
            by_question.setdefault(answer.question, []).append(answer.is_right)
        scores = list(by_question.values())
        compared = paired_recovery(scores, first) if first else {}
        first = first or scores
        values = pass_values(scores)
        values["num_unparsed"] = float(sum(answer.found is None for answer in graded))
        values["unparsed_percent"] = 100 * values["num_unparsed"] / len(graded)
        values["num_cut"] = float(sum(answer.reply.is_cut for answer in graded))
        lengths = [n for answer in graded if (n := answer.reply.num_tokens) is not None]
        if len(lengths) == len(graded):
            values["mean_answer_tokens"] = sum(lengths) / len(lengths)
        return Outcome(values | compared)

    checked = {} if task.judge is None else {"checker": task.judge.name}
    asked = {**about, "repetitions": task.repetitions, "questions_sha256": task.digest}
    cells = {ALL: {**asked, **checked}}
    return Workload(op=task.op, command=command, cells=cells, measure=measure)


def _answer_all(
    row: Sampler, task: Task, answers: AnswerFile, on_answer: Callable[[], None]
) -> list[StoredAnswer]:
    """The row's answers to all items, in their order."""
    graded: dict[Item, StoredAnswer] = {}

    lock = threading.Lock()

    def grade(item: Item, reply: Reply) -> StoredAnswer:
        found, is_right = task.grade(reply.text, item)
        asked = {"question": item.question, "repetition": item.repetition, "answer": item.answer}
        about: dict[str, Any] = {"row": row.name, **asked, "found": found, "is_right": is_right}
        graded[item] = StoredAnswer(key=row.key(item), **about, reply=reply)
        with lock:
            on_answer()
        return graded[item]

    for item in task.items:
        if (before := answers.reply(row.key(item))) is not None:
            grade(item, before)
    if todo := [item for item in task.items if item not in graded]:
        _ask_all(row, todo, task, lambda item, reply: answers.append(grade(item, reply)))
    return [graded[item] for item in task.items]


def _ask_all(row: Sampler, todo: Sequence[Item], task: Task, on_reply: OnReply) -> None:
    """Ask for items; replies are judged in threads, so that the engine does not wait for it."""
    judged: list[Future[None]] = []
    num_workers = 1 if task.judge is None else task.judge.num_workers
    with ThreadPoolExecutor(num_workers) as pool:
        row.ask(todo, lambda item, reply: judged.append(pool.submit(on_reply, item, reply)))
    for one in judged:
        one.result()


def pass_table(records: Sequence[Measurement]) -> Table:
    """One row for each recipe: pass@1, its errors, what could not be read, and recovery."""
    first = records[0]
    return filled_table(
        records,
        caption=f"{first.op}, pass@1 (%): {first.case['model']}, {first.case['data']}, "
        f"{int(first.values['num_questions'])} questions × {first.case['repetitions']}",
        columns=(
            "recipe",
            "score_percent",
            "score_standard_error_percent",
            "repetition_standard_error_percent",
            "num_unparsed",
            "num_cut",
            "recovery_percent",
            "recovery_standard_error_percent",
        ),
        heads={"score_percent": "pass@1 (%)"},
    )
