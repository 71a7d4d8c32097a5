"""Requests that were served, and what their times add up to: the fields of vLLM's `bench serve`.

Who served them, over HTTP or in this process, makes no difference here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.errors import ConfigError
from octavo.measure.bench.cases import GOODPUT_METRICS

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """When a request was sent, and when each part of its answer came, in seconds of one clock.

    output_len: tokens of the answer; parts may be fewer, where one has several. error: why there is
    no whole answer; None if there is. queue_s: how long it waited here before it was sent. text:
    the answer, where it was read.
    """

    input_len: int
    output_len: int
    start_s: float
    parts_s: tuple[float, ...]
    error: str | None = None
    queue_s: float = 0.0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """From the request to the first part."""
        return self.parts_s[0] - self.start_s

    @property
    def itls_s(self) -> list[float]:
        """Between one part and the next."""
        return [float(gap) for gap in np.diff(self.parts_s)]

    @property
    def latency_s(self) -> float:
        """From the request to the last part."""
        return self.parts_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds of each token after the first; None if there is no other."""
        if self.output_len < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)


def summarize(
    requests: Sequence[RequestTimes], duration_s: float, percentiles: Sequence[float] = (99.0,)
) -> dict[str, float]:
    """Throughput and latency of all requests, by vLLM's names; failed ones count only as such."""
    done = [request for request in requests if request.error is None]
    num_input = sum(request.input_len for request in done)
    num_output = sum(request.output_len for request in done)
    result: dict[str, float] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _peak_rate(done),
        "max_concurrent_requests": _peak_open(done),
    }
    tpots = (request.tpot_s for request in done)
    samples = {
        "ttft": [request.ttft_s for request in done],
        "tpot": [tpot for tpot in tpots if tpot is not None],
        "itl": [itl for request in done for itl in request.itls_s],
        "e2el": [request.latency_s for request in done],
    }
    for metric in METRICS:
        result |= statistics_ms(metric, samples[metric], percentiles)
    return result


def goodput(
    requests: Sequence[RequestTimes], duration_s: float, limits_ms: Mapping[str, float]
) -> float:
    """Requests per second that met all limits: of ttft, tpot or e2el, in milliseconds.

    TPOT of an answer of one token is 0, as in vLLM.
    """
    if unknown := sorted(limits_ms.keys() - set(GOODPUT_METRICS)):
        raise ConfigError(
            f"expected limits of {', '.join(GOODPUT_METRICS)}, got {', '.join(unknown)}"
        )
    num_good = 0
    for request in requests:
        if request.error is None:
            times_s = {
                "ttft": request.ttft_s,
                "tpot": request.tpot_s or 0.0,
                "e2el": request.latency_s,
            }
            num_good += all(times_s[name] * 1e3 <= limit for name, limit in limits_ms.items())
    return num_good / duration_s


def statistics_ms(
    metric: str, samples_s: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    """vLLM's {mean,median,std,pNN}_METRIC_ms; NaN, and not vLLM's 0, where there is no sample."""
    values = np.asarray(samples_s if samples_s else [math.nan]) * 1e3
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {f"p{p:g}": np.percentile(values, p) for p in percentiles}
    return {f"{name}_{metric}_ms": float(value) for name, value in found.items()}


def _peak_rate(requests: Sequence[RequestTimes]) -> float:
    """The most tokens that came within one second of the clock of the run."""
    if not requests:
        return 0.0
    first = min(request.start_s for request in requests)
    counts: dict[int, float] = {}
    for request in requests:
        share = request.output_len / len(request.parts_s)
        for part in request.parts_s:
            second = int(part - first)
            counts[second] = counts.get(second, 0.0) + share
    return round(max(counts.values()), 6)  # shares of a token add up to a last bit more or less


def _peak_open(requests: Sequence[RequestTimes]) -> int:
    """The most requests that were open at once."""
    starts = [(request.start_s, 1) for request in requests]
    ends = [(request.parts_s[-1], -1) for request in requests]
    most = num_open = 0
    for _, change in sorted(starts + ends):  # at the same time, ends come first
        num_open += change
        most = max(most, num_open)
    return most
