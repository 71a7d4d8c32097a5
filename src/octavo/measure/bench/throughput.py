"""Many requests in the engine, at once or so many at a time: tokens per second, and their latency.

The load is that of `octavo bench serve`, and so are the fields; no HTTP is between.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.errors import OctavoError
from octavo.measure.bench.cases import ThroughputCase
from octavo.measure.bench.engine import Subject
from octavo.measure.bench.engine_run import RowResult, RowRun, run_rows, serve_prompts, shortened
from octavo.measure.bench.request_times import summarize
from octavo.measure.records import Measurement
from octavo.measure.rows import Row
from octavo.serving.engine.settings import EngineSettings

PERCENTILES = (10, 90, 99)
MAX_WARM_UPS = 8
# Values that a table compares, and what is better: more, or less.
GAINS = {"output_throughput": True, "median_ttft_ms": False, "median_itl_ms": False}


def run_throughput(
    subject: Subject,
    rows: Sequence[Row],
    case: ThroughputCase,
    settings: EngineSettings,
    *,
    command: str,
    baseline: RowResult | None = None,
    on_row: Callable[[RowResult], None] = lambda result: None,
    on_token: Callable[[str], None] = lambda what: None,
) -> list[RowResult]:
    """Serve the load with each row, as `run_rows` does; a row that fails a request is a failure.

    on_token is told of each token.
    """

    def measure(run: RowRun) -> RowResult:
        prompts = case.workload.draw(subject.vocab_size)
        engine, name, limit = run.engine, run.row.name, case.max_concurrency
        num_warm_ups = case.num_warmups
        if num_warm_ups is None:
            num_warm_ups = min(limit or MAX_WARM_UPS, MAX_WARM_UPS)
        if short := shortened(prompts[:num_warm_ups]):
            serve_prompts(engine, short, max_concurrency=limit)
        before = engine.stats().num_preemptions
        times, duration_s = serve_prompts(
            engine, prompts, max_concurrency=limit, on_token=lambda: on_token(name)
        )
        num_preemptions = engine.stats().num_preemptions - before
        if failed := [one.error for one in times if one.error is not None]:
            raise OctavoError(f"{name}: {len(failed)} requests failed: {failed[0]}")
        values = summarize(times, duration_s, PERCENTILES)
        values |= {"num_preemptions": num_preemptions, **run.errors}
        if run.baseline is not None:
            values |= _gains(values, run.baseline.records[0].values)
        max_num_seqs = engine.settings.max_num_seqs
        return RowResult(run.row, (run.record("throughput", values, max_num_seqs=max_num_seqs),))

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


def vllm_result(record: Measurement) -> dict[str, Any]:
    """The JSON document of vLLM's `bench throughput`, of a row."""
    values = record.values
    num_tokens = values["total_input_tokens"] + values["total_output_tokens"]
    return {
        "model_id": str(record.case["model"]),
        "elapsed_time": values["duration"],
        "num_requests": int(values["completed"]),
        "total_num_tokens": int(num_tokens),
        "requests_per_second": values["request_throughput"],
        "tokens_per_second": values["total_token_throughput"],
    }


def _gains(values: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
    """How many times as good a row is as the first one: output_throughput_gain and so on."""
    found = {}
    for name, is_more_better in GAINS.items():
        ratio = values[name] / first[name]
        found[f"{name.removesuffix('_ms')}_gain"] = ratio if is_more_better else 1 / ratio
    return found
