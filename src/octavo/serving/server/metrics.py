"""What a server tells of its requests: counts and times for Prometheus, and a log line for each."""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily as Total  # its series ends in _total
from prometheus_client.core import GaugeMetricFamily as Gauge

from octavo.serving.engine.precision import Precision
from octavo.serving.engine.request import Delta, Usage
from octavo.serving.server.api_error import CLIENT_LEFT_STATUS, ApiError
from octavo.serving.server.async_engine import AsyncEngine, Slot

logger = logging.getLogger("octavo.requests")

# stop, length: answered. ok: answered without the engine. refused: never reached the engine, or
# was turned away by it. cancelled: the client left. aborted: the server ended first.
Outcome = Literal["stop", "length", "ok", "refused", "cancelled", "timeout", "aborted", "error"]
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")

# Seconds; a token takes 1 ms to 1 s, a first token or an answer up to minutes. A request need not
# wait at all.
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
ANSWER_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_BUCKETS = (0.001, 0.005, *ANSWER_BUCKETS)
# By the name in /stats: the metric, what it is, its buckets.
REQUEST_TIMES = {
    "request": ("request_seconds", "From accepting a request to its last token.", ANSWER_BUCKETS),
    "queue": (
        "queue_seconds",
        "From accepting a request to the engine's first pass over it; requests that end without a "
        "token are left out.",
        QUEUE_BUCKETS,
    ),
}
_TO_FIRST = "From accepting a request to its first token."
TOKEN_TIMES = REQUEST_TIMES | {
    "ttft": ("time_to_first_token_seconds", _TO_FIRST, ANSWER_BUCKETS),
    "itl": ("inter_token_latency_seconds", "Between two tokens of a request.", TOKEN_BUCKETS),
}
# Of the engine: the kind of metric, its name, what it is, the field of Stats that has it.
ENGINE_NUMBERS = (
    (Gauge, "requests_running", "Requests in the engine's batch.", "num_running"),
    (Gauge, "requests_waiting", "Requests in the engine's queue.", "num_waiting"),
    (Gauge, "pages", "Pages of the KV cache.", "num_pages"),
    (Gauge, "pages_in_use", "Pages that requests hold.", "num_pages_in_use"),
    (Total, "prompt_tokens", "Tokens of prompts.", "prompt_tokens"),
    (Total, "completion_tokens", "Tokens of answers.", "completion_tokens"),
    (Total, "cached_tokens", "Tokens of prompts whose pages were filled already.", "cached_tokens"),
    (Total, "preemptions", "Requests put back for want of pages.", "num_preemptions"),
    (Total, "steps", "Forward passes.", "num_steps"),
)
FRESHNESS = "As of the scrape before this one, or older by up to 5 s."
SATURATED = (
    "Values beyond the range of their static FP8 scale: keys and values of the KV cache, in layers "
    f"without calibrated scales, and inputs of linear layers where checked. {FRESHNESS}"
)
CHECKED = (
    "Inputs of linear layers that were checked for saturation: those of a layer's first 16 calls "
    f"and of every 64th after them, outside CUDA graphs. {FRESHNESS}"
)


class Metrics(CollectorRegistry):
    """Counts and times of all requests of one server.

    times: REQUEST_TIMES or TOKEN_TIMES. families: makes what is read with each scrape.
    """

    def __init__(
        self,
        times: dict[str, tuple[str, str, tuple[float, ...]]],
        families: Callable[[], Iterable[Metric]],
    ) -> None:
        super().__init__()
        self._families = families
        text, labels = "Requests that have ended.", ("route", "outcome")
        self.requests = Counter("octavo_requests", text, labels, registry=self)
        self.times = {
            short: Histogram(f"octavo_{name}", text, buckets=buckets, registry=self)
            for short, (name, text, buckets) in times.items()
        }

    def collect(self) -> Iterator[Metric]:
        """All metrics but the `…_created` series, which tell when each of the others began."""
        for family in (*super().collect(), *self._families()):
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family

    def sum_and_count(self, name: str) -> dict[str, float]:
        """The sum of the times of one kind, sum_s, and how many they are, count."""
        (family,) = self.times[name].collect()
        found = {one.name.removeprefix(family.name): one.value for one in family.samples}
        return {"sum_s": found["_sum"], "count": int(found["_count"])}


def engine_families(engine: AsyncEngine) -> Iterator[Metric]:
    """The engine's own numbers at its last step."""
    stats = engine.last_stats
    engine.ask_for_saturation()
    yield Gauge("octavo_requests_open", "Requests inside the server.", engine.num_open)
    for kind, name, text, field_name in ENGINE_NUMBERS:
        yield kind(f"octavo_{name}", text, getattr(stats, field_name))
    found = stats.saturated
    linear = found.linear_inputs
    kinds = {"key": found.keys, "value": found.values, "linear_input": linear}
    yield _by_label(Total, "saturated_values", SATURATED, ("kind",), kinds)
    checked = {"linear_input": None if linear is None else found.checked_linear_inputs}
    yield _by_label(Total, "saturation_checked_values", CHECKED, ("kind",), checked)
    yield from precision_families(engine.engine.precision)


