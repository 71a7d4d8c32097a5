"""Perplexity of a text, read through the KV cache: a model's own dtype beside FP8."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.decoder import counts_on_host, make_static_cache
from octavo.integrations.transformers.text_model import TextModel, read_text
from octavo.measure.evaluate.language import (
    Keys,
    applied,
    calibrate_rows,
    given_scales,
    load_model,
    local_rows,
    machine_of,
)
from octavo.measure.evaluate.requests import Count, PerplexityRequest
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
    run_whole,
    unwatched,
)
from octavo.ops.plan_decode import MAX_QUERY_TOKENS

# Logits of so many tokens become losses at a time: their softmax needs a copy.
LOSS_ROWS = 128
# Passes before the one that a CUDA graph holds: the first fills the cache, the next compiles.
NUM_WARMUPS = 3

DEFAULT_CHUNK = 512

Step = Callable[[int], None]  # told how many tokens are done


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a text is read: in chunks that go through the cache, and which predictions count.

    chunk: tokens of one pass; the first one of a window fills the cache, and all later ones attend
    to what it holds. Up to 4 are decoded, their queries as they are; more are a prefill, whose
    queries an e4m3 cache quantizes as well. count: "later" leaves out what the first chunk
    predicts, "all" counts every prediction, "last" those of the last chunk alone. batch: windows
    that are read side by side.
    """

    chunk: int = DEFAULT_CHUNK
    count: Count = "later"
    batch: int = 1

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ConfigError(f"expected a chunk of one token or more, got {self.chunk}")
        if self.batch < 1:
            raise ConfigError(f"expected a batch of one window or more, got {self.batch}")
        if self.count not in get_args(Count):
            expected = ", ".join(get_args(Count))
            raise ConfigError(f"expected count to be one of {expected}, got {self.count!r}")

    def check(self, context: int) -> None:
        """ConfigError unless a window of this many tokens has predictions that count."""
        if context < 2 or not any(self._counted(chunk, context) for chunk in self.chunks(context)):
            raise ConfigError(
                f"a chunk of {self.chunk} tokens leaves no predictions to count ({self.count}) in "
                f"a context of {context}: use a smaller chunk, a longer context, or count all"
            )

    def chunks(self, context: int) -> list[range]:
        """The tokens of each pass over a window; the last one predicts nothing, and is not read."""
        num_read = context - 1
        starts = range(0, num_read, self.chunk)
        return [range(start, min(start + self.chunk, num_read)) for start in starts]

    def _counted(self, chunk: range, context: int) -> bool:
        match self.count:
            case "all":
                return True
            case "later":
                return chunk.start > 0
        return chunk.stop == context - 1

    def passes(self, context: int) -> Iterator[tuple[range, bool]]:
        """The chunks of a window, and whether their predictions count."""
        for chunk in self.chunks(context):
            yield chunk, self._counted(chunk, context)


def window_losses(
    model: Any, windows: Sequence[Tensor], reading: Reading, on_step: Step = lambda n: None
) -> list[float]:
    """The mean negative log-likelihood of each window's counted tokens, in nats.

    Token t + 1 is predicted by the pass that reads token t, from the cache of all before.
    """
    losses: list[float] = []
    for start in range(0, len(windows), reading.batch):
        batch = torch.stack(list(windows[start : start + reading.batch]))
        losses += _batch_losses(model, batch, reading, on_step)
    return losses


@torch.inference_mode()
def _batch_losses(model: Any, windows: Tensor, reading: Reading, on_step: Step) -> list[float]:
    """The losses of windows [batch, context], read side by side."""
    batch, context = windows.shape
    reading.check(context)
    tokens = windows.to(next(model.parameters()).device)
    # Short passes take as long as their launches: on a GPU all but the first are one graph.
    is_graph = tokens.is_cuda and reading.chunk <= MAX_QUERY_TOKENS
    reader = _Replays(model, batch, context, reading.chunk) if is_graph else _Passes(model)
    totals = torch.zeros(batch, dtype=torch.float64, device=tokens.device)
    num_counted = 0
    for chunk, is_counted in reading.passes(context):
        logits = reader.read(tokens[:, chunk.start : chunk.stop], chunk.start, is_counted)
        if is_counted:
            totals += _losses(logits, tokens[:, chunk.start + 1 : chunk.stop + 1])
            num_counted += len(chunk)
        on_step(batch * len(chunk))
    return [total / num_counted for total in totals.tolist()]


