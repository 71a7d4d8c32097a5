"""What the server counts, in Prometheus' text format."""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from octavo.serving.engine.request import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds; a token takes 1 ms to 1 s, a first token or an answer up to minutes.
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
ANSWER_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

Value = tuple[str, str, int, str]  # name, kind, number, help


class Histogram:
    """How many values were at most as large as each bound."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help, tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or the same one several times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def mean(self) -> float | None:
        """The mean of all values, None without any."""
        return self.total / self.num_values if self.num_values else None

    def lines(self) -> Iterator[str]:
        """The histogram as Prometheus reads it."""
        yield from _head(self.name, self.help, "histogram")
        so_far = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            yield f'{self.name}_bucket{{le="{bound}"}} {so_far}'
        yield f"{self.name}_sum {self.total}"
        yield f"{self.name}_count {so_far}"


class Metrics:
    """Everything that is counted since the server started; the engine's own counts come as Stats.

    Only the event loop writes here.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (route, outcome)
        self.time_to_first_token = Histogram(
            "octavo_time_to_first_token_seconds",
            "From accepting a request to its first token.",
            ANSWER_BUCKETS,
        )
        self.inter_token = Histogram(
            "octavo_inter_token_latency_seconds",
            "Between two tokens of a request.",
            TOKEN_BUCKETS,
        )
        self.request_time = Histogram(
            "octavo_request_seconds",
            "From accepting a request to its last token.",
            ANSWER_BUCKETS,
        )

    def expose(self, stats: Stats, num_open: int) -> str:
        """All of it as text."""
        times = (self.time_to_first_token, self.inter_token, self.request_time)
        return self.text(_of_engine(stats, num_open), times)

    def text(self, values: Iterable[Value], histograms: Iterable[Histogram]) -> str:
        """The requests, these values and these histograms as Prometheus reads them."""
        lines = list(_head("octavo_requests_total", "Requests that have ended.", "counter"))
        for (route, outcome), count in sorted(self.requests.items()):
            labels = f'route="{_escaped(route)}",outcome="{_escaped(outcome)}"'
            lines.append(f"octavo_requests_total{{{labels}}} {count}")
        for name, kind, value, help in values:
            lines += [*_head(name, help, kind), f"{name} {value}"]
        for histogram in histograms:
            lines += histogram.lines()
        return "\n".join(lines) + "\n"


def _of_engine(stats: Stats, num_open: int) -> Iterator[Value]:
    gauges = {
        "octavo_requests_open": (num_open, "Requests inside the server."),
        "octavo_requests_running": (stats.num_running, "Requests in the engine's batch."),
        "octavo_requests_waiting": (stats.num_waiting, "Requests in the engine's queue."),
        "octavo_pages": (stats.num_pages, "Pages of the KV cache."),
        "octavo_pages_in_use": (stats.num_pages_in_use, "Pages that requests hold."),
    }
    counters = {
        "octavo_prompt_tokens_total": (stats.prompt_tokens, "Tokens of prompts."),
        "octavo_completion_tokens_total": (stats.completion_tokens, "Tokens of answers."),
        "octavo_cached_tokens_total": (
            stats.cached_tokens,
            "Tokens of prompts whose pages were filled already.",
        ),
        "octavo_preemptions_total": (
            stats.num_preemptions,
            "Requests put back for want of pages.",
        ),
        "octavo_steps_total": (stats.num_steps, "Forward passes."),
    }
    for kind, values in (("gauge", gauges), ("counter", counters)):
        for name, (value, help) in values.items():
            yield name, kind, value, help


def _head(name: str, help: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