def precision_families(precision: Precision) -> Iterator[Metric]:
    """How many layers are in FP8, and the bytes of the KV cache."""
    every = {layers.kind: layers.num_layers for layers in precision.layers}
    yield _by_label(Gauge, "layers", "Layers of the model.", ("kind",), every)
    fp8 = {layers.kind: layers.num_fp8 for layers in precision.layers}
    yield _by_label(Gauge, "fp8_layers", "Layers that are in FP8.", ("kind",), fp8)
    if precision.cache:
        labels = ("kind", "dtype", "part")
        sizes = {(part.kind, part.dtype, part.part): part.num_bytes for part in precision.cache}
        yield _by_label(Gauge, "kv_cache_bytes", "Memory of the KV cache.", labels, sizes)


def _by_label(
    kind: type[Gauge] | type[Total],
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: Mapping[Any, int | None],
) -> Metric:
    """A metric with a series for each value, by its labels or its only one.

    None has no series: 0 would say that it was counted.
    """
    family = kind(f"octavo_{name}", text, labels=labels)
    for label, value in values.items():
        if value is not None:
            family.add_metric((label,) if isinstance(label, str) else label, value)
    return family


def choose_id(given: str | None) -> str:
    """The client's own id if it can stand in a header and in a log, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


@dataclass
class RequestRecord:
    """What happened to a request; times are seconds from when it came."""

    request_id: str
    method: str
    path: str
    metrics: Metrics
    start: float = field(default_factory=time.perf_counter)
    route: str = "unmatched"
    status: int | None = None
    outcome: Outcome | None = None
    answer_id: str | None = None
    error: str | None = None
    usage: Callable[[], Usage] | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    last_token_s: dict[str, float] = field(default_factory=dict)  # by the engine's request
    is_sent: bool = False  # all that there is to say has gone out
    slot: Slot = field(init=False)  # of one that asks for work, a POST

    def saw(self, delta: Delta, *, is_last: bool) -> None:
        """Note a delta and its time; the last one of all choices says how the answer ended."""
        if is_last and (delta.finish_reason == "stop" or delta.finish_reason == "length"):
            self.outcome = delta.finish_reason
        if not delta.tokens:
            return
        elapsed_s, times = time.perf_counter() - self.start, self.metrics.times
        if self.first_token_s is None:
            self.first_token_s = elapsed_s
            times["ttft"].observe(elapsed_s)
            if delta.begun_s is not None:
                self.queue_s = delta.begun_s - self.start
                times["queue"].observe(self.queue_s)
        last_s = self.last_token_s.get(delta.request_id)
        if last_s is not None:
            num_tokens = len(delta.tokens)  # they came together
            for _ in delta.tokens:
                times["itl"].observe((elapsed_s - last_s) / num_tokens)
        self.last_token_s[delta.request_id] = elapsed_s

    def failed(self, error: ApiError) -> None:
        """Note an error; it decides the outcome unless the answer was complete."""
        self.error = error.message
        if self.outcome is None:
            self.outcome = _outcome_of(error)

    def left(self) -> None:
        """Note that the client went away; clients do so at [DONE], which is no cancellation."""
        if not self.is_sent:
            self.outcome = "cancelled"

    def closed(self, error: ApiError) -> None:
        """Note that the server closed the connection before its answer was complete, and why."""
        self.outcome, self.error = _outcome_of(error), error.message
        self.status = self.status or error.status

    def end(self) -> None:
        """Count the request and write its line; called once, when nothing more can happen."""
        duration_s = time.perf_counter() - self.start
        if self.outcome is None:
            status = self.status or 500
            self.outcome = "ok" if status < 400 else "refused" if status < 500 else "error"
        self.metrics.requests.labels(self.route, self.outcome).inc()
        if self.outcome in ("stop", "length"):
            self.metrics.times["request"].observe(duration_s)
        # Pages, health and metrics are asked for every second; what they say is seen anyway.
        is_quiet = self.method in ("GET", "HEAD") and self.outcome == "ok"
        level = logging.DEBUG if is_quiet else logging.INFO
        usage = self.usage and self.usage()
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": self.request_id,
            "answer_id": self.answer_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "outcome": self.outcome,
            "prompt_tokens": usage and usage.prompt_tokens,
            "completion_tokens": usage and usage.completion_tokens,
            "cached_tokens": usage and usage.cached_tokens,
            "queue_s": self.queue_s and round(self.queue_s, 6),
            "ttft_s": self.first_token_s and round(self.first_token_s, 6),
            "duration_s": round(duration_s, 6),
            "error": self.error,
        }
        given = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, json.dumps(given))


def _outcome_of(error: ApiError) -> Outcome:
    if error.code == "aborted":
        return "aborted"
    if error.status == CLIENT_LEFT_STATUS:
        return "cancelled"
    if error.status in (408, 504):
        return "timeout"
    # 503 before the engine had it: nothing was begun.
    return "refused" if error.status < 500 or error.status == 503 else "error"