class _Passes:
    """A model that reads chunk after chunk, and its cache, which it makes itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None

    def read(self, ids: Tensor, start: int, is_counted: bool) -> Tensor:
        """Logits of the next tokens [batch, chunk, vocab]; of the last alone if none counts."""
        result = self.model(
            input_ids=ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0 if is_counted else 1,
        )
        self.cache = result.past_key_values
        logits: Tensor = result.logits
        return logits


class _Replays:
    """A model that reads chunk after chunk by a CUDA graph, into a cache that never moves."""

    def __init__(self, model: Any, batch: int, context: int, chunk: int) -> None:
        self.model = model
        self.cache = make_static_cache(model, context)
        device = next(model.parameters()).device
        self.ids = torch.zeros(batch, chunk, dtype=torch.int64, device=device)
        self.positions = torch.zeros(1, chunk, dtype=torch.int64, device=device)
        self.graph: Any = None
        self.logits: Tensor | None = None
        self.num_passes = 0

    def read(self, ids: Tensor, start: int, is_counted: bool) -> Tensor:
        """Logits of the next tokens [batch, chunk, vocab], good until the next call."""
        self.num_passes += 1
        stop = start + ids.shape[1]
        positions = torch.arange(start, stop, device=ids.device)[None]
        is_short = self.num_passes <= NUM_WARMUPS or ids.shape != self.ids.shape
        if is_short or counts_on_host(self.cache):
            return self._call(ids, positions)
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._call(self.ids, self.positions)
            self.graph = graph
        self.graph.replay()
        assert self.logits is not None
        return self.logits

    def _call(self, ids: Tensor, positions: Tensor) -> Tensor:
        result = self.model(
            input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        logits: Tensor = result.logits
        return logits


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The sums of the negative log-likelihoods of each text, in float32, added up in float64."""
    rows, wanted = logits.flatten(0, 1).split(LOSS_ROWS), targets.flatten().split(LOSS_ROWS)
    losses = [
        torch.nn.functional.cross_entropy(some.float(), own, reduction="none")
        for some, own in zip(rows, wanted, strict=True)
    ]
    return torch.cat(losses).double().view(targets.shape).sum(1)


DEFAULT_CONTEXT = 8192


def _reading(request: PerplexityRequest, context: int) -> Reading:
    """How the request's windows of this many tokens are read."""
    chunk = min(DEFAULT_CHUNK, context // 2) if request.chunk is None else request.chunk
    reading = Reading(chunk=chunk, count=request.count, batch=request.batch_size)
    reading.check(context)
    return reading


def run(
    request: PerplexityRequest,
    output: Path | None,
    watch: Watch = unwatched,
    *,
    text_model: TextModel | None = None,
) -> list[Measurement]:
    """Measure every row; a record is in the file `output` as soon as its row is done.

    text_model: the request's, where it is loaded already.
    """
    records = Records.of_file(output)
    data = request.data
    assert data is not None  # as the request has checked
    text = read_text(data)
    scales = given_scales(request)
    if request.context is not None:
        _reading(request, request.context)
    text_model = text_model or load_model(request)  # after all that can be wrong without one
    context = request.context or min(DEFAULT_CONTEXT, text_model.max_length or DEFAULT_CONTEXT)
    reading = _reading(request, context)
    windows = text_model.windows(text, context, request.num_windows)
    if request.rows_with_scales and not scales:
        scales = _calibrate(request, data, text_model, text, context, watch)
    rows = [row for _, row in local_rows(request, text_model, scales)]
    progress = Progress(watch, "reading", len(rows) * len(windows) * (context - 1))
    return evaluate(
        text_model,
        windows,
        rows,
        reading,
        data=data.name,
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
    request: PerplexityRequest,
    data: Path,
    text_model: TextModel,
    text: str,
    context: int,
    watch: Watch,
) -> dict[Keys, ScaleSet]:
    """Static scales from text that is not measured, for all kinds of keys that rows have."""
    num_windows, source, start = request.calibration_windows, data, request.num_windows
    if request.calibration_data is not None:
        source, start = request.calibration_data, 0
        text = read_text(source)
        if source.resolve() == data.resolve():
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
