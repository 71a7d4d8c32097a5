"""One record for each HTTP request: a JSON line when it ends, and its part in the metrics."""

import asyncio
import json
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Literal

from octavo.serving.engine.request import Delta, Usage
from octavo.serving.server.api_error import CLIENT_LEFT_STATUS, ApiError
from octavo.serving.server.metrics import Metrics, TokenMetrics

logger = logging.getLogger("octavo.requests")

# stop, length: answered. ok: answered without the engine. refused: never reached the engine, or
# was turned away by it. cancelled: the client left. aborted: the server ended first.
Outcome = Literal["stop", "length", "ok", "refused", "cancelled", "timeout", "aborted", "error"]
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


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
            metrics.saw_tokens(elapsed_s - last_s, len(delta.tokens))
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
