"""Tasks of EleutherAI's lm-evaluation-harness over rows of a local model, in this process."""

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from octavo.brief import brief
from octavo.errors import ConfigError, OctavoError
from octavo.extras import need
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import check_template, text_tokens
from octavo.measure.evaluate.harness_requests import TasksRequest
from octavo.measure.evaluate.language import (
    Keys,
    calibrate_rows,
    given_scales,
    load_model,
    local_rows,
    machine_of,
    model_about,
    recipe_digest,
)
from octavo.measure.evaluate.mrcr import (
    CHAT_LENGTH,
    NUM_CHATS,
    calibrate_on_chats,
)
from octavo.measure.evaluate.mrcr_data import generated_questions
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, filled_table
from octavo.measure.run import (
    ALL,
    Outcome,
    Participant,
    Records,
    Values,
    Watch,
    Workload,
    ready,
    run_workload,
)
from octavo.measure.statistics import (
    mean_values,
    paired_recovery,
    paired_values,
    question_values,
    shift_values,
)
from octavo.serving.engine.settings import EngineSettings

if TYPE_CHECKING:
    from octavo.calibration.scale_file import ScaleSet
    from octavo.measure.evaluate.harness_model import HarnessModel

NUM_RESAMPLES = 1000  # of lm-eval's bootstrap, for metrics that are no mean over questions


def run(request: TasksRequest, output: Path | None, watch: Watch) -> list[Measurement]:
    """Run every task with every row; a record is in `output` as soon as its task is done."""
    need("octavo eval tasks", "transformers", "lm_eval")
    records = Records.of_file(output)
    scales = given_scales(request)  # before a model is loaded
    watch("finding tasks", 0, 1)
    tasks = load_tasks(request)
    text_model = load_model(request)
    if request.apply_chat_template:
        check_template(text_model.tokenizer)
    scales = scales or _calibrate(request, text_model, watch)
    rows = _participants(request, text_model, scales, watch)
    return run_workload(rows, make_workload(request, tasks), records)


def load_tasks(request: TasksRequest) -> dict[str, Any]:
    """The request's tasks by name, those of groups one by one; their data is loaded here."""
    from lm_eval.tasks import TaskManager

    folder = None if request.include_path is None else str(request.include_path)
    manager = TaskManager(include_path=folder, include_defaults=False)
    files = [name for name in request.names if Path(name).is_file()]
    if not {*request.names} <= {*files, *manager.all_tasks}:
        manager = TaskManager(include_path=folder)  # which reads thousands of files
    found: dict[str, Any] = {}
    for name in request.names:
        if name not in files and name not in manager.all_tasks:
            raise ConfigError(
                f"expected tasks, groups or tags of lm-eval, or a YAML file, got {name!r}: "
                "`lm-eval ls tasks` lists them; --include-path adds a folder of tasks"
            )
        try:
            found |= manager.load([name])["tasks"]
        except Exception as error:  # of any data set, and of the code of a task
            reason = f"{type(error).__name__}: {brief(str(error))}"
            raise OctavoError(f"lm-eval cannot load {name}: {reason}") from error
    for name, task in found.items():
        if getattr(task, "UNSAFE_CODE", False) or task.get_config("unsafe_code"):
            raise ConfigError(
                f"{name} runs programs that a model writes, outside of any sandbox: "
                "octavo eval code has one"
            )
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"expected tasks of text, got {name}, which has images")
    return found


def _calibrate(
    request: TasksRequest, text_model: TextModel, watch: Watch
) -> "dict[Keys, ScaleSet]":
    """Scales by generated chats, or by their words alone where no chat template is asked for."""
    if request.apply_chat_template:
        return calibrate_on_chats(request, text_model, watch)

    def make_windows() -> tuple[str, list[torch.Tensor]]:
        chats = generated_questions(NUM_CHATS, seed=-1)
        texts = ["\n".join(message["content"] for message in chat.messages) for chat in chats]
        tokens = [text_tokens(text_model.tokenizer, text)[:CHAT_LENGTH] for text in texts]
        return f"{len(texts)} generated texts", [torch.tensor(one) for one in tokens]

    return calibrate_rows(request, text_model, make_windows, watch)


def _participants(
    request: TasksRequest, text_model: TextModel, scales: "Mapping[Keys, ScaleSet]", watch: Watch
) -> "list[Participant[HarnessModel]]":
    from octavo.measure.evaluate.harness_model import HarnessModel, RowSetup

    settings = EngineSettings(
        max_num_seqs=request.max_concurrency,
        max_num_batched_tokens=max(
            EngineSettings().max_num_batched_tokens, request.max_concurrency
        ),
        memory_fraction=request.gpu_memory_utilization,
    )
    found = []
    for asked, row in local_rows(request, text_model, scales):
        recipe, ran = row.recipe(), dict[str, float]()
        is_calibrated = asked.needs_scales and request.scales is None
        calibration = f"generated texts, margin {request.margin:g}" if is_calibrated else None
        about = {**model_about(text_model), "chunk": request.chunk or 0}
        if (digest := recipe_digest(recipe, calibration)) is not None:
            about["recipe_digest"] = digest
        setup = RowSetup(
            text_model=text_model,
            recipe=recipe,
            settings=settings,
            chunk=request.chunk or CHAT_LENGTH,
            is_chat=request.apply_chat_template,
            ran=ran,
            watch=watch,
        )
        found.append(
            Participant(
                name=row.name,
                impl="lm-eval",
                about=about,
                machine=machine_of(text_model.model),
                open=ready(HarnessModel(setup)),
                ran=ran,
            )
        )
    return found


