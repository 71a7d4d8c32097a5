"""What a server tells of its requests: counts and times for Prometheus, and a log line for each."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily as Total  # its series ends in _total
from prometheus_client.core import GaugeMetricFamily as Gauge

from octavo.serving.engine.precision import Precision
from octavo.serving.engine.request import Delta, Saturated, Usage
from octavo.serving.server.api_error import CLIENT_LEFT_STATUS, ApiError
from octavo.serving.server.async_engine import AsyncEngine

logger = logging.getLogger("octavo.requests")

# stop, length: answered. ok: answered without the engine. refused: never reached the engine, or
# was turned away by it. cancelled: the client left. aborted: the server ended first.
Outcome = Literal["stop", "length", "ok", "refused", "cancelled", "timeout", "aborted", "error"]
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
# Seconds; a token takes 1 ms to 1 s, a first token or an answer up to minutes. A request need not
# wait at all.
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
ANSWER_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_BUCKETS = (0.001, 0.005, *ANSWER_BUCKETS)
# Of the engine, by the name of the metric: what it says, and the field of Stats that has it.
GAUGES = {
    "requests_running": ("Requests in the engine's batch.", "num_running"),
    "requests_waiting": ("Requests in the engine's queue.", "num_waiting"),
    "pages": ("Pages of the KV cache.", "num_pages"),
    "pages_in_use": ("Pages that requests hold.", "num_pages_in_use"),
}
TOTALS = {
    "prompt_tokens": ("Tokens of prompts.", "prompt_tokens"),
    "completion_tokens": ("Tokens of answers.", "completion_tokens"),
    "cached_tokens": ("Tokens of prompts whose pages were filled already.", "cached_tokens"),
    "preemptions": ("Requests put back for want of pages.", "num_preemptions"),
    "steps": ("Forward passes.", "num_steps"),
}
FRESHNESS = "As of the scrape before this one, or older by up to 5 s."


class _Registry(CollectorRegistry):
    """Leaves out the `…_created` series, which tell when each of the others began.

    families: what makes metrics when Prometheus reads them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.families: list[Callable[[], Iterable[Metric]]] = []

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        for family in chain(super().collect(), *(make() for make in self.families)):
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


