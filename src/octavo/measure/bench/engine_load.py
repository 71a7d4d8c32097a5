"""Loads in this process's engine: one batch by itself (latency), or many requests (throughput).

What a token costs after a longer context is a straight line: its intercept is the weights and
everything else, its slope the keys and values that are read. What a prompt costs has a square term
as well: attention. Records of these fits have each term with the ends of its 95 % interval, low and
high, unless there are only as many lengths as terms. The load of throughput is that of `octavo
bench serve`, and so are the fields.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

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
from octavo.measure.bench.requests import RequestTimes, statistics_ms, summarize
from octavo.measure.bench.timing import machine_of
from octavo.measure.fit import Interval, Line, Quadratic
from octavo.measure.records import Measurement, utc_now
from octavo.measure.report import latency
from octavo.measure.report.tables import Table, from_records
from octavo.measure.rows import Row
from octavo.measure.run import Outcome, Participant, Records, Values, Workload, run_workload
from octavo.serving.engine.engine import Engine
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


@dataclass(frozen=True)
class RowRun:
    """A row whose engine is open and has passed its check; errors: what the check found."""

    row: Row
    engine: Engine
    errors: Values
    vocab_size: int
    on_step: OnStep

    def serve_batches(self, case: LatencyCase, length: int) -> list[list[RequestTimes]]:
        """One batch of a length, so many times."""
        prompts = case.workload(length).draw(self.vocab_size)
        batches = []
        for number in range(case.num_warmups + case.num_iters):
            self.on_step(f"{self.row.name}, {length:,} tokens")
            is_warm_up = number < case.num_warmups
            times, _ = serve_prompts(self.engine, shortened(prompts) if is_warm_up else prompts)
            self._check_served(times)
            if not is_warm_up:
                _decoding_s(times)  # before more time goes into it
                batches.append(times)
        return batches

    def serve_all(self, case: ThroughputCase) -> Outcome:
        """All requests of the load."""
        engine, limit = self.engine, case.max_concurrency
        prompts, num_warm_ups = case.draw(self.vocab_size), case.num_warmups
        if num_warm_ups is None:
            num_warm_ups = min(limit or MAX_WARM_UPS, MAX_WARM_UPS)
        if short := shortened(prompts[:num_warm_ups]):
            serve_prompts(engine, short, max_concurrency=limit)
        before = engine.stats().num_preemptions
        on_token = partial(self.on_step, f"{self.row.name}, tokens")
        times, duration_s = serve_prompts(engine, prompts, max_concurrency=limit, on_token=on_token)
        num_preemptions = engine.stats().num_preemptions - before
        self._check_served(times)
        values = {**summarize(times, duration_s, (10, 90, 99)), "num_preemptions": num_preemptions}
        about = {**engine_about(engine), "max_num_seqs": engine.settings.max_num_seqs}
        return Outcome({**values, **self.errors}, about)

    def _check_served(self, times: Sequence[RequestTimes]) -> None:
        if failed := [one.error for one in times if one.error is not None]:
            raise OctavoError(f"{self.row.name}: {len(failed)} requests failed: {failed[0]}")


def run_load(
    subject: Subject,
    rows: Sequence[Row],
    case: LatencyCase | ThroughputCase,
    settings: EngineSettings,
    *,
    command: str,
    baseline: Sequence[Measurement] = (),
    records: Records | None = None,
    on_step: OnStep = lambda what: None,
) -> LoadResult:
    """Check and measure all rows under a load; the first is what the others are compared with.

    It raises if it is wrong. Another row that is wrong, cannot run or fails a request has a failure
    and no records. Every prompt is computed anew. Records of latency are those of a row's lengths,
    then its fits. baseline: what all rows are compared with, if it has run before.
    """
    if isinstance(case, LatencyCase):
        num_seqs = case.batch_size
    else:
        limit = settings.max_num_seqs
        num_seqs = min(case.max_concurrency or limit, limit, case.num_prompts)
    settings = replace(
        settings,
        max_num_seqs=num_seqs,
        max_context=max(case.max_context, CONTEXT),
        enable_prefix_caching=False,
    )
    is_plain = bool(baseline) and baseline[0].case["kv_cache_dtype"] == "auto"
    plain_error = baseline[0].values["relative_rms"] if is_plain else None
    latencies_s: dict[tuple[str, int], tuple[float, ...]] = {}
    failures: dict[str, str] = {}

    @contextmanager
    def opened(row: Row) -> Iterator[RowRun]:
        nonlocal plain_error
        errors = check_row(subject, row, settings, plain_error)
        if row is rows[0] and row.kv_cache is None and not baseline:
            plain_error = errors["relative_rms"]
        with open_engine(subject, row, settings) as engine:
            engine.warm_up()
            yield RowRun(row, engine, errors, subject.vocab_size, on_step)

    def measure(run: RowRun, length: int) -> Outcome:
        if isinstance(case, ThroughputCase):
            return run.serve_all(case)
        batches = run.serve_batches(case, length)
        latencies_s[run.row.name, length] = tuple(map(_batch_s, batches))
        return Outcome({**length_values(batches), **run.errors}, engine_about(run.engine))

    def compare(own: Values, first: Values) -> Values:
        """How many times as good a row is as the first one."""
        return {
            gain: own[name] / first[name] if is_more_better else first[name] / own[name]
            for gain, (name, is_more_better) in COMPARED[op].items()
        }

    participants = [
        Participant(
            name=row.name,
            impl="octavo",
            about={**subject.about, **row_about(row), **case.about},
            machine=machine_of(subject.device),
            open=partial(opened, row),
        )
        for row in rows
    ]
    lengths = case.input_lens if isinstance(case, LatencyCase) else ()
    op = "latency" if lengths else "throughput"
    workload = Workload(
        op=op,
        command=command,
        cells={length: {"input_len": length} for length in lengths} or {0: {}},
        measure=measure,
        compare=compare,
        derive=_fits,
        row_key="row",
    )
    found = run_workload(
        participants,
        workload,
        records,
        baseline=baseline,
        on_failure=lambda name, error: failures.update({name: str(error)}),
    )
    return LoadResult(tuple(found), failures, latencies_s)


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


def told(records: Sequence[Measurement]) -> Iterator[str | Table]:
    """What was measured, in tables and sentences: of latency or of throughput."""
    first = records[0]
    yield f"{first.case['model']}, {first.case['dtype']}: {first.machine}"
    yield from _told_latency(records) if first.op == "latency" else _told_throughput(records)


def _told_latency(records: Sequence[Measurement]) -> Iterator[str | Table]:
    case = records[0].case
    sizes = f"{case['batch_size']} at once, {case['output_len']} tokens out"
    lengths = [record for record in records if record.op == "latency"]
    lengths.sort(key=lambda record: int(record.case["input_len"]))
    times = ["median_{}_ms", "mean_{}_ms", "p20_{}_ms", "p80_{}_ms"]
    for metric, what, columns in (
        ("ttft", "To the first token", [*times, "{}_speedup", "relative_rms"]),
        ("itl", "Between tokens", [*times, "p99_{}_ms", "{}_speedup"]),
    ):
        names = ("input_len", "row", *(column.format(metric) for column in columns))
        yield from_records(lengths, caption=f"{what}: {sizes}", columns=names)
    for section in latency.latency_sections(records):
        yield from section.tables
        yield from section.paragraphs[1:]
    ends = {
        latency.ITL: "",
        latency.TTFT: ", by the curves between the shortest and the longest input",
    }
    for row in latency.rows_of(lengths):
        for of, end in ends.items():
            if row.baseline is not None and (found := row.break_even(of)) is not None:
                yield f"{of.name.upper()}: {row.name} is {found} than {row.baseline.name}{end}"


def _told_throughput(records: Sequence[Measurement]) -> Iterator[str | Table]:
    case = records[0].case
    caption = (
        f"{case['num_prompts']} requests, {case.get('max_concurrency', 'all')} at once, "
        f"{case['input_len']} tokens in and {case['output_len']} out, "
        f"± {100 * float(case['range_ratio']):g} %"
    )
    columns: tuple[str, ...] = ("row", "duration", "request_throughput", "output_throughput")
    columns += ("output_throughput_gain", "total_token_throughput", "relative_rms")
    yield from_records(records, caption=caption, columns=columns)
    times = [
        name
        for metric in ("ttft", "itl")
        for name in (f"median_{metric}_ms", f"p99_{metric}_ms", f"median_{metric}_gain")
    ]
    yield from_records(records, caption="Latency", columns=("row", *times, "median_e2el_ms"))
    for record in records:
        values = record.values
        yield (
            f"{record.case['row']}: throughput {values['request_throughput']:.2f} requests/s, "
            f"{values['total_token_throughput']:.2f} total tokens/s, "
            f"{values['output_throughput']:.2f} output tokens/s"
        )


def vllm_documents(result: LoadResult) -> dict[tuple[str | int, ...], dict[str, Any]]:
    """The JSON documents of vLLM's `bench latency` or `bench throughput`.

    By row and input length, or by row alone.
    """
    documents: dict[tuple[str | int, ...], dict[str, Any]] = {}
    for record in result.records if not result.latencies_s else ():
        values = record.values
        num_tokens = values["total_input_tokens"] + values["total_output_tokens"]
        documents[(str(record.case["row"]),)] = {
            "model_id": str(record.case["model"]),
            "elapsed_time": values["duration"],
            "num_requests": int(values["completed"]),
            "total_num_tokens": int(num_tokens),
            "requests_per_second": values["request_throughput"],
            "tokens_per_second": values["total_token_throughput"],
        }
    for (row, length), seconds in result.latencies_s.items():
        if row not in result.failures:
            documents[row, length] = {
                "model_id": str(result.records[0].case["model"]),
                "avg_latency": float(np.mean(seconds)),
                "latencies": list(seconds),
                "percentiles": {
                    f"{p}": float(np.percentile(seconds, p)) for p in BATCH_PERCENTILES
                },
            }
    return documents
