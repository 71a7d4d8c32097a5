"""Requests served by an engine in this process: no HTTP, no other thread."""

import time
from collections.abc import Callable, Sequence

from octavo.errors import OctavoError
from octavo.measure.bench.request_times import RandomPrompt, RequestTimes
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.request import Request, Sampling


def serve_prompts(
    engine: Engine,
    prompts: Sequence[RandomPrompt],
    *,
    max_concurrency: int | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> tuple[list[RequestTimes], float]:
    """The times of these requests in their order, and the seconds that all of them took.

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


def raise_failed(times: Sequence[RequestTimes]) -> None:
    """Raise for the first request that has failed."""
    for number, request in enumerate(times):
        if request.error is not None:
            raise OctavoError(f"request {number} failed: {request.error}")


def _request(index: int, prompt: RandomPrompt) -> Request:
    sampling = Sampling(temperature=0, max_tokens=prompt.output_len, ignore_eos=True)
    return Request(request_id=f"bench-{index}", prompt=prompt.tokens, sampling=sampling)
