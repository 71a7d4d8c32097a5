"""A whole measurement of perplexity: text, model, scales and rows, as one request names them."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.calibration.scale_file import ScaleSet, load_scales
from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel, load_text_model, read_text
from octavo.measure import store
from octavo.measure.evaluate import perplexity
from octavo.measure.evaluate.perplexity import BASELINE, Reading
from octavo.measure.records import Measurement

DEFAULT_ROWS = (BASELINE, "tensor", "head", "token")
DEFAULT_CONTEXT = 8192

Watch = Callable[[str, int, int], None]  # (what is done, how much of it so far, of how much)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is measured.

    model: None is SmolLM2-135M-Instruct. context: None is 8192, or what the model was made for.
    scales: a file for static rows; None calibrates them on calibration_data, or where that is None
    on the windows of `data` right after those that are measured.
    """

    data: Path
    model: str | None = None
    context: int | None = None
    reading: Reading = Reading()
    num_windows: int = 4
    rows: tuple[str, ...] = DEFAULT_ROWS
    kv_cache_dtype: str = "fp8"
    scales: Path | None = None
    calibration_data: Path | None = None
    calibration_windows: int = 4
    margin: float = 1.5
    dtype: str = "auto"

    def __post_init__(self) -> None:
        perplexity.check_rows(self.rows)
        if self.scales is not None and not self.is_static:
            raise ConfigError("--scales is for the rows tensor and head, which are not asked for")
        if self.scales is not None and self.calibration_data is not None:
            raise ConfigError("expected --scales or --calibration-data, got both")
        if self.context is not None:
            self.reading.check(self.context)

    @property
    def is_static(self) -> bool:
        """Whether a row needs static scales."""
        return any(map(perplexity.is_static, self.rows))

    @property
    def command(self) -> str:
        """The command line that repeats this measurement."""
        words = ["octavo", "eval", "perplexity", *([self.model] if self.model else [])]
        words += ["--data", str(self.data), "--num-windows", str(self.num_windows)]
        words += ["--context", str(self.context)] if self.context else []
        words += ["--chunk", str(self.reading.chunk), "--count", self.reading.count]
        words += [word for row in self.rows for word in ("--recipe", row)]
        words += ["--kv-cache-dtype", self.kv_cache_dtype, "--dtype", self.dtype]
        if self.scales is not None:
            words += ["--scales", str(self.scales)]
        elif self.is_static:
            words += ["--calibration-windows", str(self.calibration_windows)]
            words += ["--margin", f"{self.margin:g}"]
            if self.calibration_data is not None:
                words += ["--calibration-data", str(self.calibration_data)]
        return shlex.join(words)


def run(
    request: Request, output: Path | None, watch: Watch = lambda what, done, total: None
) -> list[Measurement]:
    """Measure every row; a record is in the file `output` as soon as its row is done."""
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"expected an existing folder for {output}; create {output.parent}")
    text = read_text(request.data)
    given = load_scales(request.scales) if request.scales else None
    text_model = load_text_model(request.model, dtype=request.dtype)
    context = request.context or min(DEFAULT_CONTEXT, text_model.max_length or DEFAULT_CONTEXT)
    request.reading.check(context)
    windows = text_model.windows(text, context, request.num_windows)
    if request.is_static and given is None:
        given = _calibrate(request, text_model, text, context, watch)
    rows = perplexity.recipe_rows(
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
        request.reading,
        data=request.data.name,
        command=request.command,
        on_step=count,
        on_record=lambda record: store.append(output, [record]) if output else None,
    )


def _calibrate(
    request: Request, text_model: TextModel, text: str, context: int, watch: Watch
) -> ScaleSet:
    """Static scales from text that is not measured."""
    num_windows = request.calibration_windows
    source, start = request.data, request.num_windows
    if request.calibration_data is not None:
        source, start = request.calibration_data, 0
        text = read_text(source)
        if source.resolve() == request.data.resolve():
            raise ConfigError("expected --calibration-data to be another text than --data")
    windows = text_model.windows(text, context, num_windows, start)
    return perplexity.calibration_scales(
        text_model,
        windows,
        data=f"{source.name}, windows {start} to {start + num_windows - 1} of {context} tokens",
        margin=request.margin,
        on_window=lambda done: watch("calibrating", done, num_windows),
    )
