"""pass@1 of questions with one right answer: multiple choice and mathematics, BF16 beside FP8.

Answers are drawn by a model's sampling parameters, by the engine here or by a server. Their file
has what each row said to each question, and whether it was right: JSON Lines, appended as answers
come, with the lock and the care of records (measure/store.py), so that more than one run may write
to it. A run that is resumed takes the answers that are there already; their keys say by what they
were made.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, OctavoError
from octavo.integrations.transformers.text_model import (
    TextModel,
    generation_sampling,
    load_generation_sampling,
)
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure import store
from octavo.measure.bench.engine import Subject, open_engine
from octavo.measure.evaluate.answering import stop_tokens
from octavo.measure.evaluate.language import (
    Client,
    Reply,
    Scales,
    clients,
    given_scales,
    load_model,
    local_rows,
    machine_of,
    model_about,
    served_row,
)
from octavo.measure.evaluate.math_judge import MathJudge
from octavo.measure.evaluate.mrcr import calibrate_on_chats
from octavo.measure.evaluate.requests import ChoiceRequest, MathRequest
from octavo.measure.evaluate.task_data import (
    Item,
    Question,
    load_choice_questions,
    load_math_questions,
    read_letter,
    visible,
)
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, filled_table
from octavo.measure.rows import Row
from octavo.measure.run import (
    ALL,
    Outcome,
    Participant,
    Progress,
    Records,
    Watch,
    Workload,
    ready,
    run_workload,
)
from octavo.measure.statistics import paired_recovery, pass_values
from octavo.recipe import Recipe
from octavo.serving.engine.request import Delta, Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How answers are drawn.

    options: by the names of OpenAI's and vLLM's APIs, such as temperature; what a server is not
    told, it chooses. max_tokens: None is all that the context has room for. seed: every item has
    its own by it, the same one for all rows.
    """

    options: Mapping[str, float]
    max_tokens: int | None = None
    seed: int = 0

    def seed_of(self, item: Item) -> int:
        """The seed of an item; 32 bits of it, which every server takes."""
        text = f"{self.seed}, {item.question}, {item.repetition}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        limit: Scalar = self.max_tokens or "context"
        return {**self.options, "max_tokens": limit, "seed": self.seed}


