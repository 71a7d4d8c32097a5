"""A whole run of choice or math: questions, model or servers, scales and rows, as one request."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.generation_sampling import (
    generation_sampling,
    load_generation_sampling,
)
from octavo.integrations.transformers.small_model import NAME as SMALL
from octavo.integrations.transformers.text_model import TextModel, load_text_model
from octavo.integrations.transformers.tokenizer import PromptSettings
from octavo.measure import store
from octavo.measure.evaluate.answer_file import AnswerFile
from octavo.measure.evaluate.chat_scales import calibrate_on_chats
from octavo.measure.evaluate.choice_data import GENERATED, load_choice_questions
from octavo.measure.evaluate.endpoint import Client, Endpoint
from octavo.measure.evaluate.math_data import load_math_questions
from octavo.measure.evaluate.math_equality import AUTO, make_checker
from octavo.measure.evaluate.pass_at_1 import Task, choice_task, evaluate, math_task
from octavo.measure.evaluate.perplexity_rows import (
    DEFAULT_ROWS,
    Keys,
    RowName,
    check_rows,
    recipe_rows,
)
from octavo.measure.evaluate.row_scales import Watch, given_scales
from octavo.measure.evaluate.sampled_answers import Row, SamplingPlan, endpoint_row, engine_row
from octavo.measure.records import Measurement
from octavo.serving.engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked.

    model: a folder or name, "SmolLM2-135M-Instruct" that of the demo; None with endpoints.
    sampling: what is set by hand, by the names of OpenAI's and vLLM's APIs; the rest is the model's
    generation config's, or that of the folder or name `generation_config`. num_questions: None is
    all of them. answers: a file of single answers; is_resumed: whether those in it are used again.
    """

    kind: Literal["choice", "math"]
    data: str = GENERATED
    subset: str | None = None
    split: str | None = None
    model: str | None = None
    rows: tuple[str, ...] = DEFAULT_ROWS
    endpoints: tuple[Endpoint, ...] = ()
    repetitions: int = 1
    num_questions: int | None = None
    seed: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)
    generation_config: str | None = None
    max_tokens: int | None = None
    checker: str = AUTO
    answers: Path | None = None
    is_resumed: bool = False
    kv_cache_dtype: str = "fp8"
    scales: Path | None = None
    margin: float = 1.5
    dtype: str = "auto"
    prompts: PromptSettings = PromptSettings()
    engine: EngineSettings = EngineSettings()

    def __post_init__(self) -> None:
        if bool(self.endpoints) == bool(self.model):
            raise ConfigError("expected a MODEL or --endpoint, one of them")
        if self.endpoints and self.prompts != PromptSettings():
            raise ConfigError("--add-bos and --chat-template are for a model; a server has its own")
        # Names are checked before a model is loaded.
        has_static = not self.endpoints and bool(self.rows_with_scales)
        if self.scales is not None and not has_static:
            raise ConfigError("--scales is for rows with static scales, which are not asked for")

    @property
    def rows_with_scales(self) -> list[RowName]:
        """The rows that need scales, or the means of keys."""
        return [row for row in check_rows(self.rows) if row.needs_scales]

    @property
    def command(self) -> str:
        """The command line that repeats this."""
        words = ["octavo", "eval", self.kind, *([self.model] if self.model else [])]
        flags: dict[str, Any] = {
            "--data": self.data,
            "--subset": self.subset,
            "--split": self.split,
            "--num-questions": self.num_questions,
            "--repetitions": self.repetitions,
            "--seed": self.seed,
            "--max-tokens": self.max_tokens,
            "--generation-config": self.generation_config,
            **{f"--{name.replace('_', '-')}": value for name, value in self.sampling.items()},
        }
        if self.kind == "math":
            flags["--checker"] = self.checker
        if not self.endpoints:
            flags |= {"--dtype": self.dtype, "--kv-cache-dtype": self.kv_cache_dtype}
            has_margin = self.scales is None and self.rows_with_scales
            flags |= {"--margin": f"{self.margin:g}"} if has_margin else {"--scales": self.scales}
        for flag, value in flags.items():
            words += [] if value is None else [flag, str(value)]
        words += self.prompts.command
        for endpoint in self.endpoints:
            words += ["--endpoint", f"{endpoint.name}={endpoint.url}"]
        if not self.endpoints:
            words += [word for row in self.rows for word in ("--recipe", row)]
        return shlex.join(words)


