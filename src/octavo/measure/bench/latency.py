"""One batch by itself in the engine: time to the first token, and between tokens, by context.

Rows run one after the other with the same model and the same prompts. What a token costs after a
longer context is a straight line: its intercept is the weights and everything else, its slope the
keys and values that are read. What a prompt costs has a square term as well: attention.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from octavo.errors import ConfigError, OctavoError
from octavo.measure.bench.engine_check import CONTEXT, check_row
from octavo.measure.bench.engine_load import raise_failed, serve_prompts
from octavo.measure.bench.engine_rows import EngineRow, Subject, engine_about, open_engine
from octavo.measure.bench.latency_fits import curve_values, line_values
from octavo.measure.bench.request_times import RequestTimes, Workload, statistics_ms
from octavo.measure.fit import Line, Quadratic, fit_itl, fit_ttft
from octavo.measure.records import Measurement, Scalar
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.settings import EngineSettings

PERCENTILES = (10, 20, 80, 90, 99)
# Those that vLLM's command of this name has of whole batches.
BATCH_PERCENTILES = (10, 25, 50, 75, 90, 99)
# Tokens of a warm-up: enough for every kernel of a step to have run.
WARMUP_LEN = 8
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LatencyCase:
    """So many sequences of each length at once, so many times.

    num_warmups: runs before, of the whole prompt and a few tokens.
    """

    input_lens: tuple[int, ...]
    output_len: int = 128
    batch_size: int = 1
    num_iters: int = 3
    num_warmups: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (*self.input_lens, self.batch_size, self.num_iters)
        if not self.input_lens or min(counts) < 1 or self.num_warmups < 0:
            raise ConfigError(f"expected lengths and counts of at least 1, got {self}")
        if self.output_len < 2:
            raise ConfigError(
                f"expected 2 or more tokens, to have time between them, got {self.output_len}"
            )
        if len(set(self.input_lens)) != len(self.input_lens):
            raise ConfigError(f"expected different lengths, got {list(self.input_lens)}")

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it, beside the length."""
        return {"batch_size": self.batch_size, "output_len": self.output_len, "seed": self.seed}

    @property
    def num_runs(self) -> int:
        """How many batches a row runs."""
        return len(self.input_lens) * (self.num_iters + self.num_warmups)

    def workload(self, input_len: int) -> Workload:
        """The prompts of a length."""
        return Workload(
            num_prompts=self.batch_size,
            input_len=input_len,
            output_len=self.output_len,
            seed=self.seed,
        )

    def within(self, context: int | None) -> "LatencyCase":
        """The case without lengths that do not fit this context; None is any."""
        if context is None:
            return self
        longest = max(1, context - self.output_len)
        fitting = tuple(length for length in self.input_lens if length <= longest)
        return replace(self, input_lens=fitting or (longest,))

    def settings(self, settings: EngineSettings) -> EngineSettings:
        """Those of an engine that holds the batch, and computes every prompt anew."""
        longest = max(self.input_lens) + self.output_len
        return replace(
            settings,
            max_num_seqs=self.batch_size,
            max_context=max(longest, CONTEXT),
            enable_prefix_caching=False,
        )


@dataclass(frozen=True)
class LatencyResult:
    """What a row came to: records of its lengths, then of its fits; or why it does not count.

    line: ITL over two or more lengths. curve: TTFT over three or more. latencies_s: of each length
    the seconds of its batches, where it ran here.
    """

    row: EngineRow
    records: tuple[Measurement, ...] = ()
    line: Line | None = None
    curve: Quadratic | None = None
    failure: str | None = None
    latencies_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def of_records(cls, row: EngineRow, records: Sequence[Measurement]) -> "LatencyResult":
        """The result of another run, from its records of lengths in their order."""
        line = fit_itl(records) if len(records) > 1 else None
        curve = fit_ttft(records) if len(records) > 2 else None
        return cls(row, tuple(records), line, curve)


def run_latency(
    subject: Subject,
    rows: Sequence[EngineRow],
    case: LatencyCase,
    settings: EngineSettings,
    *,
    command: str,
    baseline: LatencyResult | None = None,
    on_row: Callable[[LatencyResult], None] = lambda result: None,
    on_run: Progress = lambda what: None,
) -> list[LatencyResult]:
    """Time all rows; the first is what the others are compared with, and raises if it is wrong.

    Another row that is wrong or cannot run has a failure and no records. baseline: what all rows
    are compared with, if it has run before, at the same lengths. on_row is told of each row that
    is done, on_run of each batch.
    """
    settings = case.settings(settings)
    results: list[LatencyResult] = []
    for row in rows:
        try:
            result = _run_row(subject, row, case, settings, command, baseline, on_run)
        except OctavoError as error:
            if baseline is None or isinstance(error, ConfigError):
                raise
            result = LatencyResult(row, failure=str(error))
        baseline = baseline or result
        results.append(result)
        on_row(result)
    return results