OnReply = Callable[[Item, Reply], None]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws a row's answers; it takes memory and connections only while it is asked.

    identity: all that its answers depend on besides item and plan.
    """

    name: str
    plan: SamplingPlan
    identity: str = field(repr=False)
    ask: Callable[[Sequence[Item], OnReply], None] = field(repr=False)

    def key(self, item: Item) -> str:
        """A name for this row's answer to this item; another one if anything is different."""
        plan = self.plan
        parts: list[Any] = [self.identity, [dict(m) for m in item.messages], dict(plan.options)]
        parts += [plan.max_tokens, plan.seed_of(item)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _served(client: Client, plan: SamplingPlan) -> Participant[Sampler]:
    """A server that answers chats."""
    limit = {} if plan.max_tokens is None else {"max_tokens": plan.max_tokens}

    def ask(items: Sequence[Item], on_reply: OnReply) -> None:
        asked = [
            (item.messages, {**plan.options, "seed": plan.seed_of(item), **limit}) for item in items
        ]
        with client:
            client.reply_all(asked, lambda place, reply: on_reply(items[place], reply))

    identity = json.dumps([client.url, client.model])
    sampler = Sampler(name=client.name, plan=plan, identity=identity, ask=ask)
    return served_row(client, ready(sampler))


def _ask_engine(
    text_model: TextModel,
    row: Row,
    plan: SamplingPlan,
    settings: EngineSettings,
    items: Sequence[Item],
    on_reply: OnReply,
) -> None:
    tokenizer, stop = text_model.tokenizer, tuple(sorted(stop_tokens(text_model)))
    with open_engine(Subject(text_model.model, {}, is_random=False), row, settings) as engine:
        requests = []
        for place, item in enumerate(items):
            prompt = chat_tokens(tokenizer, item.messages)
            room = engine.max_context - len(prompt)
            if room < (plan.max_tokens or 1):
                raise ConfigError(
                    f"question {item.question}: expected room for {plan.max_tokens or 1} tokens "
                    f"after a prompt of {len(prompt)}, got a context of {engine.max_context}: "
                    "lower --max-tokens"
                )
            options: dict[str, Any] = {**plan.options, "seed": plan.seed_of(item)}
            sampling = Sampling(**options, max_tokens=plan.max_tokens or room, stop_token_ids=stop)
            requests.append(Request(request_id=str(place), prompt=prompt, sampling=sampling))
        for request in requests:  # before any of them runs
            engine.check(request)
        waiting = list(reversed(requests))
        deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
        while waiting or engine.has_work:
            while waiting and engine.stats().num_waiting < engine.settings.max_queue:
                engine.add(waiting.pop())
            for delta in engine.step():
                if delta.finish_reason == "error":
                    raise OctavoError(f"an answer failed: {delta.error}")
                deltas[delta.request_id].append(delta)
                if delta.finish_reason is not None:
                    found = gather(deltas.pop(delta.request_id))
                    text = str(tokenizer.decode(found.tokens, skip_special_tokens=True))
                    reply = Reply(text, found.finish_reason == "length", len(found.tokens))
                    on_reply(items[int(delta.request_id)], reply)


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
        self._path = path
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions, each asked some times; seed: of the order of options.

    judge: reads and compares answers of problems; None where answers are letters of options.
    """

    op: str
    questions: Sequence[Question] = field(repr=False)
    repetitions: int = 1
    seed: int = 0
    judge: MathJudge | None = None

    @cached_property
    def items(self) -> list[Item]:
        """All that is asked, question by question."""
        numbers = range(self.repetitions)
        return [one.item(number, self.seed) for one in self.questions for number in numbers]

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
    judge = MathJudge() if isinstance(request, MathRequest) else None
    load = load_choice_questions if judge is None else load_math_questions
    questions = load(request.data, request.subset, request.split)
    task = Task(
        op=request.task,
        questions=questions[: request.num_questions],
        repetitions=request.repetitions,
        seed=request.seed,
        judge=judge,
    )
    if request.endpoint:
        plan = _plan(request, {})
        rows = [_served(client, plan) for client in clients(request)]
    else:
        plan, rows = _local(request, scales, watch)
    progress = Progress(watch, "answering", len(rows) * len(task.items))
    # Where nobody says what to draw by, the server's own defaults are.
    drawn = plan.about() | ({} if plan.options else {"sampling": "server"})
    about = request.about | drawn
    workload = make_workload(task, answers, about, request.command, progress.add)
    try:
        return run_workload(rows, workload, records)
    finally:
        if judge is not None:
            judge.close()


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
    is_calibrated = not scales
    scales = scales or calibrate_on_chats(request, text_model, watch)
    num_seqs = request.max_concurrency
    engine = EngineSettings(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(EngineSettings().max_num_batched_tokens, num_seqs),
        memory_fraction=request.gpu_memory_utilization,
        num_pages=request.num_pages,
    )
    rows = []
    for asked, row in local_rows(request, text_model, scales):
        recipe = row.recipe() or Recipe()
        settled = json.loads(recipe.to_json())
        if is_calibrated and asked.needs_scales:
            # Calibrated again, a last bit may differ: answers of before are still the row's.
            settled["scales"] = f"calibrated on generated chats, margin {request.margin:g}"
        prompts = text_model.prompts.about
        identity = [text_model.name, text_model.dtype, settled, *([prompts] if prompts else [])]
        sampler = Sampler(
            name=row.name,
            plan=plan,
            identity=json.dumps(identity, sort_keys=True),
            ask=partial(_ask_engine, text_model, Row.of(row.name, recipe), plan, engine),
        )
        about, machine = model_about(text_model), machine_of(text_model.model)
        found = Participant(
            name=row.name, impl="engine", about=about, machine=machine, open=ready(sampler)
        )
        rows.append(found)
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
        values = pass_values(scores)
        values["num_unparsed"] = float(sum(answer.found is None for answer in graded))
        values["unparsed_percent"] = 100 * values["num_unparsed"] / len(graded)
        values["num_cut"] = float(sum(answer.reply.is_cut for answer in graded))
        lengths = [n for answer in graded if (n := answer.reply.num_tokens) is not None]
        if len(lengths) == len(graded):
            values["mean_answer_tokens"] = sum(lengths) / len(lengths)
        return Outcome(values | compared)

    checked = {} if task.judge is None else {"checker": task.judge.name}
    cells = {ALL: {**about, "repetitions": task.repetitions, **checked}}
    return Workload(op=task.op, command=command, cells=cells, measure=measure)


def _answer_all(
    row: Sampler, task: Task, answers: AnswerFile, on_answer: Callable[[], None]
) -> list[StoredAnswer]:
    """The row's answers to all items, in their order."""
    graded: dict[Item, StoredAnswer] = {}

    def grade(item: Item, reply: Reply) -> StoredAnswer:
        found, is_right = task.grade(reply.text, item)
        asked = {"question": item.question, "repetition": item.repetition, "answer": item.answer}
        about: dict[str, Any] = {"row": row.name, **asked, "found": found, "is_right": is_right}
        graded[item] = StoredAnswer(key=row.key(item), **about, reply=reply)
        on_answer()
        return graded[item]

    for item in task.items:
        if (before := answers.reply(row.key(item))) is not None:
            grade(item, before)
    if todo := [item for item in task.items if item not in graded]:
        row.ask(todo, lambda item, reply: answers.append(grade(item, reply)))
    return [graded[item] for item in task.items]


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
