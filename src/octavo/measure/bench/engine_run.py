"""Rows × a load in the engine → records: every row checked first, then measured by itself."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from octavo.errors import ConfigError, OctavoError
from octavo.measure.bench.cases import LatencyCase, RandomPrompt, ThroughputCase
from octavo.measure.bench.engine import Subject, engine_about, open_engine, row_about
from octavo.measure.bench.engine_check import CONTEXT, check_row
from octavo.measure.bench.request_times import RequestTimes
from octavo.measure.fit import Line, Quadratic, fit_itl, fit_ttft
from octavo.measure.records import Measurement, Scalar
from octavo.measure.rows import Row
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.request import Request, Sampling
from octavo.serving.engine.settings import EngineSettings

# Tokens of an answer before the clock starts: enough for every kernel of a step to have run.
WARM_UP_LEN = 8


@dataclass(frozen=True)
class RowResult:
    """What a row came to: its records, or why it does not count.

    latencies_s: of each length of a latency benchmark, the seconds of its batches that ran here.
    """

    row: Row
    records: tuple[Measurement, ...] = ()
    failure: str | None = None
    latencies_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    @cached_property
    def line(self) -> Line | None:
        """ITL over two or more lengths."""
        records = self._of_lengths
        return fit_itl(records) if len(records) > 1 else None

    @cached_property
    def curve(self) -> Quadratic | None:
        """TTFT over three or more lengths."""
        records = self._of_lengths
        return fit_ttft(records) if len(records) > 2 else None

    @property
    def _of_lengths(self) -> list[Measurement]:
        return [record for record in self.records if record.op == "latency"]


@dataclass(frozen=True)
class RowRun:
    """A row whose engine is open and has passed its check; baseline: what it is compared with."""

    subject: Subject
    row: Row
    engine: Engine
    case: LatencyCase | ThroughputCase
    errors: Mapping[str, float]
    command: str
    baseline: RowResult | None

    def record(self, op: str, values: Mapping[str, float], **more: Scalar) -> Measurement:
        """A record of this row; more: what it says of its case beside all that is known here."""
        about = {**self.subject.about, **row_about(self.row), **self.case.about}
        return Measurement(
            op=op,
            impl="octavo",
            case={**about, **engine_about(self.engine), **more},
            values=values,
            machine=self.subject.machine(),
            command=self.command,
            baseline=None if self.baseline is None else self.baseline.row.name,
        )


def run_rows(
    subject: Subject,
    rows: Sequence[Row],
    case: LatencyCase | ThroughputCase,
    settings: EngineSettings,
    measure: Callable[[RowRun], RowResult],
    *,
    command: str,
    baseline: RowResult | None = None,
    on_row: Callable[[RowResult], None] = lambda result: None,
) -> list[RowResult]:
    """Check and measure all rows; the first is what the others are compared with.

    It raises if it is wrong. Another row that is wrong or cannot run has a failure and no records.
    The engine holds the load, and computes every prompt anew. baseline: what all rows are compared
    with, if it has run before. on_row is told of each row that is done.
    """
    settings = replace(
        settings,
        max_num_seqs=case.num_seqs(settings.max_num_seqs),
        max_context=max(case.max_context, CONTEXT),
        enable_prefix_caching=False,
    )
    results: list[RowResult] = []
    for row in rows:
        plain_error = None
        if baseline is not None and baseline.row.kv_cache is None:
            plain_error = baseline.records[0].values["relative_rms"]
        try:
            errors = check_row(subject, row, settings, plain_error)
            with open_engine(subject, row, settings) as engine:
                engine.warm_up()
                result = measure(RowRun(subject, row, engine, case, errors, command, baseline))
        except OctavoError as error:
            if baseline is None or isinstance(error, ConfigError):
                raise
            result = RowResult(row, failure=str(error))
        baseline = baseline or result
        results.append(result)
        on_row(result)
    return results


def shortened(prompts: Sequence[RandomPrompt]) -> list[RandomPrompt]:
    """The same prompts with short answers, to warm up with."""
    return [replace(one, output_len=min(WARM_UP_LEN, one.output_len)) for one in prompts]


def serve_prompts(
    engine: Engine,
    prompts: Sequence[RandomPrompt],
    *,
    max_concurrency: int | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> tuple[list[RequestTimes], float]:
    """Serve requests in this process, without HTTP: their times, and the seconds of them all.

    max_concurrency: how many are open at most; the next one comes when one has ended. None: all at
    once. Greedy, and an answer has as many tokens as was asked for, whatever they are. A request
    that can never run raises.
    """
    limit = max_concurrency or len(prompts)
    limit = min(limit, engine.settings.max_queue)
    requests = [_request(index, prompt) for index, prompt in enumerate(prompts)]
    for request in requests:
        engine.check(request)
    starts: dict[str, float] = {}
    tokens: dict[str, list[float]] = {request.request_id: [] for request in requests}
    errors: dict[str, str] = {}
    num_open = 0
    began = time.perf_counter()
    while len(starts) < len(requests) or num_open:
        while num_open < limit and len(starts) < len(requests):
            request = requests[len(starts)]
            starts[request.request_id] = time.perf_counter()
            engine.add(request)
            num_open += 1
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            tokens[delta.request_id] += [now] * len(delta.tokens)
            num_open -= delta.finish_reason is not None
            if delta.finish_reason not in (None, "length"):
                errors[delta.request_id] = delta.error or f"ended by {delta.finish_reason}"
            on_token()
    duration_s = time.perf_counter() - began
    times = [
        RequestTimes(
            input_len=len(request.prompt),
            output_len=len(tokens[request.request_id]),
            start_s=starts[request.request_id],
            parts_s=tuple(tokens[request.request_id]),
            error=errors.get(request.request_id),
        )
        for request in requests
    ]
    return times, duration_s


def _request(index: int, prompt: RandomPrompt) -> Request:
    sampling = Sampling(temperature=0, max_tokens=prompt.output_len, ignore_eos=True)
    return Request(request_id=f"bench-{index}", prompt=prompt.tokens, sampling=sampling)
