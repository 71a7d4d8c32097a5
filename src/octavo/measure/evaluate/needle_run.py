"""A whole search for needles: model or servers, haystack, rows and cells, as one request names."""

import shlex
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.retrieval_model import NAME, load_retrieval_model
from octavo.integrations.transformers.small_model import NAME as SMALL
from octavo.integrations.transformers.text_model import (
    TextModel,
    load_text_model,
    load_tokenizer,
    read_text,
)
from octavo.integrations.transformers.tokenizer import (
    PromptSettings,
    prepare_tokenizer,
    text_tokens,
)
from octavo.kernels.device import default_device
from octavo.measure import store
from octavo.measure.evaluate import needle
from octavo.measure.evaluate.endpoint import Client, Endpoint
from octavo.measure.evaluate.needle import Grid, Row
from octavo.measure.evaluate.needle_prompts import (
    Haystack,
    PairHaystack,
    TextHaystack,
    prompt_seed,
    split_sentences,
)
from octavo.measure.evaluate.perplexity import machine_of
from octavo.measure.evaluate.perplexity_rows import (
    BASELINE,
    DEFAULT_ROWS,
    Keys,
    RowName,
    check_rows,
    recipe_rows,
)
from octavo.measure.evaluate.recipe_digest import recipe_digest
from octavo.measure.evaluate.row_scales import Watch, calibrate_rows, given_scales
from octavo.measure.records import Measurement
from octavo.recipe import Recipe

