"""Perplexity of a text, read through the KV cache: a model's own dtype beside FP8."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.measure.evaluate.applied import applied
from octavo.measure.evaluate.perplexity_rows import RecipeRow
from octavo.measure.evaluate.reading import Reading, Step, window_losses
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.tables import Table
from octavo.recipe import Recipe


def evaluate(
    text_model: TextModel,
    windows: Sequence[Tensor],
    rows: Sequence[RecipeRow],
    reading: Reading,
    *,
    data: str,
    command: str,
    on_step: Step = lambda num_tokens: None,
    on_record: Callable[[Measurement], None] = lambda record: None,
) -> list[Measurement]:
    """One record for each row: the perplexity, and what is left of the first row's.

    The model is left as it came. Every row after the first says `recovery_percent`, the first row's
    perplexity over its own, with a standard error over the windows where there are two or more.
    on_record: called as soon as a row is done.
    """
    if not rows or len({row.name for row in rows}) != len(rows):
        raise ConfigError(f"expected rows of different names, got {[row.name for row in rows]}")
    if not windows:
        raise ConfigError("expected one window or more, got none")
    reading.check(len(windows[0]))
    machine = machine_of(text_model)
    losses: list[list[float]] = []
    records = []
    for row in rows:
        losses.append(_losses(text_model.model, windows, row.recipe, reading, on_step))
        record = Measurement(
            op="perplexity",
            impl="transformers",
            case={
                "model": text_model.name,
                "dtype": text_model.dtype,
                "data": data,
                "recipe": row.name,
                "context": len(windows[0]),
                "chunk": reading.chunk,
                "count": reading.count,
                "num_windows": len(windows),
                **text_model.prompts.about,
            },
            values=_values(losses[-1], losses[0], row is rows[0]),
            machine=machine,
            command=command,
            baseline=None if row is rows[0] else rows[0].name,
        )
        records.append(record)
        on_record(record)
    return records


def _losses(
    model: Any, windows: Sequence[Tensor], recipe: Recipe | None, reading: Reading, on_step: Step
) -> list[float]:
    """The loss of every window, with a recipe applied for as long as this takes."""
    with applied(model, recipe) as own:
        return window_losses(own, windows, reading, on_step)


def _values(own: Sequence[float], first: Sequence[float], is_first: bool) -> dict[str, float]:
    """Perplexities, and recoveries in percent; standard errors by the rule of the exponential."""
    perplexity = _exp(statistics.fmean(own))
    values = {"perplexity": perplexity}
    if (error := _standard_error(own)) is not None:
        values["perplexity_standard_error"] = perplexity * error
    if is_first:
        return values
    # Window by window: how hard a text is does not count, only what FP8 does to it.
    more = [a - b for a, b in zip(own, first, strict=True)]
    recovery = 100 * _exp(-statistics.fmean(more))
    values |= {"recovery_percent": recovery, "perplexity_ratio": _exp(statistics.fmean(more))}
    if (error := _standard_error(more)) is not None:
        values["recovery_standard_error_percent"] = recovery * error
    return values


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


def _standard_error(numbers: Sequence[float]) -> float | None:
    if len(numbers) < 2:
        return None
    return statistics.stdev(numbers) / math.sqrt(len(numbers))


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


def machine_of(text_model: TextModel) -> Machine:
    """The machine that a model runs on, with its GPU if it is on one."""
    device = next(text_model.model.parameters()).device
    if device.type != "cuda":
        return Machine.current()
    name = torch.cuda.get_device_name(device)
    return Machine.current(gpu=name, capability=torch.cuda.get_device_capability(device))
