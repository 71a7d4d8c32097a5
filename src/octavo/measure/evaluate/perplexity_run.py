"""A whole measurement of perplexity: text, model, scales and rows, as one request names them."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel, load_text_model, read_text
from octavo.integrations.transformers.tokenizer import PromptSettings
from octavo.measure import store
from octavo.measure.evaluate import perplexity
from octavo.measure.evaluate.perplexity_rows import (
    DEFAULT_ROWS,
    Keys,
    RowName,
    check_rows,
    recipe_rows,
)
from octavo.measure.evaluate.reading import DEFAULT_CHUNK, Count, Reading
from octavo.measure.evaluate.row_scales import Watch, calibrate_rows, given_scales
from octavo.measure.records import Measurement

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is measured.

    model: None is SmolLM2-135M-Instruct. context: None is 8192, or what the model was made for.
    chunk: None is 512, or half of a shorter context; chunk, count and batch are those of `Reading`.
    scales: a file for rows with static scales or centered keys; None calibrates them on
    calibration_data, or where that is None on the windows of `data` right after those that are
    measured.
    """

    data: Path
    model: str | None = None
    context: int | None = None
    chunk: int | None = None
    count: Count = "later"
    batch: int = 1
    num_windows: int = 4
    rows: tuple[str, ...] = DEFAULT_ROWS
    kv_cache_dtype: str = "fp8"
    scales: Path | None = None
    calibration_data: Path | None = None
    calibration_windows: int = 4
    margin: float = 1.5
    dtype: str = "auto"
    prompts: PromptSettings = PromptSettings()

    def __post_init__(self) -> None:
        if not self.rows_with_scales and self.scales is not None:
            raise ConfigError(
                "--scales is for rows with static scales or centered keys, which are not asked for"
            )
        if self.scales is not None and self.calibration_data is not None:
            raise ConfigError("expected --scales or --calibration-data, got both")
        if self.context is not None:
            self.reading(self.context).check(self.context)

    @property
    def rows_with_scales(self) -> list[RowName]:
        """The rows that need scales, or the means of keys."""
        return [row for row in check_rows(self.rows) if row.needs_scales]

    def reading(self, context: int) -> Reading:
        """How windows of this many tokens are read."""
        chunk = min(DEFAULT_CHUNK, context // 2) if self.chunk is None else self.chunk
        return Reading(chunk=chunk, count=self.count, batch=self.batch)

    @property
    def command(self) -> str:
        """The command line that repeats this measurement."""
        words = ["octavo", "eval", "perplexity", *([self.model] if self.model else [])]
        words += ["--data", str(self.data), "--num-windows", str(self.num_windows)]
        words += ["--context", str(self.context)] if self.context else []
        words += ["--chunk", str(self.chunk)] if self.chunk else []
        words += ["--count", self.count]
        words += ["--batch-size", str(self.batch)] if self.batch > 1 else []
        words += [word for row in self.rows for word in ("--recipe", row)]
        words += ["--kv-cache-dtype", self.kv_cache_dtype, "--dtype", self.dtype]
        words += self.prompts.command
        if self.scales is not None:
            words += ["--scales", str(self.scales)]
        elif self.rows_with_scales:
            words += ["--calibration-windows", str(self.calibration_windows)]
            words += ["--margin", f"{self.margin:g}"]
            if self.calibration_data is not None:
                words += ["--calibration-data", str(self.calibration_data)]
        return shlex.join(words)


def run(
    request: Request,
    output: Path | None,
    watch: Watch = lambda what, done, total: None,
    *,
    text_model: TextModel | None = None,
) -> list[Measurement]:
    """Measure every row; a record is in the file `output` as soon as its row is done.

    text_model: the request's, where it is loaded already.
    """
    store.check_folder(output)
    text = read_text(request.data)
    given = given_scales(request.scales, request.rows_with_scales)  # before a model is loaded
    if text_model is None:
        text_model = load_text_model(request.model, dtype=request.dtype, prompts=request.prompts)
    context = request.context or min(DEFAULT_CONTEXT, text_model.max_length or DEFAULT_CONTEXT)
    reading = request.reading(context)
    reading.check(context)
    windows = text_model.windows(text, context, request.num_windows)
    if request.rows_with_scales and not given:
        given = _calibrate(request, text_model, text, context, watch)
    rows = recipe_rows(
        request.rows, given, dtype=text_model.dtype, kv_cache_dtype=request.kv_cache_dtype
    )
    num_read, total = 0, len(rows) * len(windows) * (context - 1)

    def count(num_tokens: int) -> None:
        nonlocal num_read
        num_read += num_tokens
        watch("reading", num_read, total)

    return perplexity.evaluate(
        text_model,
        windows,
        rows,
        reading,
        data=request.data.name,
        command=request.command,
        on_step=count,
        on_record=lambda record: store.append(output, [record]) if output else None,
    )


def _calibrate(
    request: Request, text_model: TextModel, text: str, context: int, watch: Watch
) -> dict[Keys, ScaleSet]:
    """Static scales from text that is not measured, for all kinds of keys that rows have."""
    num_windows = request.calibration_windows
    source, start = request.data, request.num_windows
    if request.calibration_data is not None:
        source, start = request.calibration_data, 0
        text = read_text(source)
        if source.resolve() == request.data.resolve():
            raise ConfigError("expected --calibration-data to be another text than --data")
    windows = text_model.windows(text, context, num_windows, start)
    return calibrate_rows(
        text_model,
        windows,
        request.rows_with_scales,
        data=f"{source.name}, windows {start} to {start + num_windows - 1} of {context} tokens",
        margin=request.margin,
        watch=watch,
    )