# The model of weights set by hand, by scales of 1.0: nothing but its sums can go wrong.
RETRIEVAL_ROWS = (BASELINE, "unit+promote=none", "unit")
# A CPU spells out every product of one-level sums, which takes minutes where they are still right.
CPU_ROWS = (BASELINE, "unit")
CALIBRATION_LENGTH, NUM_CALIBRATION_PROMPTS = 2048, 4


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is searched.

    is_fitted: whether lengths beyond the model's context are left out, instead of being an error.
    model: None is the retrieval model, "SmolLM2-135M-Instruct" that of the demo, else a folder or
    name. rows: () is the default of the model. endpoints: servers in place of a model; tokenizer:
    the folder or name of theirs, for haystacks of text. data: a text to hide needles in.
    scales: a file for rows with static scales; None calibrates them on other prompts.
    is_resumed: whether cells that are in the output already are left out.
    """

    grid: Grid
    is_fitted: bool = False
    model: str | None = None
    rows: tuple[str, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    tokenizer: str | None = None
    data: Path | None = None
    num_keys: int = 4
    kv_cache_dtype: str = "fp8"
    scales: Path | None = None
    margin: float = 1.5
    chunk: int = 2048
    dtype: str = "auto"
    prompts: PromptSettings = PromptSettings()
    is_resumed: bool = False

    def __post_init__(self) -> None:
        if self.endpoints and (self.model or self.rows or self.scales):
            raise ConfigError(
                "expected --endpoint, or a model with --recipe and --scales, not both"
            )
        if self.tokenizer and not self.endpoints:
            raise ConfigError("--tokenizer is for --endpoint: a model has its own")
        if self.data is not None and not self.has_text:
            raise ConfigError(
                "--data is a text to hide needles in, for models that read text: expected a MODEL, "
                "or --endpoint and --tokenizer"
            )
        if self.prompts != PromptSettings() and not self.has_text:
            raise ConfigError(
                "--add-bos is for prompts of text: expected a MODEL, or --endpoint and --tokenizer"
            )
        # Names are checked before a model is loaded.
        has_static = not self.endpoints and bool(self.rows_with_scales)
        if self.scales is not None and not has_static:
            raise ConfigError("--scales is for rows with static scales, which are not asked for")

    @property
    def has_text(self) -> bool:
        """Whether prompts are text, not the words of the retrieval model."""
        return self.tokenizer is not None if self.endpoints else self.model not in (None, NAME)

    @property
    def row_names(self) -> tuple[str, ...]:
        """The rows of a local model."""
        on_gpu = default_device().capability is not None
        own = RETRIEVAL_ROWS if on_gpu else CPU_ROWS
        return self.rows or (DEFAULT_ROWS if self.has_text else own)

    @property
    def rows_with_scales(self) -> list[RowName]:
        """The rows that need scales, or the means of keys."""
        return [row for row in check_rows(self.row_names) if row.needs_scales]

    @property
    def command(self) -> str:
        """The command line that repeats this."""
        grid = self.grid
        words = ["octavo", "eval", "needle", *([self.model] if self.model else [])]
        words += ["--lengths", ",".join(map(str, grid.lengths))]
        words += ["--depths", ",".join(f"{depth:g}" for depth in grid.depths)]
        words += ["--repetitions", str(grid.repetitions), "--seed", str(grid.seed)]
        words += ["--data", str(self.data)] if self.data else []
        words += ["--num-keys", str(self.num_keys)] if self.has_text else []
        words += self.prompts.command
        if self.endpoints:
            for endpoint in self.endpoints:
                words += ["--endpoint", f"{endpoint.name}={endpoint.url}"]
            return shlex.join(
                [*words, *(["--tokenizer", self.tokenizer] if self.tokenizer else [])]
            )
        words += [word for row in self.row_names for word in ("--recipe", row)]
        words += ["--chunk", str(self.chunk), "--dtype", self.dtype]
        words += ["--kv-cache-dtype", self.kv_cache_dtype]
        if self.scales is not None:
            words += ["--scales", str(self.scales)]
        elif self.rows_with_scales:
            words += ["--margin", f"{self.margin:g}"]
        return shlex.join(words)


class _Progress:
    """Tokens of prompts that are done, of all."""

    def __init__(self, watch: Watch, total: int) -> None:
        self.watch, self.total, self.done = watch, total, 0

    def add(self, num_tokens: int) -> None:
        """Tell that so many more are done."""
        self.done = min(self.total, self.done + num_tokens)
        self.watch("searching", self.done, self.total)


def run(
    request: Request,
    output: Path | None,
    watch: Watch = lambda what, done, total: None,
    *,
    text_model: TextModel | None = None,
) -> list[Measurement]:
    """Search with every row; a record is in the file `output` as soon as its cell is done.

    text_model: the request's, where it is loaded already.
    """
    store.check_folder(output)
    if request.is_resumed and output is None:
        raise ConfigError("--resume goes on with the records of --output, which is not given")
    has_done = request.is_resumed and output is not None and output.exists()
    done = store.read(output) if has_done and output is not None else []
    if not request.endpoints:
        text_model = text_model or _load(request)
        request = replace(request, grid=_check_lengths(request, text_model))
    num_rows = len(request.endpoints) or len(request.row_names)
    progress = _Progress(watch, num_rows * request.grid.num_tokens)
    if text_model is None:
        rows, haystack = _served(request, progress)
    else:
        rows, haystack = _local(request, progress, watch, text_model)
    return needle.evaluate(
        rows,
        request.grid,
        haystack,
        command=request.command,
        done=done,
        on_record=lambda record: store.append(output, [record]) if output else None,
        on_skip=progress.add,
    )


def _served(request: Request, progress: _Progress) -> tuple[list[Row], Haystack]:
    haystack: Haystack = PairHaystack()
    if request.tokenizer is not None:
        tokenizer = prepare_tokenizer(load_tokenizer(request.tokenizer), request.prompts)
        haystack = _text_haystack(request, tokenizer)
    grid = request.grid
    size = round(grid.num_tokens / (len(grid.cells) * grid.repetitions))
    rows = []
    for endpoint in request.endpoints:
        with Client(endpoint) as client:  # all servers are asked before one has to work
            model = client.model
        rows.append(
            needle.endpoint_row(
                endpoint,
                model,
                tokenizer=request.tokenizer,
                on_prompt=lambda: progress.add(size),
            )
        )
    return rows, haystack


def _local(
    request: Request, progress: _Progress, watch: Watch, text_model: TextModel
) -> tuple[list[Row], Haystack]:
    given = given_scales(request.scales, request.rows_with_scales)
    haystack: Haystack = PairHaystack()
    if request.has_text:
        haystack = _text_haystack(request, text_model.tokenizer)
    if request.rows_with_scales and not given:
        given = _calibrate(request, text_model, haystack, watch)
    found = recipe_rows(
        request.row_names, given, dtype=text_model.dtype, kv_cache_dtype=request.kv_cache_dtype
    )
    machine = machine_of(text_model)
    rows = [
        needle.local_row(
            text_model,
            row,
            chunk=request.chunk,
            machine=machine,
            recipe_digest=_digest(request, name, row.recipe),
            on_step=progress.add,
        )
        for name, row in zip(check_rows(request.row_names), found, strict=True)
    ]
    return rows, haystack


def _load(request: Request) -> TextModel:
    given_scales(request.scales, request.rows_with_scales)  # an error before a model is loaded
    if not request.has_text:
        return load_retrieval_model(dtype=request.dtype)
    name = None if request.model == SMALL else request.model
    return load_text_model(name, dtype=request.dtype, prompts=request.prompts)


def _digest(request: Request, name: RowName, recipe: Recipe | None) -> str | None:
    is_calibrated = name.needs_scales and request.scales is None
    calibration = [request.margin, _calibration_length(request)] if is_calibrated else None
    return recipe_digest(recipe, calibration)


def _calibration_length(request: Request) -> int:
    return min(CALIBRATION_LENGTH, max(request.grid.lengths))


def _check_lengths(request: Request, text_model: TextModel) -> Grid:
    """The request's cells, with lengths that the model was made for."""
    grid, limit = request.grid, text_model.max_length
    if limit is not None and request.is_fitted:
        fitting = tuple(length for length in grid.lengths if length <= limit)
        grid = replace(grid, lengths=fitting or (limit,))
    longest = max(grid.lengths)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"expected lengths up to {limit}, for which {text_model.name} was made, got {longest}"
        )
    return grid


def _text_haystack(request: Request, tokenizer: Any) -> TextHaystack:
    @lru_cache(maxsize=4096)
    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    filler = () if request.data is None else split_sentences(read_text(request.data))
    return TextHaystack(
        count=count,
        num_added=len(tokenizer("")["input_ids"]),
        num_keys=request.num_keys,
        filler=filler,
        name="text" if request.data is None else request.data.name,
    )


def _calibrate(
    request: Request, text_model: TextModel, haystack: Haystack, watch: Watch
) -> dict[Keys, ScaleSet]:
    """Static scales by prompts that are not searched, for all kinds of keys that rows have."""
    length = _calibration_length(request)
    count = NUM_CALIBRATION_PROMPTS
    windows = []
    for i in range(count):
        prompt = haystack.make(length, (i + 0.5) / count, prompt_seed(-1, length, 0.0, i))
        windows.append(torch.tensor(text_tokens(text_model.tokenizer, prompt.text)))
    return calibrate_rows(
        text_model,
        windows,
        request.rows_with_scales,
        data=f"{count} other haystacks ({haystack.name}) of {length} tokens",
        margin=request.margin,
        watch=watch,
    )
