"""Loads in this process's engine: one batch by itself (latency), or many requests (throughput).

What a token costs after a longer context is a straight line: its intercept is the weights and
everything else, its slope the keys and values that are read. What a prompt costs has a square term
as well: attention. Records of these fits have each term with the ends of its 95 % interval, low and
high, unless there are only as many lengths as terms. The load of throughput is that of `octavo
bench serve`, and so are the fields.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from octavo.errors import OctavoError
from octavo.measure import fit
from octavo.measure.bench.cases import LatencyCase, ThroughputCase
from octavo.measure.bench.engine import (
    CONTEXT,
    Subject,
    check_row,
    engine_about,
    open_engine,
    row_about,
    serve_prompts,
    shortened,
)
from octavo.measure.bench.expect import expect
from octavo.measure.bench.requests import Prompt, RequestTimes, statistics_ms, summarize
from octavo.measure.bench.timing import machine_of
from octavo.measure.bench.vllm_engine import (
    Installation,
    check_vllm,
    open_vllm,
    twin_rows,
    weights_for_vllm,
)
from octavo.measure.fit import Interval, Line, Quadratic
from octavo.measure.records import Measurement, Scalar, utc_now
from octavo.measure.report import latency
from octavo.measure.rows import Row
from octavo.measure.run import Outcome, Participant, Records, Values, Workload, run_workload
from octavo.serving.engine.settings import EngineSettings

MAX_WARM_UPS = 8
PERCENTILES = (10, 20, 80, 90, 99)
# Those that vLLM's `bench latency` has of whole batches.
BATCH_PERCENTILES = (10, 25, 50, 75, 90, 99)
# Of the terms of fits: what follows the name, and how many of it are in one of the fit's.
UNITS = {
    "intercept": ("_ms", 1.0),
    "slope": ("_us_per_1k_tokens", 1e6),
    "constant": ("_ms", 1.0),
    "linear": ("_ms_per_1k_tokens", 1e3),
    "square": ("_ms_per_1k_tokens_squared", 1e6),
}
FITS = {"latency_fit": latency.ITL, "ttft_fit": latency.TTFT}
# What a row is compared by with the first one: the value that says how many times as good it is,
# what it is made of, and whether more of that is better.
COMPARED = {
    "latency": {"ttft_speedup": ("median_ttft_ms", False), "itl_speedup": ("median_itl_ms", False)},
    "throughput": {
        "output_throughput_gain": ("output_throughput", True),
        "median_ttft_gain": ("median_ttft_ms", False),
        "median_itl_gain": ("median_itl_ms", False),
    },
}
Fit = Line | Quadratic
OnStep = Callable[[str], None]  # told which row's batch begins, or which row has a token more


@dataclass(frozen=True)
class LoadResult:
    """What a load came to: the records of rows that count, and why other rows do not.

    latencies_s: of latency, by row and input length, the seconds of the batches.
    """

    records: tuple[Measurement, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    latencies_s: Mapping[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)


class Serve(Protocol):
    """Serve prompts, at most so many at once: their times, and the seconds of them all."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        max_concurrency: int | None = None,
        on_token: Callable[[], None] = lambda: None,
    ) -> tuple[list[RequestTimes], float]: ...


@dataclass(frozen=True)
class RowRun:
    """A row whose engine is open and has passed its check.

    about: what records say of the engine. counts: what it has counted so far. errors: what the
    check found.
    """

    name: str
    serve: Serve
    about: Mapping[str, Scalar]
    counts: Callable[[], Values]
    errors: Values
    vocab_size: int
    on_step: OnStep

    def serve_batches(self, case: LatencyCase, length: int) -> list[list[RequestTimes]]:
        """One batch of a length, so many times."""
        prompts = case.workload(length).draw(self.vocab_size)
        batches = []
        for number in range(case.num_warmups + case.num_iters):
            self.on_step(f"{self.name}, {length:,} tokens")
            is_warm_up = number < case.num_warmups
            times, _ = self.serve(shortened(prompts) if is_warm_up else prompts)
            self._check_served(times)
            if not is_warm_up:
                _decoding_s(times)  # before more time goes into it
                batches.append(times)
        return batches

    def serve_all(self, case: ThroughputCase, max_num_seqs: int) -> Outcome:
        """All requests of the load."""
        limit = case.max_concurrency
        prompts, num_warm_ups = case.draw(self.vocab_size), case.num_warmups
        if num_warm_ups is None:
            num_warm_ups = min(limit or MAX_WARM_UPS, MAX_WARM_UPS)
        if short := shortened(prompts[:num_warm_ups]):
            self.serve(short, max_concurrency=limit)
        before = self.counts()
        on_token = partial(self.on_step, f"{self.name}, tokens")
        times, duration_s = self.serve(prompts, max_concurrency=limit, on_token=on_token)
        counts = {name: count - before[name] for name, count in self.counts().items()}
        self._check_served(times)
        values = {**summarize(times, duration_s, (10, 90, 99)), **counts}
        return Outcome({**values, **self.errors}, {**self.about, "max_num_seqs": max_num_seqs})

    def _check_served(self, times: Sequence[RequestTimes]) -> None:
        if failed := [one.error for one in times if one.error is not None]:
            raise OctavoError(f"{self.name}: {len(failed)} requests failed: {failed[0]}")