def _run_row(
    subject: Subject,
    row: EngineRow,
    case: LatencyCase,
    settings: EngineSettings,
    command: str,
    baseline: LatencyResult | None,
    on_run: Progress,
) -> LatencyResult:
    plain_error = None
    if baseline is not None and baseline.row.is_plain:
        plain_error = baseline.records[0].values["relative_rms"]
    errors = check_row(subject, row, settings, plain_error)
    with open_engine(subject, row, settings) as engine:
        engine.warm_up()
        about = {**subject.about, **row.about, **case.about, **engine_about(engine)}
        times = {
            length: _run_length(subject, engine, row, case, length, on_run)
            for length in case.input_lens
        }
    machine = subject.machine()
    records = []
    for index, (length, found) in enumerate(times.items()):
        values = {**length_values(found), **errors}
        if baseline is not None:
            base = baseline.records[index].values
            for metric in ("ttft", "itl"):
                own = values[f"median_{metric}_ms"]
                values[f"{metric}_speedup"] = base[f"median_{metric}_ms"] / own
        records.append(
            Measurement(
                op="latency",
                impl="octavo",
                case={**about, "input_len": length},
                values=values,
                machine=machine,
                command=command,
                baseline=None if baseline is None else baseline.row.name,
            )
        )
    result = LatencyResult.of_records(row, records)
    fits = _fit_records(result, baseline, {**about, "input_lens": ",".join(map(str, times))})
    seconds = {length: tuple(map(_batch_s, batches)) for length, batches in times.items()}
    return replace(result, records=(*records, *fits), latencies_s=seconds)


def _fit_records(
    result: LatencyResult, baseline: LatencyResult | None, case: Mapping[str, Scalar]
) -> list[Measurement]:
    """The records of a row's line and curve, of those that it has."""
    found = []
    if result.line is not None:
        values = line_values(result.line, None if baseline is None else baseline.line)
        found.append(replace(result.records[0], op="latency_fit", case=case, values=values))
    if result.curve is not None:
        values = curve_values(result.curve, None if baseline is None else baseline.curve)
        found.append(replace(result.records[0], op="ttft_fit", case=case, values=values))
    return found


def _run_length(
    subject: Subject,
    engine: Engine,
    row: EngineRow,
    case: LatencyCase,
    length: int,
    on_run: Progress,
) -> list[list[RequestTimes]]:
    """The times of every batch of a length, without those of the warm-ups."""
    prompts = case.workload(length).draw(subject.vocab_size)
    short = [replace(prompt, output_len=min(WARMUP_LEN, case.output_len)) for prompt in prompts]
    batches = []
    for number in range(case.num_warmups + case.num_iters):
        on_run(f"{row.name}, {length:,} tokens")
        is_warmup = number < case.num_warmups
        times, _ = serve_prompts(engine, short if is_warmup else prompts)
        raise_failed(times)
        if not is_warmup:
            _decoding_s(times)  # before more time goes into it
            batches.append(times)
    return batches


def length_values(batches: Sequence[Sequence[RequestTimes]]) -> dict[str, float]:
    """Time to the first token and between tokens, of all batches of a length.

    Time between tokens is that while the whole batch decodes: before, steps compute prompts as
    well, and after it they are those of fewer sequences.
    """
    ttfts, itls, latencies = [], [], []
    for batch in batches:
        first_s, last_s = _decoding_s(batch)
        for times in batch:
            ttfts.append(times.ttft_s)
            latencies.append(times.latency_s)
            gaps = zip(times.parts_s, times.parts_s[1:], strict=False)
            itls += [end - start for start, end in gaps if start >= first_s and end <= last_s]
    return {
        **statistics_ms("ttft", ttfts, PERCENTILES),
        **statistics_ms("itl", itls, PERCENTILES),
        **statistics_ms("e2el", latencies, BATCH_PERCENTILES),
        "avg_latency": sum(map(_batch_s, batches)) / len(batches),  # vLLM's, in seconds
        "num_ttft_samples": len(ttfts),
        "num_itl_samples": len(itls),
    }


def _decoding_s(batch: Sequence[RequestTimes]) -> tuple[float, float]:
    """From when to when all sequences of a batch decode; raises if they never do."""
    first_s = max(times.parts_s[0] for times in batch)
    last_s = min(times.parts_s[-1] for times in batch)
    if last_s <= first_s:
        raise ConfigError(
            f"expected {len(batch)} sequences at once after their prompts of {batch[0].input_len} "
            "tokens, got one that had ended before another began: use a larger output_len or "
            "max_num_batched_tokens, more pages, or a smaller batch"
        )
    return first_s, last_s


def _batch_s(batch: Sequence[RequestTimes]) -> float:
    """From the first request of a batch to its last token."""
    return max(times.parts_s[-1] for times in batch) - min(times.start_s for times in batch)


def vllm_result(result: LatencyResult, input_len: int) -> dict[str, Any]:
    """The JSON document of vLLM's `bench latency`, of one row and length; times in seconds."""
    seconds = result.latencies_s[input_len]
    percentiles = np.percentile(seconds, BATCH_PERCENTILES).tolist()
    return {
        "model_id": str(result.records[0].case["model"]),
        "avg_latency": float(np.mean(seconds)),
        "latencies": list(seconds),
        "percentiles": dict(zip(map(str, BATCH_PERCENTILES), percentiles, strict=True)),
    }
