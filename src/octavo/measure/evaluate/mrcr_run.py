"""A whole run of MRCR: questions, model or servers, scales and rows, as one request names them."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.small_model import NAME as SMALL
from octavo.integrations.transformers.text_model import TextModel, load_text_model, load_tokenizer
from octavo.integrations.transformers.tokenizer import PromptSettings, prepare_tokenizer
from octavo.measure import store
from octavo.measure.evaluate import mrcr
from octavo.measure.evaluate.chat_scales import calibrate_on_chats
from octavo.measure.evaluate.endpoint import Client, Endpoint
from octavo.measure.evaluate.mrcr import Counted, Row
from octavo.measure.evaluate.mrcr_data import (
    GENERATED,
    Question,
    load_questions,
)
from octavo.measure.evaluate.perplexity import machine_of
from octavo.measure.evaluate.perplexity_rows import (
    DEFAULT_ROWS,
    Keys,
    RowName,
    check_rows,
    recipe_rows,
)
from octavo.measure.evaluate.recipe_digest import recipe_digest
from octavo.measure.evaluate.row_scales import Watch, given_scales
from octavo.measure.records import Measurement


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked.

    model: a folder or name, "SmolLM2-135M-Instruct" that of the demo; None with endpoints, servers
    in its place, whose tokenizer then counts tokens. num_needles: None is all questions.
    max_length: tokens of a prompt and its answer; None is the model's context, or all questions of
    servers. per_bucket: None is all questions of a bucket. is_resumed: whether buckets that are in
    the output already are left out.
    """

    data: str = GENERATED
    model: str | None = None
    rows: tuple[str, ...] = DEFAULT_ROWS
    endpoints: tuple[Endpoint, ...] = ()
    tokenizer: str | None = None
    num_needles: int | None = None
    max_length: int | None = None
    per_bucket: int | None = None
    kv_cache_dtype: str = "fp8"
    scales: Path | None = None
    margin: float = 1.5
    chunk: int = 2048
    dtype: str = "auto"
    prompts: PromptSettings = PromptSettings()
    is_resumed: bool = False

    def __post_init__(self) -> None:
        if bool(self.endpoints) == bool(self.model):
            raise ConfigError("expected a MODEL or --endpoint, one of them")
        if bool(self.endpoints) != bool(self.tokenizer):
            raise ConfigError("--endpoint needs --tokenizer to count tokens; a model has its own")
        if self.scales is not None and (self.endpoints or not self.rows_with_scales):
            raise ConfigError("--scales is for rows with static scales, which are not asked for")

    @property
    def rows_with_scales(self) -> list[RowName]:
        """The rows that need scales, or the means of keys."""
        return [row for row in check_rows(self.rows) if row.needs_scales]

    @property
    def command(self) -> str:
        """The command line that repeats this."""
        words = ["octavo", "eval", "mrcr", *([self.model] if self.model else [])]
        words += ["--data", self.data]
        for flag, number in (
            ("--num-needles", self.num_needles),
            ("--max-length", self.max_length),
            ("--num-questions", self.per_bucket),
        ):
            words += [] if number is None else [flag, str(number)]
        words += self.prompts.command
        if self.endpoints:
            for endpoint in self.endpoints:
                words += ["--endpoint", f"{endpoint.name}={endpoint.url}"]
            return shlex.join([*words, "--tokenizer", str(self.tokenizer)])
        words += [word for row in self.rows for word in ("--recipe", row)]
        words += ["--chunk", str(self.chunk), "--dtype", self.dtype]
        words += ["--kv-cache-dtype", self.kv_cache_dtype]
        if self.scales is not None:
            words += ["--scales", str(self.scales)]
        elif self.rows_with_scales:
            words += ["--margin", f"{self.margin:g}"]
        return shlex.join(words)


def run(
    request: Request, output: Path | None, watch: Watch = lambda what, done, total: None
) -> list[Measurement]:
    """Ask every row; a record is in the file `output` as soon as its bucket is done."""
    store.check_folder(output)
    if request.is_resumed and output is None:
        raise ConfigError("--resume goes on with the records of --output, which is not given")
    has_done = request.is_resumed and output is not None and output.exists()
    done = store.read(output) if has_done and output is not None else []
    given = given_scales(request.scales, request.rows_with_scales)  # before a model is loaded
    questions = load_questions(request.data, request.num_needles)
    text_model: TextModel | None = None
    if request.endpoints:
        tokenizer = prepare_tokenizer(load_tokenizer(str(request.tokenizer)), request.prompts)
    else:
        name = None if request.model == SMALL else request.model
        text_model = load_text_model(name, dtype=request.dtype, prompts=request.prompts)
        tokenizer = text_model.tokenizer
    limit = _limit(request, text_model)
    counted = _count(tokenizer, questions, watch)
    buckets = mrcr.choose_questions(counted, limit, request.per_bucket)
    num_rows = len(request.endpoints) or len(request.rows)
    total, num_done = num_rows * sum(map(len, buckets.values())), 0

    def on_questions(count: int = 1) -> None:
        nonlocal num_done
        num_done += count
        watch("answering", num_done, total)

    if text_model is None:
        rows = _served(request, on_questions)
    else:
        if request.rows_with_scales and not given:
            given = calibrate_on_chats(
                text_model, request.rows_with_scales, margin=request.margin, watch=watch
            )
        rows = _local(request, text_model, given, on_questions)
    return mrcr.evaluate(
        rows,
        buckets,
        about={
            "data": request.data if request.data == GENERATED else Path(request.data).name,
            "num_needles": request.num_needles or mrcr.ALL,
            "max_length": limit or mrcr.ALL,
            "per_bucket": request.per_bucket or mrcr.ALL,
        },
        command=request.command,
        done=done,
        on_record=lambda record: store.append(output, [record]) if output else None,
        on_skip=on_questions,
    )


def _limit(request: Request, text_model: TextModel | None) -> int | None:
    """Tokens that a prompt and its answer may have."""
    own = text_model.max_length if text_model is not None else None
    asked = request.max_length
    if own is not None and asked is not None and asked > own:
        raise ConfigError(
            f"expected --max-length up to {own}, for which {request.model} was made, got {asked}"
        )
    return asked or own


def _count(tokenizer: Any, questions: Sequence[Question], watch: Watch) -> list[Counted]:
    found = []
    for question in questions:
        found.append(mrcr.count_tokens(tokenizer, question))
        watch("counting tokens", len(found), len(questions))
    return found


def _served(request: Request, on_question: Callable[[], None]) -> list[Row]:
    rows = []
    for endpoint in request.endpoints:
        with Client(endpoint) as client:  # all servers are asked before one has to work
            model = client.model
        rows.append(
            mrcr.endpoint_row(
                endpoint, model, tokenizer=str(request.tokenizer), on_question=on_question
            )
        )
    return rows


def _local(
    request: Request,
    text_model: TextModel,
    given: dict[Keys, ScaleSet],
    on_question: Callable[[], None],
) -> list[Row]:
    found = recipe_rows(
        request.rows, given, dtype=text_model.dtype, kv_cache_dtype=request.kv_cache_dtype
    )
    machine = machine_of(text_model)
    calibration = None if request.scales is not None else ["generated chats", request.margin]
    return [
        mrcr.local_row(
            text_model,
            row,
            chunk=request.chunk,
            machine=machine,
            recipe_digest=recipe_digest(row.recipe, calibration if name.needs_scales else None),
            on_question=on_question,
        )
        for name, row in zip(check_rows(request.rows), found, strict=True)
    ]