class Load:
    """A load on a model: opens the engine of each row, checks it, and measures.

    vllm: runs rows of `twin_rows`. plain_error: the check's error of a first row that is not
    quantized. latencies_s: of latency, by row and input length, the seconds of the batches.
    """

    def __init__(
        self,
        subject: Subject,
        case: LatencyCase | ThroughputCase,
        settings: EngineSettings,
        *,
        vllm: Installation | None = None,
        on_step: OnStep = lambda what: None,
    ) -> None:
        limit, num_seqs = settings.max_num_seqs, 0
        if isinstance(case, LatencyCase):
            num_seqs = case.batch_size
        else:
            num_seqs = min(case.max_concurrency or limit, limit, case.num_prompts)
        self.subject, self.case, self.vllm, self.on_step = subject, case, vllm, on_step
        self.settings = replace(
            settings,
            max_num_seqs=num_seqs,
            max_context=max(case.max_context, CONTEXT),
            enable_prefix_caching=False,
        )
        self.op = "latency" if isinstance(case, LatencyCase) else "throughput"
        self.plain_error: float | None = None
        self.linear_rounding = 0.0
        self.latencies_s: dict[tuple[str, int], tuple[float, ...]] = {}
        self.ending = ExitStack()

    @contextmanager
    def open_octavo(self, row: Row, *, is_plain: bool) -> Iterator[RowRun]:
        """Our engine with this row; is_plain: other rows may be so many times as far off."""
        errors = check_row(self.subject, row, self.settings, self.plain_error)
        if is_plain:
            self.plain_error = errors["relative_rms"]
        self.linear_rounding = max(self.linear_rounding, errors.get("linear_rounding", 0.0))
        with open_engine(self.subject, row, self.settings) as engine:
            engine.warm_up()
            yield RowRun(
                row.name,
                partial(serve_prompts, engine),
                engine_about(engine),
                lambda: {"num_preemptions": engine.stats().num_preemptions},
                errors,
                self.subject.vocab_size,
                self.on_step,
            )

    @contextmanager
    def open_vllm(self, row: Row) -> Iterator[RowRun]:
        """vLLM's engine with its kind of this row."""
        assert self.vllm is not None
        with open_vllm(self.vllm, self.subject, self._weights, row, self.settings) as engine:
            errors = check_vllm(
                self.subject,
                row,
                engine,
                self.settings,
                plain_error=self.plain_error,
                linear_rounding=self.linear_rounding,
            )
            vocab_size = self.subject.vocab_size
            about, counts = engine.about, dict[str, float]
            yield RowRun(row.name, engine.serve, about, counts, errors, vocab_size, self.on_step)

    @cached_property
    def _weights(self) -> str:
        return self.ending.enter_context(weights_for_vllm(self.subject))

    def participants(self, rows: Sequence[Row], *, has_baseline: bool) -> list[Participant[RowRun]]:
        """Our engine with each row, then vLLM with each kind of row."""
        first = None if has_baseline or rows[0].kv_cache is not None else rows[0]
        opened = [
            (row, "octavo", partial(self.open_octavo, row, is_plain=row is first)) for row in rows
        ]
        if self.vllm is not None:
            twins = twin_rows(rows, has_plug_in=self.vllm.has_plug_in)
            opened += [(row, "vllm", partial(self.open_vllm, row)) for row in twins]
        return [
            Participant(
                name=row.name,
                impl=impl,
                about={**self.subject.about, **row_about(row), **self.case.about},
                machine=machine_of(self.subject.device),
                open=own,
            )
            for row, impl, own in opened
        ]

    def measure(self, run: RowRun, length: int) -> Outcome:
        """All requests of throughput, or the batches of a length."""
        if isinstance(self.case, ThroughputCase):
            return run.serve_all(self.case, self.settings.max_num_seqs)
        batches = run.serve_batches(self.case, length)
        self.latencies_s[run.name, length] = tuple(map(_batch_s, batches))
        return Outcome({**length_values(batches), **run.errors}, run.about)

    def compare(self, own: Values, first: Values) -> Values:
        """How many times as good a row is as the first one."""
        return {
            gain: own[name] / first[name] if is_more_better else first[name] / own[name]
            for gain, (name, is_more_better) in COMPARED[self.op].items()
        }