def make_workload(request: TasksRequest, tasks: Mapping[str, Any]) -> "Workload[HarnessModel, str]":
    """The score of each task, and of more than one their mean; what rows retain of the first.

    The shift is tested over the questions of a task, and over tasks of equal weight.
    """
    first: dict[str, tuple[Values, list[float]]] = {}
    asked: dict[str, Scalar] = {"data": ",".join(Path(name).name for name in request.names)}
    asked["checker"] = f"lm-eval {importlib.metadata.version('lm-eval')}"
    asked["is_chat"] = request.apply_chat_template
    if request.num_questions is not None:
        asked["limit"] = request.num_questions
    parts = list(tasks) if len(tasks) > 1 else []

    def measure(model: "HarnessModel", cell: str) -> Outcome:
        task = tasks[cell] if parts else next(iter(tasks.values()))
        values, scores, about = _run_task(model, task, request)
        if cell in first:
            values = {**values, **_compared((values, scores), first[cell])}
        first.setdefault(cell, (values, scores))
        return Outcome(values, about)

    return Workload(
        op=request.task,
        command=request.command,
        cells={cell: {**asked, "bucket": cell} for cell in (*parts, ALL)},
        measure=measure,
        summary=(ALL, _mean_of_tasks) if parts else None,
    )


def _run_task(
    model: "HarnessModel", task: Any, request: TasksRequest
) -> tuple[Values, list[float], dict[str, Scalar]]:
    """(values, the score of each question, what records say) of one task.

    Values are all metrics of lm-eval by their names there, with standard errors. The score is the
    first that is a mean over questions from 0 to 1, of which more is better; there may be none.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: Any = simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),  # another would read thousands of files
        num_fewshot=request.num_fewshot,
        limit=request.num_questions,
        apply_chat_template=request.apply_chat_template,
        bootstrap_iters=NUM_RESAMPLES,
    )
    ((name, samples),) = found["samples"].items()
    told: dict[str, Any] = found["results"][name]
    values = {key: float(x) for key, x in told.items() if "," in key and isinstance(x, int | float)}
    values["num_questions"] = float(len({one["doc_id"] for one in samples}))
    arguments = json.dumps([one["arguments"] for one in samples], default=str)
    about: dict[str, Scalar] = {
        "num_fewshot": found["n-shot"].get(name, 0),
        "task_version": str(found["versions"].get(name)),
        "questions_sha256": hashlib.sha256(arguments.encode()).hexdigest()[:16],
    }
    is_more_better = found["higher_is_better"].get(name, {})
    for key in values:
        metric, _, filtered = key.partition(",")
        own = [one[metric] for one in samples if one["filter"] == filtered and metric in one]
        if is_more_better.get(metric) is True and _is_mean(own, values[key]):
            scores = list(map(float, own))
            return {**values, **mean_values(scores)}, scores, {**about, "metric": key}
    for key in values:
        if is_more_better.get(key.partition(",")[0]) is False:
            return {**values, "lower_is_better": values[key]}, [], {**about, "metric": key}
    return values, [], about


def _is_mean(scores: Sequence[Any], whole: float) -> bool:
    are_shares = all(isinstance(x, int | float) and 0 <= x <= 1 for x in scores)
    return bool(scores) and are_shares and math.isclose(fmean(scores), whole, abs_tol=1e-6)


def _compared(
    own: tuple[Values, list[float]], first: tuple[Values, list[float]]
) -> dict[str, float]:
    """What a row retains of the first row's score, or of its metric where less is better."""
    if len(own[1]) != len(first[1]):
        raise OctavoError(
            f"expected {len(first[1])} scored questions, as many as the first row has, got "
            f"{len(own[1])}: rows cannot be compared question by question"
        )
    if own[1]:
        paired = paired_values(question_values(own[1]), question_values(first[1]))
        return {**paired, **paired_recovery([[x] for x in own[1]], [[x] for x in first[1]])}
    name = "lower_is_better"
    if own[0].get(name, 0) > 0 and name in first[0]:
        return {"recovery_percent": 100 * first[0][name] / own[0][name]}
    return {}


def _mean_of_tasks(tasks: Mapping[str, Values]) -> dict[str, float]:
    """The mean of the tasks that have a score, each of equal weight, and what is retained of it."""
    scored = [values for values in tasks.values() if "score_percent" in values]
    if not scored:
        return {}

    def joined(name: str) -> dict[str, float]:
        error = f"{name}_standard_error_percent"
        found = {f"{name}_percent": fmean(values[f"{name}_percent"] for values in scored)}
        if all(error in values for values in scored):
            found[error] = math.hypot(*(values[error] for values in scored)) / len(scored)
        return found

    whole = joined("score")
    whole["num_questions"] = sum(values["num_questions"] for values in scored)
    if all("difference_percent" in values for values in scored):
        whole |= joined("difference") | shift_values(scored)
        base = whole["score_percent"] - whole["difference_percent"]
        if base > 0:
            whole["recovery_percent"] = 100 * whole["score_percent"] / base
            if (error := whole.get("difference_standard_error_percent")) is not None:
                whole["recovery_standard_error_percent"] = 100 * error / base
    return whole


def tasks_table(records: Sequence[Measurement]) -> Table:
    """One row for each recipe and task: score, its error, and recovery."""
    first = records[0].case
    return filled_table(
        records,
        caption=f"lm-eval, score (%): {first['model']}, {first['data']}",
        columns=(
            "recipe",
            *(["bucket"] if any(record.case["bucket"] != ALL for record in records) else []),
            "metric",
            "num_questions",
            "score_percent",
            "score_standard_error_percent",
            "lower_is_better",
            "recovery_percent",
            "recovery_standard_error_percent",
        ),
        heads={"score_percent": "score (%)", "bucket": "task"},
    )
