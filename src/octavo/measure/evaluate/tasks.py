"""pass@1 of questions with one right answer: multiple choice and mathematics, BF16 beside FP8."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import (
    generation_sampling,
    load_generation_sampling,
)
from octavo.measure.evaluate.answers import (
    AnswerFile,
    Sampler,
    SamplingPlan,
    StoredAnswer,
    engine_sampler,
    server_sampler,
)
from octavo.measure.evaluate.language import (
    Reply,
    Scales,
    clients,
    given_scales,
    load_model,
    local_rows,
)
from octavo.measure.evaluate.math_equality import Checker, make_checker
from octavo.measure.evaluate.mrcr import calibrate_on_chats
from octavo.measure.evaluate.requests import ChoiceRequest, MathRequest
from octavo.measure.evaluate.statistics import paired_recovery, pass_values
from octavo.measure.evaluate.task_data import (
    Item,
    Question,
    load_choice_questions,
    load_math_questions,
    read_letter,
    read_math,
)
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, filled_table
from octavo.measure.run import (
    ALL,
    Outcome,
    Participant,
    Progress,
    Records,
    Watch,
    Workload,
    run_workload,
)
from octavo.serving.engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions, each asked some times; seed: of the order of options.

    checker: compares the answers of problems; None where answers are letters of options.
    """

    op: str
    questions: Sequence[Question] = field(repr=False)
    repetitions: int = 1
    seed: int = 0
    checker: Checker | None = None

    @cached_property
    def items(self) -> list[Item]:
        """All that is asked, question by question."""
        numbers = range(self.repetitions)
        return [one.item(number, self.seed) for one in self.questions for number in numbers]

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        checked = {} if self.checker is None else {"checker": self.checker.name}
        return {"repetitions": self.repetitions, **checked}

    def grade(self, text: str, item: Item) -> tuple[str | None, bool]:
        """What a text answers, None if that cannot be read, and whether it is right."""
        if self.checker is None:
            found = read_letter(text, item.letters)
            return found, found == item.answer
        found = read_math(text)
        return found, found is not None and self.checker.is_equal(found, item.answer)


def run(request: ChoiceRequest, output: Path | None, watch: Watch) -> list[Measurement]:
    """Ask every row; a record is in the file `output` as soon as its row is done."""
    records = Records.of_file(output)
    answers = AnswerFile(request.answers, is_resumed=request.resume)
    scales = given_scales(request)  # before a model is loaded
    checker = make_checker(request.checker) if isinstance(request, MathRequest) else None
    load = load_choice_questions if checker is None else load_math_questions
    questions = load(request.data, request.subset, request.split)
    task = Task(
        op=request.task,
        questions=questions[: request.num_questions],
        repetitions=request.repetitions,
        seed=request.seed,
        checker=checker,
    )
    if request.endpoint:
        plan = _plan(request, {})
        rows = [server_sampler(client, plan) for client in clients(request)]
    else:
        plan, rows = _local(request, scales, watch)
    progress = Progress(watch, "answering", len(rows) * len(task.items))
    # Where nobody says what to draw by, the server's own defaults are.
    drawn = plan.about() | ({} if plan.options else {"sampling": "server"})
    about = request.about | drawn
    workload = make_workload(task, answers, about, request.command, progress.add)
    return run_workload(rows, workload, records)


def _plan(request: ChoiceRequest, own: Mapping[str, float]) -> SamplingPlan:
    """The model's own sampling parameters, and in their place what is set by hand."""
    if request.generation_config is not None:
        own = load_generation_sampling(request.generation_config)
    options = {**own, **request.sampling}
    is_greedy = options.get("temperature") == 0
    if is_greedy and isinstance(request, MathRequest) and request.repetitions > 1:
        raise ConfigError(
            f"expected sampling for {request.repetitions} repetitions, got greedy decoding, which "
            "repeats itself: set --temperature, or --repetitions 1"
        )
    return SamplingPlan(options=options, max_tokens=request.max_tokens, seed=request.seed)


def _local(
    request: ChoiceRequest, scales: Scales, watch: Watch
) -> tuple[SamplingPlan, list[Participant[Sampler]]]:
    text_model = load_model(request)
    plan = _plan(request, generation_sampling(getattr(text_model.model, "generation_config", None)))
    origin = None
    if not scales:
        scales = calibrate_on_chats(request, text_model, watch)
        origin = f"calibrated on generated chats, margin {request.margin:g}"
    num_seqs = request.max_concurrency
    engine = EngineSettings(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(EngineSettings().max_num_batched_tokens, num_seqs),
        memory_fraction=request.gpu_memory_utilization,
        num_pages=request.num_pages,
    )
    rows = []
    for asked, row in local_rows(request, text_model, scales):
        own = origin if asked.needs_scales else None
        rows.append(engine_sampler(text_model, row, plan, engine, scales=own))
    return plan, rows


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
        return Outcome(pass_values(scores) | _counts(graded) | compared)

    cells = {ALL: {**about, **task.about}}
    return Workload(op=task.op, command=command, cells=cells, measure=measure)


def _answer_all(
    row: Sampler, task: Task, answers: AnswerFile, on_answer: Callable[[], None]
) -> list[StoredAnswer]:
    """The row's answers to all items, in their order."""
    graded: dict[Item, StoredAnswer] = {}

    def grade(item: Item, reply: Reply) -> StoredAnswer:
        found, is_right = task.grade(reply.text, item)
        graded[item] = StoredAnswer(
            key=row.key(item),
            row=row.name,
            question=item.question,
            repetition=item.repetition,
            answer=item.answer,
            found=found,
            is_right=is_right,
            reply=reply,
        )
        on_answer()
        return graded[item]

    for item in task.items:
        if (before := answers.reply(row.key(item))) is not None:
            grade(item, before)
    if todo := [item for item in task.items if item not in graded]:
        row.ask(todo, lambda item, reply: answers.append(grade(item, reply)))
    return [graded[item] for item in task.items]


def _counts(answers: Sequence[StoredAnswer]) -> dict[str, float]:
    num_unparsed = sum(answer.found is None for answer in answers)
    values = {
        "num_unparsed": float(num_unparsed),
        "unparsed_percent": 100 * num_unparsed / len(answers),
        "num_cut": float(sum(answer.reply.is_cut for answer in answers)),
    }
    lengths = [n for answer in answers if (n := answer.reply.num_tokens) is not None]
    if len(lengths) == len(answers):
        values["mean_answer_tokens"] = sum(lengths) / len(lengths)
    return values


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
