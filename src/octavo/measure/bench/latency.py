"""One batch by itself in the engine: time to the first token, and between tokens, by context.

Rows run one after the other with the same model and the same prompts. What a token costs after a
longer context is a straight line: its intercept is the weights and everything else, its slope the
keys and values that are read. What a prompt costs has a square term as well: attention.

Records of fits have each term with its 95 % interval as two more values, with low and high before
the unit. They are absent where nothing is known of it: as many lengths as terms.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.errors import ConfigError, OctavoError
from octavo.measure.bench.cases import LatencyCase
from octavo.measure.bench.engine import Subject
from octavo.measure.bench.engine_run import RowResult, RowRun, run_rows, serve_prompts, shortened
from octavo.measure.bench.request_times import RequestTimes, statistics_ms
from octavo.measure.fit import (
    TERMS,
    Line,
    Quadratic,
    break_even,
    curve_break_even,
    slope_ratio,
    square_ratio,
)
from octavo.measure.records import Measurement
from octavo.measure.regression import Interval
from octavo.measure.rows import Row
from octavo.serving.engine.settings import EngineSettings

PERCENTILES = (10, 20, 80, 90, 99)
# Those that vLLM's command of this name has of whole batches.
BATCH_PERCENTILES = (10, 25, 50, 75, 90, 99)
# Of the terms of TTFT: what follows the name, and how many of it are in one of the fit's.
CURVE_UNITS = {
    "constant": ("ms", 1.0),
    "linear": ("ms_per_1k_tokens", 1e3),
    "square": ("ms_per_1k_tokens_squared", 1e6),
}
Progress = Callable[[str], None]


def run_latency(
    subject: Subject,
    rows: Sequence[Row],
    case: LatencyCase,
    settings: EngineSettings,
    *,
    command: str,
    baseline: RowResult | None = None,
    on_row: Callable[[RowResult], None] = lambda result: None,
    on_run: Progress = lambda what: None,
) -> list[RowResult]:
    """Time all rows, as `run_rows` does; records of each row's lengths come first, then its fits.

    baseline: what all rows are compared with, if it has run before, at the same lengths. on_run is
    told of each batch.
    """

    def measure(run: RowRun) -> RowResult:
        times = {length: _run_length(run, case, length, on_run) for length in case.input_lens}
        records = []
        for index, (length, found) in enumerate(times.items()):
            values = {**length_values(found), **run.errors}
            if run.baseline is not None:
                base = run.baseline.records[index].values
                for metric in ("ttft", "itl"):
                    own = values[f"median_{metric}_ms"]
                    values[f"{metric}_speedup"] = base[f"median_{metric}_ms"] / own
            records.append(run.record("latency", values, input_len=length))
        seconds = {length: tuple(map(_batch_s, batches)) for length, batches in times.items()}
        result = RowResult(run.row, tuple(records), latencies_s=seconds)
        return replace(result, records=(*records, *_fit_records(run, result)))

    return run_rows(
        subject,
        rows,
        case,
        settings,
        measure,
        command=command,
        baseline=baseline,
        on_row=on_row,
    )


def _fit_records(run: RowRun, result: RowResult) -> list[Measurement]:
    """The records of a row's line and curve, of those that it has."""
    base = run.baseline
    lengths = ",".join(map(str, result.latencies_s))
    found = []
    if result.line is not None:
        values = line_values(result.line, None if base is None else base.line)
        found.append(run.record("latency_fit", values, input_lens=lengths))
    if result.curve is not None:
        values = curve_values(result.curve, None if base is None else base.curve)
        found.append(run.record("ttft_fit", values, input_lens=lengths))
    return found


def _run_length(
    run: RowRun, case: LatencyCase, length: int, on_run: Progress
) -> list[list[RequestTimes]]:
    """The times of every batch of a length, without those of the warm-ups."""
    prompts = case.workload(length).draw(run.subject.vocab_size)
    batches = []
    for number in range(case.num_warmups + case.num_iters):
        on_run(f"{run.row.name}, {length:,} tokens")
        is_warm_up = number < case.num_warmups
        times, _ = serve_prompts(run.engine, shortened(prompts) if is_warm_up else prompts)
        for index, request in enumerate(times):
            if request.error is not None:
                raise OctavoError(f"request {index} failed: {request.error}")
        if not is_warm_up:
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


def line_values(line: Line, first: Line | None) -> dict[str, float]:
    """A line of the time between tokens over the context, beside that of the first row."""
    slope_unit = "us_per_1k_tokens"
    values = {
        "itl_intercept_ms": line.intercept,
        **_ends("itl_intercept", line.intercept_interval, "ms"),
        f"itl_slope_{slope_unit}": line.slope * 1e6,
        **_ends("itl_slope", line.slope_interval, slope_unit, 1e6),
        "itl_residual_ms": line.residual,
    }
    if first is None:
        return values
    found, ratio = break_even(line, first), slope_ratio(line, first)
    values |= {
        "intercept_gap_ms": line.intercept - first.intercept,
        "slope_ratio": ratio.value,
        **_ends("slope_ratio", ratio.interval),
        "break_even_tokens": found.tokens,
        **_ends("break_even", found.interval, "tokens"),
    }
    if found.up_to is not None:
        values["faster_up_to_tokens"] = found.up_to
    return values


def curve_values(curve: Quadratic, first: Quadratic | None) -> dict[str, float]:
    """A curve of the time to the first token over the input, beside that of the first row.

    Where they cross is said of curves that were fitted, between the lengths that both have.
    """
    values: dict[str, float] = {}
    for term in TERMS:
        unit, factor = CURVE_UNITS[term]
        values[f"ttft_{term}_{unit}"] = getattr(curve, term) * factor
        values |= _ends(f"ttft_{term}", curve.interval(term), unit, factor)
    values["ttft_residual_ms"] = curve.residual
    if first is None:
        return values
    ratio = square_ratio(curve, first)
    values |= {"square_ratio": ratio.value, **_ends("square_ratio", ratio.interval)}
    if curve.fit is None or first.fit is None:
        return values
    found = curve_break_even(curve, first)
    values |= {
        "ttft_break_even_tokens": found.tokens,
        **_ends("ttft_break_even", found.interval, "tokens"),
    }
    if found.up_to is not None:
        values["ttft_faster_up_to_tokens"] = found.up_to
    return values


def _ends(
    name: str, interval: Interval | None, unit: str = "", factor: float = 1.0
) -> dict[str, float]:
    """The two values of an interval; none, if there is none."""
    if interval is None:
        return {}
    after = f"_{unit}" if unit else ""
    ends = {"low": interval.low, "high": interval.high}
    return {f"{name}_{end}{after}": value * factor for end, value in ends.items()}


def vllm_result(result: RowResult, input_len: int) -> dict[str, Any]:
    """The JSON document of vLLM's `bench latency`, of one row and length; times in seconds."""
    seconds = result.latencies_s[input_len]
    percentiles = np.percentile(seconds, BATCH_PERCENTILES).tolist()
    return {
        "model_id": str(result.records[0].case["model"]),
        "avg_latency": float(np.mean(seconds)),
        "latencies": list(seconds),
        "percentiles": dict(zip(map(str, BATCH_PERCENTILES), percentiles, strict=True)),
    }