class Metrics:
    """Counts and times of all requests of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = _Registry()
        self.requests = Counter(
            "octavo_requests",
            "Requests that have ended.",
            ("route", "outcome"),
            registry=self.registry,
        )
        self.request_time = self.histogram(
            "octavo_request_seconds", "From accepting a request to its last token.", ANSWER_BUCKETS
        )
        self.queue_time = self.histogram(
            "octavo_queue_seconds",
            "From accepting a request to the engine's first pass over it; requests that end "
            "without a token are left out.",
            QUEUE_BUCKETS,
        )

    def histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        """A new histogram of this server's."""
        return Histogram(name, help, buckets=buckets, registry=self.registry)

    def add(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Expose metrics that are computed at each scrape."""
        self.registry.families.append(families)

    def expose(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)


class TokenMetrics(Metrics):
    """Metrics of a server whose answers are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.time_to_first_token = self.histogram(
            "octavo_time_to_first_token_seconds",
            "From accepting a request to its first token.",
            ANSWER_BUCKETS,
        )
        self.inter_token = self.histogram(
            "octavo_inter_token_latency_seconds",
            "Between two tokens of a request.",
            TOKEN_BUCKETS,
        )


def sum_and_count(histogram: Histogram) -> dict[str, float]:
    """The sum of all values of a histogram without labels, sum_s, and how many they are, count."""
    (family,) = histogram.collect()
    found = {one.name.removeprefix(family.name): one.value for one in family.samples}
    return {"sum_s": found["_sum"], "count": int(found["_count"])}


def engine_families(engine: AsyncEngine) -> Iterator[Metric]:
    """The engine's own numbers at its last step."""
    stats = engine.last_stats
    engine.ask_for_saturation()
    yield Gauge("octavo_requests_open", "Requests inside the server.", engine.num_open)
    for name, (help, field_name) in GAUGES.items():
        yield Gauge(f"octavo_{name}", help, getattr(stats, field_name))
    for name, (help, field_name) in TOTALS.items():
        yield Total(f"octavo_{name}", help, getattr(stats, field_name))
    yield from _saturation(stats.saturated)
    yield from precision_families(engine.engine.precision)


def _saturation(saturated: Saturated) -> Iterator[Metric]:
    """What no layer counts has no series: 0 would say that nothing saturated."""
    family = Total(
        "octavo_saturated_values",
        "Values beyond the range of their static FP8 scale: keys and values of the KV cache, in "
        f"layers without calibrated scales, and inputs of linear layers where checked. {FRESHNESS}",
        labels=("kind",),
    )
    linear_inputs = saturated.linear_inputs
    kinds = {"key": saturated.keys, "value": saturated.values, "linear_input": linear_inputs}
    for kind, total in kinds.items():
        if total is not None:
            family.add_metric((kind,), total)
    yield family
    checked = Total(
        "octavo_saturation_checked_values",
        "Inputs of linear layers that were checked for saturation: those of a layer's first 16 "
        f"calls and of every 64th after them, outside CUDA graphs. {FRESHNESS}",
        labels=("kind",),
    )
    if linear_inputs is not None:
        checked.add_metric(("linear_input",), saturated.checked_linear_inputs)
    yield checked


def precision_families(precision: Precision) -> Iterator[Metric]:
    """How many layers are in FP8, and the bytes of the KV cache."""
    every = Gauge("octavo_layers", "Layers of the model.", labels=("kind",))
    fp8 = Gauge("octavo_fp8_layers", "Layers that are in FP8.", labels=("kind",))
    for layers in precision.layers:
        every.add_metric((layers.kind,), layers.num_layers)
        fp8.add_metric((layers.kind,), layers.num_fp8)
    yield every
    yield fp8
    if precision.cache:
        labels = ("kind", "dtype", "part")
        size = Gauge("octavo_kv_cache_bytes", "Memory of the KV cache.", labels=labels)
        for part in precision.cache:
            size.add_metric((part.kind, part.dtype, part.part), part.num_bytes)
        yield size


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
    usage: Usage | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    last_token_s: dict[str, float] = field(default_factory=dict)  # by the engine's request
    is_sent: bool = False  # all that there is to say has gone out
    clock: asyncio.Timeout | None = None  # runs until the engine has the request

    @property
    def deadline(self) -> float | None:
        """When the request must have ended, by the event loop's clock."""
        return None if self.clock is None else self.clock.when()

    def hand_over(self) -> None:
        """Stop the clock: from here on the engine watches the deadline."""
        if self.clock is not None:
            self.clock.reschedule(None)

    def saw(self, delta: Delta, usage: Usage, *, is_last: bool) -> None:
        """Note a delta and its time; the last one of all choices says how the answer ended.

        usage: of all choices so far.
        """
        elapsed_s = time.perf_counter() - self.start
        self.usage = usage
        if delta.tokens:
            self._saw_tokens(delta, elapsed_s)
        if is_last and (delta.finish_reason == "stop" or delta.finish_reason == "length"):
            self.outcome = delta.finish_reason

    def _saw_tokens(self, delta: Delta, elapsed_s: float) -> None:
        metrics = self.metrics
        assert isinstance(metrics, TokenMetrics)  # no other server has deltas
        if self.first_token_s is None:
            self.first_token_s = elapsed_s
            metrics.time_to_first_token.observe(elapsed_s)
            if delta.begun_s is not None:
                self.queue_s = delta.begun_s - self.start
                metrics.queue_time.observe(self.queue_s)
        last_s = self.last_token_s.get(delta.request_id)
        if last_s is not None:
            num_tokens = len(delta.tokens)  # they came together
            for each_s in repeat((elapsed_s - last_s) / num_tokens, num_tokens):
                metrics.inter_token.observe(each_s)
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
            self.metrics.request_time.observe(duration_s)
        # Pages, health and metrics are asked for every second; what they say is seen anyway.
        is_quiet = self.method in ("GET", "HEAD") and self.outcome == "ok"
        logger.log(logging.DEBUG if is_quiet else logging.INFO, self._line(duration_s))

    def _line(self, duration_s: float) -> str:
        usage = self.usage
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
        return json.dumps({key: value for key, value in fields.items() if value is not None})


def _outcome_of(error: ApiError) -> Outcome:
    if error.code == "aborted":
        return "aborted"
    if error.status == CLIENT_LEFT_STATUS:
        return "cancelled"
    if error.status in (408, 504):
        return "timeout"
    # 503 before the engine had it: nothing was begun.
    return "refused" if error.status < 500 or error.status == 503 else "error"
