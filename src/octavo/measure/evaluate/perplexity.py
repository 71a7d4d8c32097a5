"""Perplexity of a text, read through the KV cache: a model's own dtype beside FP8."""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.calibration.data import batches
from octavo.errors import ConfigError
from octavo.integrations.transformers.decoder import counts_on_host, make_static_cache
from octavo.integrations.transformers.text_model import TextModel, read_text
from octavo.measure.evaluate.language import (
    calibrate_rows,
    given_scales,
    load_model,
    local_participants,
    local_rows,
    model_about,
)
from octavo.measure.evaluate.requests import Count, PerplexityRequest
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table
from octavo.measure.run import ALL, Outcome, Progress, Records, Watch, Workload, run_workload
from octavo.measure.statistics import standard_error
from octavo.ops.plan_decode import MAX_QUERY_TOKENS

# Logits of so many tokens become losses at a time: their softmax needs a copy.
LOSS_ROWS = 128
# Passes before the one that a CUDA graph holds: the first fills the cache, the next compiles.
NUM_WARMUPS = 3

DEFAULT_CHUNK, DEFAULT_CONTEXT = 512, 8192

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

    def passes(self, context: int) -> list[tuple[range, bool]]:
        """The tokens of each pass over a window, and whether their predictions count.

        The last token predicts nothing and is not read. ConfigError if no prediction counts.
        """
        last = context - 1
        chunks = [range(i, min(i + self.chunk, last)) for i in range(0, last, self.chunk)]
        first = {"all": 0, "later": 1, "last": len(chunks) - 1}[self.count]
        found = [(chunk, place >= first) for place, chunk in enumerate(chunks)]
        if not any(is_counted for _, is_counted in found):
            raise ConfigError(
                f"a chunk of {self.chunk} tokens leaves no predictions to count ({self.count}) in "
                f"a context of {context}: use a smaller chunk, a longer context, or count all"
            )
        return found


@torch.inference_mode()
def window_losses(
    model: Any, windows: Sequence[Tensor], reading: Reading, on_step: Step = lambda n: None
) -> list[float]:
    """The mean negative log-likelihood of each window's counted tokens, in nats.

    Token t + 1 is predicted by the pass that reads token t, from the cache of all before.
    """
    context, device = len(windows[0]), next(model.parameters()).device
    passes = reading.passes(context)
    num_counted = sum(len(chunk) for chunk, is_counted in passes if is_counted)
    # Short passes take as long as their launches: on a GPU all but the first are one graph.
    is_graph = device.type == "cuda" and reading.chunk <= MAX_QUERY_TOKENS
    losses: list[float] = []
    for batch in batches(iter(windows), reading.batch):
        tokens = torch.stack(batch).to(device)
        size = len(batch)
        reader = _Replays(model, size, context, reading.chunk) if is_graph else _Passes(model)
        totals = torch.zeros(size, dtype=torch.float64, device=device)
        for chunk, is_counted in passes:
            logits = reader.read(tokens[:, chunk.start : chunk.stop], chunk.start, is_counted)
            if is_counted:
                targets = tokens[:, chunk.start + 1 : chunk.stop + 1]
                rows = logits.flatten(0, 1).split(LOSS_ROWS)
                found = [  # in float32, added up in float64
                    torch.nn.functional.cross_entropy(some.float(), own, reduction="none")
                    for some, own in zip(rows, targets.flatten().split(LOSS_ROWS), strict=True)
                ]
                totals += torch.cat(found).double().view(targets.shape).sum(1)
            on_step(size * len(chunk))
        losses += (totals / num_counted).tolist()
    return losses


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


def _reading(request: PerplexityRequest, context: int) -> Reading:
    """How the request's windows of this many tokens are read."""
    chunk = min(DEFAULT_CHUNK, context // 2) if request.chunk is None else request.chunk
    reading = Reading(chunk=chunk, count=request.count, batch=request.batch_size)
    reading.passes(context)
    return reading


def run(
    request: PerplexityRequest,
    output: Path | None,
    watch: Watch,
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

    def other_windows() -> tuple[str, list[Tensor]]:
        """Text that is not measured, and what records call it."""
        count, source, start, other = request.calibration_windows, data, request.num_windows, text
        if request.calibration_data is not None:
            source, start = request.calibration_data, 0
            other = read_text(source)
            if source.resolve() == data.resolve():
                raise ConfigError("expected --calibration-data to be another text than --data")
        about = f"{source.name}, windows {start} to {start + count - 1} of {context} tokens"
        return about, text_model.windows(other, context, count, start)

    scales = scales or calibrate_rows(request, text_model, other_windows, watch)
    rows = [row for _, row in local_rows(request, text_model, scales)]
    progress = Progress(watch, "reading", len(rows) * len(windows) * (context - 1))
    return run_workload(
        local_participants(rows, text_model.model, model_about(text_model)),
        make_workload(windows, reading, data.name, request.command, progress.add),
        records,
    )


def make_workload(
    windows: Sequence[Tensor],
    reading: Reading,
    data: str,
    command: str,
    on_step: Step = lambda num_tokens: None,
) -> Workload[Any, str]:
    """The perplexity of each row, and what is left of the first row's.

    Every row after the first says `recovery_percent`, the first row's perplexity over its own, with
    a standard error over the windows where there are two or more.
    """
    losses: list[list[float]] = []  # of each row so far

    def measure(model: Any, cell: str) -> Outcome:
        losses.append(window_losses(model, windows, reading, on_step))
        return Outcome(_values(losses[-1], losses[0], len(losses) == 1))

    digest = hashlib.sha256(json.dumps([window.tolist() for window in windows]).encode())
    read: dict[str, Scalar] = {"data": data, "text_sha256": digest.hexdigest()[:16]}
    read |= {"context": len(windows[0]), "chunk": reading.chunk}
    cells = {ALL: {**read, "count": reading.count, "num_windows": len(windows)}}
    return Workload(op="perplexity", command=command, cells=cells, measure=measure)


def _values(own: Sequence[float], first: Sequence[float], is_first: bool) -> dict[str, float]:
    """Perplexities, and recoveries in percent; standard errors by the rule of the exponential."""
    values = _exponential(own, "perplexity", "perplexity_standard_error")
    if is_first:
        return values
    # Window by window: how hard a text is does not count, only what FP8 does to it.
    less = [b - a for a, b in zip(own, first, strict=True)]
    retained = _exponential(less, "recovery_percent", "recovery_standard_error_percent")
    more = _exp(-statistics.fmean(less))
    return values | {name: 100 * x for name, x in retained.items()} | {"perplexity_ratio": more}


def _exponential(numbers: Sequence[float], name: str, error_name: str) -> dict[str, float]:
    """The exponential of the mean, and its standard error where there is one."""
    whole = _exp(statistics.fmean(numbers))
    error = standard_error(numbers)
    return {name: whole} if error is None else {name: whole, error_name: whole * error}


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


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
