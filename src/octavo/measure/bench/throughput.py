"""Many requests in the engine, at once or so many at a time: tokens per second, and their latency.

The load is that of `octavo bench serve`, and so are the fields; no HTTP is between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError, OctavoError
from octavo.measure.bench.engine_check import CONTEXT, check_row
from octavo.measure.bench.engine_load import serve_prompts
from octavo.measure.bench.engine_rows import EngineRow, Subject, engine_about, open_engine
from octavo.measure.bench.request_times import RandomPrompt, Workload, summarize
from octavo.measure.records import Measurement, Scalar
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.settings import EngineSettings

PERCENTILES = (10, 90, 99)
# Tokens of each answer before the clock starts.
WARMUP_LEN, MAX_WARMUPS = 8, 8
# Values that a table compares, and what is better: more, or less.
GAINS = {"output_throughput": True, "median_ttft_ms": False, "median_itl_ms": False}


@dataclass(frozen=True, kw_only=True)
class ThroughputCase:
    """A load, and how many of its requests are open at once; None is all of them.

    num_warmups: requests before, the first of the load with short answers; None is as many as are
    open at once, eight at most.
    """

    workload: Workload
    max_concurrency: int | None = None
    num_warmups: int | None = None

    def __post_init__(self) -> None:
        if (self.num_warmups or 0) < 0 or (
            self.max_concurrency is not None and self.max_concurrency < 1
        ):
            raise ConfigError(
                f"expected 0 or more warm-ups and 1 or more open requests, got {self.num_warmups} "
                f"and {self.max_concurrency}"
            )

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        about: dict[str, Scalar] = {
            "num_prompts": self.workload.num_prompts,
            "input_len": self.workload.input_len,
            "output_len": self.workload.output_len,
            "range_ratio": self.workload.range_ratio,
            "seed": self.workload.seed,
        }
        limit = self.max_concurrency
        return about if limit is None else {**about, "max_concurrency": limit}

    def settings(self, settings: EngineSettings) -> EngineSettings:
        """Those of an engine that holds the load, and computes every prompt anew."""
        open_at_once = min(self.max_concurrency or settings.max_num_seqs, settings.max_num_seqs)
        return replace(
            settings,
            max_num_seqs=min(open_at_once, self.workload.num_prompts),
            max_context=max(self.workload.max_context, CONTEXT),
            enable_prefix_caching=False,
        )


@dataclass(frozen=True)
class ThroughputResult:
    """What a row came to: its record, or why it does not count."""

    row: EngineRow
    record: Measurement | None = None
    failure: str | None = None

    @property
    def records(self) -> tuple[Measurement, ...]:
        """The record, if there is one."""
        return () if self.record is None else (self.record,)


def run_throughput(
    subject: Subject,
    rows: Sequence[EngineRow],
    case: ThroughputCase,
    settings: EngineSettings,
    *,
    command: str,
    baseline: ThroughputResult | None = None,
    on_row: Callable[[ThroughputResult], None] = lambda result: None,
    on_token: Callable[[str], None] = lambda what: None,
) -> list[ThroughputResult]:
    """Serve the load with each row; the first is what the others are compared with.

    The first raises if it is wrong; another row that is wrong, cannot run or fails a request has a
    failure and no record. baseline: what all rows are compared with, if it has run before. on_row
    is told of each row that is done, on_token of each token.
    """
    settings = case.settings(settings)
    results: list[ThroughputResult] = []
    for row in rows:
        try:
            result = _run_row(subject, row, case, settings, command, baseline, on_token)
        except OctavoError as error:
            if baseline is None or isinstance(error, ConfigError):
                raise
            result = ThroughputResult(row, failure=str(error))
        baseline = baseline or result
        results.append(result)
        on_row(result)
    return results


def _run_row(
    subject: Subject,
    row: EngineRow,
    case: ThroughputCase,
    settings: EngineSettings,
    command: str,
    first: ThroughputResult | None,
    on_token: Callable[[str], None],
) -> ThroughputResult:
    prompts = case.workload.draw(subject.vocab_size)
    baseline = None if first is None else first.record
    plain_error = None
    if first is not None and baseline is not None and first.row.is_plain:
        plain_error = baseline.values["relative_rms"]
    errors = check_row(subject, row, settings, plain_error)
    with open_engine(subject, row, settings) as engine:
        engine.warm_up()
        _warm_up(engine, case, prompts)
        before = engine.stats()
        times, duration_s = serve_prompts(
            engine,
            prompts,
            max_concurrency=case.max_concurrency,
            on_token=lambda: on_token(row.name),
        )
        num_preemptions = engine.stats().num_preemptions - before.num_preemptions
        about = {"max_num_seqs": settings.max_num_seqs, **engine_about(engine)}
    if failed := [one.error for one in times if one.error is not None]:
        raise OctavoError(f"{row.name}: {len(failed)} requests failed: {failed[0]}")
    values: dict[str, Any] = summarize(times, duration_s, PERCENTILES)
    values |= {"num_preemptions": num_preemptions, **errors}
    if baseline is not None:
        values |= _gains(values, baseline.values)
    record = Measurement(
        op="throughput",
        impl="octavo",
        case={**subject.about, **row.about, **case.about, **about},
        values=values,
        machine=subject.machine(),
        command=command,
        baseline=None if first is None else first.row.name,
    )
    return ThroughputResult(row, record)


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


def _warm_up(engine: Engine, case: ThroughputCase, prompts: Sequence[RandomPrompt]) -> None:
    num_warmups = case.num_warmups
    if num_warmups is None:
        num_warmups = min(case.max_concurrency or MAX_WARMUPS, MAX_WARMUPS)
    short = [
        replace(prompt, output_len=min(WARMUP_LEN, prompt.output_len))
        for prompt in prompts[:num_warmups]
    ]
    if short:
        serve_prompts(engine, short, max_concurrency=case.max_concurrency)


def _gains(values: dict[str, float], first: Any) -> dict[str, float]:
    """How many times as good a row is as the first one: output_throughput_gain and so on."""
    found = {}
    for name, is_more_better in GAINS.items():
        ratio = values[name] / first[name]
        found[f"{name.removesuffix('_ms')}_gain"] = ratio if is_more_better else 1 / ratio
    return found