def run_load(
    subject: Subject,
    rows: Sequence[Row],
    case: LatencyCase | ThroughputCase,
    settings: EngineSettings,
    *,
    command: str,
    baseline: Sequence[Measurement] = (),
    records: Records | None = None,
    vllm: Installation | None = None,
    on_step: OnStep = lambda what: None,
) -> LoadResult:
    """Check and measure all rows under a load; the first is what the others are compared with.

    It raises if it is wrong. Another row that is wrong, cannot run or fails a request has a failure
    and no records. Every prompt is computed anew. Records of latency are those of a row's lengths,
    then its fits. baseline: what all rows are compared with, if it has run before. vllm: runs
    beside our engine, as `twin_rows` says.
    """
    load = Load(subject, case, settings, vllm=vllm, on_step=on_step)
    if baseline and baseline[0].case["kv_cache_dtype"] == "auto":
        load.plain_error = baseline[0].values["relative_rms"]
    failures: dict[str, str] = {}
    lengths = case.input_lens if isinstance(case, LatencyCase) else ()
    workload = Workload(
        op=load.op,
        command=command,
        cells={length: {"input_len": length} for length in lengths} or {0: {}},
        measure=load.measure,
        compare=load.compare,
        derive=_fits,
        row_key="row",
    )
    with load.ending:
        found = run_workload(
            load.participants(rows, has_baseline=bool(baseline)),
            workload,
            records,
            baseline=baseline,
            on_failure=lambda name, error: failures.update({name: str(error)}),
        )
    return LoadResult(tuple(found), failures, load.latencies_s)


def _fits(own: list[Measurement], first: list[Measurement]) -> Iterator[Measurement]:
    """The records of a row's line and curve, with as many lengths as these take."""
    if own[0].op == "throughput":
        return
    about = dict(own[0].case)
    del about["input_len"]
    about["input_lens"] = ",".join(str(record.case["input_len"]) for record in own)
    for op, metric in FITS.items():
        if len(own) >= len(metric.scales):
            values = fit_values(metric, metric.fit(own), metric.fit(first) if first else None)
            yield replace(own[0], op=op, case=about, values=values, date=utc_now())


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
    expect(
        last_s > first_s,
        f"{len(batch)} sequences at once after their prompts of {batch[0].input_len} tokens",
        "one that had ended before another began: use a larger output_len or "
        "max_num_batched_tokens, more pages, or a smaller batch",
    )
    return first_s, last_s


def _batch_s(batch: Sequence[RequestTimes]) -> float:
    """From the first request of a batch to its last token."""
    return max(times.parts_s[-1] for times in batch) - min(times.start_s for times in batch)


def fit_values(metric: latency.Metric, own: Fit, first: Fit | None) -> dict[str, float]:
    """The line or the curve of a metric, beside that of the first row.

    Where curves cross is said of those that were fitted, between the lengths that both have.
    """
    name, is_line = metric.name, metric is latency.ITL
    values: dict[str, float] = {}
    for term, value in zip(own.TERMS, own.terms, strict=True):
        values |= _term(f"{name}_{term}", value, own.interval(term), *UNITS[term])
    values[f"{name}_residual_ms"] = own.residual
    if first is None:
        return values
    if is_line:
        values["intercept_gap_ms"] = own.terms[0] - first.terms[0]
    ratio = fit.last_term_ratio(own, first)
    values |= _term(f"{own.TERMS[-1]}_ratio", ratio.value, ratio.interval)
    if not is_line and None in (own.fit, first.fit):
        return values
    before, found = "" if is_line else f"{name}_", metric.break_even(own, first)
    values |= _term(f"{before}break_even", found.tokens, found.interval, "_tokens")
    if found.up_to is not None:
        values[f"{before}faster_up_to_tokens"] = found.up_to
    return values


def _term(
    name: str, value: float, interval: Interval | None, unit: str = "", factor: float = 1.0
) -> dict[str, float]:
    """A value, and the two ends of its interval where there is one."""
    found = {f"{name}{unit}": value * factor}
    if interval is not None:
        ends = {"low": interval.low, "high": interval.high}
        found |= {f"{name}_{end}{unit}": own * factor for end, own in ends.items()}
    return found
