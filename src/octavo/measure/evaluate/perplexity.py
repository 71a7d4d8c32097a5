"""Perplexity of a text, read through the KV cache: a model's own dtype beside FP8."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel, read_text
from octavo.measure.evaluate.language import (
    Keys,
    LanguageRequest,
    applied,
    calibrate_rows,
    machine_of,
)
from octavo.measure.evaluate.reading import DEFAULT_CHUNK, Count, Reading, Step, window_losses
from octavo.measure.evaluate.statistics import standard_error
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table
from octavo.measure.rows import Row
from octavo.measure.run import (
    Outcome,
    Participant,
    Progress,
    Records,
    Watch,
    command_line,
    run_whole,
    unwatched,
)

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class Request(LanguageRequest):
    """What is measured.

    model: None is SmolLM2-135M-Instruct. context: None is 8192, or what the model was made for.
    chunk: None is 512, or half of a shorter context; chunk, count and batch are those of `Reading`.
    Without a scale file, rows with static scales or centered keys are calibrated on
    calibration_data, or where that is None on the windows of `data` right after those that are
    measured.
    """

    data: Path
    context: int | None = None
    chunk: int | None = None
    count: Count = "later"
    batch: int = 1
    num_windows: int = 4
    calibration_data: Path | None = None
    calibration_windows: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scales is not None and self.calibration_data is not None:
            raise ConfigError("expected --scales or --calibration-data, got both")
        if self.context is not None:
            self.reading(self.context).check(self.context)

    def reading(self, context: int) -> Reading:
        """How windows of this many tokens are read."""
        chunk = min(DEFAULT_CHUNK, context // 2) if self.chunk is None else self.chunk
        return Reading(chunk=chunk, count=self.count, batch=self.batch)

    @property
    def command(self) -> str:
        """The command line that repeats this measurement."""
        is_calibrated = self.scales is None and self.rows_with_scales
        flags = {
            "--data": self.data,
            "--num-windows": self.num_windows,
            "--context": self.context,
            "--count": self.count,
            "--batch-size": self.batch if self.batch > 1 else None,
            "--calibration-windows": self.calibration_windows if is_calibrated else None,
            "--calibration-data": self.calibration_data if is_calibrated else None,
            **self.flags(),
        }
        words = ("octavo", "eval", "perplexity", self.model, *self.prompts.command)
        return command_line(*words, flags=flags)


def run(
    request: Request,
    output: Path | None,
    watch: Watch = unwatched,
    *,
    text_model: TextModel | None = None,
) -> list[Measurement]:
    """Measure every row; a record is in the file `output` as soon as its row is done.

    text_model: the request's, where it is loaded already.
    """
    records = Records.of_file(output)
    text = read_text(request.data)
    scales = request.given_scales()  # before a model is loaded
    text_model = text_model or request.load()
    context = request.context or min(DEFAULT_CONTEXT, text_model.max_length or DEFAULT_CONTEXT)
    reading = request.reading(context)
    reading.check(context)
    windows = text_model.windows(text, context, request.num_windows)
    if request.rows_with_scales and not scales:
        scales = _calibrate(request, text_model, text, context, watch)
    rows = [row for _, row in request.local_rows(text_model, scales)]
    progress = Progress(watch, "reading", len(rows) * len(windows) * (context - 1))
    return evaluate(
        text_model,
        windows,
        rows,
        reading,
        data=request.data.name,
        command=request.command,
        on_step=progress.add,
        records=records,
    )


def evaluate(
    text_model: TextModel,
    windows: Sequence[Tensor],
    rows: Sequence[Row],
    reading: Reading,
    *,
    data: str,
    command: str,
    on_step: Step = lambda num_tokens: None,
    records: Records | None = None,
) -> list[Measurement]:
    """One record for each row: the perplexity, and what is left of the first row's.

    The model is left as it came. Every row after the first says `recovery_percent`, the first row's
    perplexity over its own, with a standard error over the windows where there are two or more.
    """
    if not windows:
        raise ConfigError("expected one window or more, got none")
    reading.check(len(windows[0]))
    losses: list[list[float]] = []  # of each row so far

    def measure(model: Any) -> Outcome:
        losses.append(window_losses(model, windows, reading, on_step))
        return Outcome(_values(losses[-1], losses[0], len(losses) == 1))

    machine = machine_of(text_model.model)
    participants = [
        Participant(
            name=row.name,
            impl="transformers",
            about={"model": text_model.name, "dtype": text_model.dtype, **text_model.prompts.about},
            machine=machine,
            open=partial(applied, text_model.model, row.recipe()),
        )
        for row in rows
    ]
    about: dict[str, Scalar] = {"data": data, "context": len(windows[0]), "chunk": reading.chunk}
    about |= {"count": reading.count, "num_windows": len(windows)}
    return run_whole(participants, measure, records, op="perplexity", command=command, about=about)


def _values(own: Sequence[float], first: Sequence[float], is_first: bool) -> dict[str, float]:
    """Perplexities, and recoveries in percent; standard errors by the rule of the exponential."""
    perplexity = _exp(statistics.fmean(own))
    values = {"perplexity": perplexity}
    if (error := standard_error(own)) is not None:
        values["perplexity_standard_error"] = perplexity * error
    if is_first:
        return values
    # Window by window: how hard a text is does not count, only what FP8 does to it.
    more = [a - b for a, b in zip(own, first, strict=True)]
    recovery = 100 * _exp(-statistics.fmean(more))
    values |= {"recovery_percent": recovery, "perplexity_ratio": _exp(statistics.fmean(more))}
    if (error := standard_error(more)) is not None:
        values["recovery_standard_error_percent"] = recovery * error
    return values


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


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


def perplexity_table(records: Sequence[Measurement]) -> Table:
    """The rows as a table, with what each recovers of the first."""
    first = records[0].case
    windows = "window" if first["num_windows"] == 1 else "windows"
    read = f"{first['num_windows']} {windows} of {first['context']} tokens of {first['data']}"
    return Table(
        caption=f"perplexity: {first['model']}, {read}, {first['chunk']} at a time "
        f"(predictions counted: {first['count']})",
        header=("recipe", "perplexity", "± s.e.", "× baseline", "recovery (%)", "± s.e."),
        rows=tuple(
            (
                str(record.case["recipe"]),
                record.values["perplexity"],
                record.values.get("perplexity_standard_error"),
                _digits(record.values.get("perplexity_ratio"), 5),
                _digits(record.values.get("recovery_percent"), 3),
                _digits(record.values.get("recovery_standard_error_percent"), 3),
            )
            for record in records
        ),
    )


def _digits(number: float | None, count: int) -> str | None:
    """More digits than a table has: the ratios that matter start with 1.00."""
    return None if number is None else f"{number:.{count}f}"
