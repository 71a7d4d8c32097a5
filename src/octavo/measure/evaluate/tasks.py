"""pass@1 of questions with one right answer: multiple choice and mathematics, BF16 beside FP8."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import (
    generation_sampling,
    load_generation_sampling,
)
from octavo.measure.evaluate.answers import (
    AnswerFile,
    Item,
    Sampler,
    SamplingPlan,
    StoredAnswer,
    engine_sampler,
    server_sampler,
)
from octavo.measure.evaluate.language import (
    Client,
    Reply,
    Scales,
    endpoints,
    given_scales,
    load_model,
    local_rows,
)
from octavo.measure.evaluate.math_equality import Checker, make_checker
from octavo.measure.evaluate.mrcr import calibrate_on_chats
from octavo.measure.evaluate.requests import ChoiceRequest, MathRequest
from octavo.measure.evaluate.statistics import paired_recovery, pass_values
from octavo.measure.evaluate.task_data import (
    ChoiceQuestion,
    MathQuestion,
    load_choice_questions,
    load_math_questions,
    read_letter,
    read_math,
    shuffle_options,
)
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, filled_table
from octavo.measure.run import (
    Outcome,
    Participant,
    Progress,
    Records,
    Watch,
    ready,
    run_whole,
    unwatched,
)
from octavo.serving.engine.settings import EngineSettings


def run(request: ChoiceRequest, output: Path | None, watch: Watch = unwatched) -> list[Measurement]:
    """Ask every row; a record is in the file `output` as soon as its row is done."""
    records = Records.of_file(output)
    answers = AnswerFile(request.answers, is_resumed=request.resume)
    scales = given_scales(request)  # before a model is loaded
    task = _task(request)
    plan, rows = _served(request) if request.endpoint else _local(request, scales, watch)
    progress = Progress(watch, "answering", len(rows) * len(task.items))
    # Where nobody says what to draw by, the server's own defaults are.
    about = request.about | ({} if plan.options else {"sampling": "server"})
    return evaluate(
        rows,
        task,
        plan,
        about=about,
        command=request.command,
        answers=answers,
        on_answer=progress.add,
        records=records,
    )


def _task(request: ChoiceRequest) -> "Task":
    asked = request.data, request.subset, request.split
    if isinstance(request, MathRequest):
        problems = load_math_questions(*asked)[: request.num_questions]
        return math_task(problems, request.repetitions, make_checker(request.checker))
    choices = load_choice_questions(*asked)[: request.num_questions]
    return choice_task(choices, request.repetitions, request.seed)


def _plan(request: ChoiceRequest, own: Mapping[str, float]) -> SamplingPlan:
    """The model's own sampling parameters, and in their place what is set by hand."""
    if request.generation_config is not None:
        own = load_generation_sampling(request.generation_config)
    plan = SamplingPlan(
        options={**own, **request.sampling}, max_tokens=request.max_tokens, seed=request.seed
    )
    if plan.is_greedy and isinstance(request, MathRequest) and request.repetitions > 1:
        raise ConfigError(
            f"expected sampling for {request.repetitions} repetitions, got greedy decoding, which "
            "repeats itself: set --temperature, or --repetitions 1"
        )
    return plan


def _served(request: ChoiceRequest) -> tuple[SamplingPlan, list[Sampler]]:
    plan, rows = _plan(request, {}), []
    for endpoint in endpoints(request):
        with Client(endpoint) as client:  # all servers are asked before one has to work
            rows.append(server_sampler(endpoint, client.model, plan))
    return plan, rows


def _local(
    request: ChoiceRequest, scales: Scales, watch: Watch
) -> tuple[SamplingPlan, list[Sampler]]:
    text_model = load_model(request)
    plan = _plan(request, generation_sampling(getattr(text_model.model, "generation_config", None)))
    is_calibrated = not scales and bool(request.rows_with_scales)
    if is_calibrated:
        scales = calibrate_on_chats(request, text_model, watch)
    origin = f"calibrated on generated chats, margin {request.margin:g}"
    num_seqs = request.max_concurrency
    engine = EngineSettings(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(EngineSettings().max_num_batched_tokens, num_seqs),
        memory_fraction=request.gpu_memory_utilization,
        num_pages=request.num_pages,
    )
    return plan, [
        engine_sampler(
            text_model,
            row,
            plan,
            engine,
            scales=origin if is_calibrated and asked.needs_scales else None,
        )
        for asked, row in local_rows(request, text_model, scales)
    ]


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
    rows: Sequence[Sampler],
    task: Task,
    plan: SamplingPlan,
    *,
    about: Mapping[str, Scalar],
    command: str,
    answers: AnswerFile,
    on_answer: Callable[[], None] = lambda: None,
    records: Records | None = None,
) -> list[Measurement]:
    """One record for each row; every one after the first has what it retains of the first.

    answers: where answers are written as they come, and those of before are found.
    """
    first: list[list[bool]] = []

    def measure(row: Sampler) -> Outcome:
        nonlocal first
        graded = _answer_all(row, task, plan, answers, on_answer)
        scores = _by_question(task, graded)
        values = pass_values(scores) | _counts(graded)
        if first:
            values |= paired_recovery(scores, first)
        first = first or scores
        return Outcome(values)

    participants = [
        Participant(
            name=row.name,
            impl=row.impl,
            about=row.about,
            machine=row.machine,
            open=ready(row),
        )
        for row in rows
    ]
    whole = {**about, **task.about, **plan.about()}
    return run_whole(participants, measure, records, op=task.op, command=command, about=whole)


def _answer_all(
    row: Sampler,
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
        row.ask(todo, lambda item, reply: answers.append(grade(item, reply)))
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
    first = records[0]
    return filled_table(
        records,
        caption=f"{first.op}, pass@1 (%): {first.case['model']}, {first.case['data']}, "
        f"{int(first.values['num_questions'])} questions × {first.case['repetitions']}",
        columns=(
            *("recipe", "score_percent", "score_standard_error_percent"),
            *("repetition_standard_error_percent", "num_unparsed", "num_cut"),
            *("recovery_percent", "recovery_standard_error_percent"),
        ),
        heads={"score_percent": "pass@1 (%)"},
    )