def run(
    request: Request, output: Path | None, watch: Watch = lambda what, done, total: None
) -> list[Measurement]:
    """Ask every row; a record is in the file `output` as soon as its row is done."""
    store.check_folder(output)
    answers = AnswerFile(request.answers, is_resumed=request.is_resumed)
    given = given_scales(request.scales, request.rows_with_scales)  # before a model is loaded
    task = _task(request)
    plan, rows = _served(request) if request.endpoints else _local(request, given, watch)
    total, num_done = len(rows) * len(task.items), 0

    def on_answer() -> None:
        nonlocal num_done
        num_done += 1
        watch("answering", num_done, total)

    data = request.data if request.data == GENERATED else Path(request.data).name
    return evaluate(
        rows,
        task,
        plan,
        about={
            "data": data,
            **({"subset": request.subset} if request.subset else {}),
            **({"split": request.split} if request.split else {}),
            # Where nobody says what to draw by, the server's own defaults are.
            **({} if plan.options else {"sampling": "server"}),
        },
        command=request.command,
        answers=answers,
        on_answer=on_answer,
        on_record=lambda record: store.append(output, [record]) if output else None,
    )


def _task(request: Request) -> Task:
    asked = request.data, request.subset, request.split
    if request.kind == "choice":
        choices = load_choice_questions(*asked)[: request.num_questions]
        return choice_task(choices, request.repetitions, request.seed)
    problems = load_math_questions(*asked)[: request.num_questions]
    return math_task(problems, request.repetitions, make_checker(request.checker))


def _plan(request: Request, own: Mapping[str, float]) -> SamplingPlan:
    """The model's own sampling parameters, and in their place what is set by hand."""
    if request.generation_config is not None:
        own = load_generation_sampling(request.generation_config)
    plan = SamplingPlan(
        options={**own, **request.sampling}, max_tokens=request.max_tokens, seed=request.seed
    )
    if plan.is_greedy and request.kind == "math" and request.repetitions > 1:
        raise ConfigError(
            f"expected sampling for {request.repetitions} repetitions, got greedy decoding, which "
            "repeats itself: set --temperature, or --repetitions 1"
        )
    return plan


def _served(request: Request) -> tuple[SamplingPlan, list[Row]]:
    plan, rows = _plan(request, {}), []
    for endpoint in request.endpoints:
        with Client(endpoint) as client:  # all servers are asked before one has to work
            rows.append(endpoint_row(endpoint, client.model, plan))
    return plan, rows


def _local(
    request: Request, given: dict[Keys, ScaleSet], watch: Watch
) -> tuple[SamplingPlan, list[Row]]:
    text_model: TextModel = load_text_model(
        None if request.model == SMALL else request.model,
        dtype=request.dtype,
        prompts=request.prompts,
    )
    plan = _plan(request, generation_sampling(getattr(text_model.model, "generation_config", None)))
    calibrated = request.rows_with_scales if not given else []
    if calibrated:
        given = calibrate_on_chats(text_model, calibrated, margin=request.margin, watch=watch)
    found = recipe_rows(
        request.rows, given, dtype=text_model.dtype, kv_cache_dtype=request.kv_cache_dtype
    )
    names = {row.text for row in calibrated}
    origin = f"calibrated on generated chats, margin {request.margin:g}"
    return plan, [
        engine_row(
            *(text_model, row, plan, request.engine), scales=origin if name in names else None
        )
        for name, row in zip(request.rows, found, strict=True)
    ]
