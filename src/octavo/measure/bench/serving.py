"""A server under load: prompts over HTTP to OpenAI's completions or chat, answers as streams.

Any server will do for texts, and any that takes prompts of tokens for random ones; fields are those
of vLLM's `bench serve`.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from octavo.errors import ConfigError, OctavoError
from octavo.extras import need
from octavo.measure.bench.request_times import (
    GOODPUT_METRICS,
    RandomPrompt,
    RequestTimes,
    Workload,
    goodput,
    summarize,
)
from octavo.measure.bench.serving_data import DataSet, ServingPrompt, request_body

# By vLLM's names.
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
RAMPS = ("linear", "exponential")
DONE = "[DONE]"
# Of an error's body, for a message.
MAX_BODY = 300


@dataclass(frozen=True)
class Ramp:
    """A request rate that grows (or falls) from the first request to the last."""

    strategy: str  # linear or exponential
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in RAMPS:
            raise ConfigError(f"expected a ramp of {', '.join(RAMPS)}; got {self.strategy!r}")
        if not (0 < self.start_rps < math.inf and 0 < self.end_rps < math.inf):
            raise ConfigError(
                f"expected rates above 0 to ramp between, got {self.start_rps} and {self.end_rps}"
            )

    def rates(self, count: int) -> "np.typing.NDArray[np.float64]":
        """Requests per second at each of so many gaps."""
        if self.strategy == "linear":
            return np.linspace(self.start_rps, self.end_rps, count)
        return np.geomspace(self.start_rps, self.end_rps, count)


@dataclass(frozen=True, kw_only=True)
class ServingCase:
    """A load, where it goes, and how it comes.

    workload: random tokens, or the prompts of a data set. backend: openai is completions,
    openai-chat is chat, which takes texts and images. model: None is the first one that the server
    names. request_rate: requests per second, inf for all at once; ramp: in place of it, one that
    changes; burstiness 1 is a Poisson process, less comes in bursts, more is steadier. goodput_ms:
    the limits of a request that counts as good.
    max_concurrency: requests open at once; others wait here, and their clock with them. ignore_eos:
    whether answers have the length that was asked for; servers of others may refuse the field.
    vocab_size: random tokens are below it. timeout_s: between two parts of an answer.
    """

    base_url: str
    workload: Workload | DataSet
    backend: str = "openai"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    request_rate: float = math.inf
    ramp: Ramp | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    ignore_eos: bool = True
    vocab_size: int = 1000
    timeout_s: float = 600.0
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"expected a URL such as http://localhost:8000, got {self.base_url}")
        if not self.request_rate > 0 or not self.burstiness > 0:
            raise ConfigError(
                f"expected a request rate and a burstiness above 0, got {self.request_rate} and "
                f"{self.burstiness}"
            )
        if (self.max_concurrency is not None and self.max_concurrency < 1) or self.num_warmups < 0:
            raise ConfigError(
                f"expected 1 or more requests at once and 0 or more warm-ups, got "
                f"{self.max_concurrency} and {self.num_warmups}"
            )
        if not self.percentiles or not all(0 <= p <= 100 for p in self.percentiles):
            raise ConfigError(f"expected percentiles of 0 to 100, got {list(self.percentiles)}")
        self._check_kinds()

    def _check_kinds(self) -> None:
        if self.backend not in ENDPOINTS:
            raise ConfigError(f"expected a backend of {', '.join(ENDPOINTS)}; got {self.backend!r}")
        if isinstance(self.workload, Workload):
            if self.backend != "openai":
                raise ConfigError(
                    "random prompts are tokens, which chat does not take: backend openai"
                )
        elif self.workload.has_images and self.backend == "openai":
            raise ConfigError("completions take no images: backend openai-chat")
        if self.ramp is not None and not math.isinf(self.request_rate):
            raise ConfigError(f"expected a request rate or a ramp, got {self.request_rate} as well")
        is_good = all(name in GOODPUT_METRICS and ms > 0 for name, ms in self.goodput_ms.items())
        if not is_good:
            raise ConfigError(
                f"expected limits above 0 ms of {', '.join(GOODPUT_METRICS)}, got "
                f"{dict(self.goodput_ms)}"
            )

    def delays_s(self) -> list[float]:
        """When each request comes, in seconds after the first; by vLLM's gamma distribution."""
        count = self.workload.num_prompts
        if self.ramp is None and math.isinf(self.request_rate):
            return [0.0] * count
        random = np.random.default_rng(self.workload.seed)
        rates = self.request_rate if self.ramp is None else self.ramp.rates(count - 1)
        gaps = random.gamma(self.burstiness, 1 / (rates * self.burstiness), count - 1)
        return [0.0, *np.cumsum(gaps).tolist()]


@dataclass(frozen=True)
class Served:
    """What a load came to: the times of all its requests, and their statistics.

    total_parts, among them, is how many parts the answers came in. A server sends none for a token
    that completes no character, so they are fewer than the tokens of random weights, and ITL is
    then longer than TPOT.
    """

    model: str
    times: tuple[RequestTimes, ...]
    metrics: Mapping[str, float]


def run_serving(case: ServingCase, on_request: Callable[[], None] = lambda: None) -> Served:
    """Send the load; on_request is told of each request that has ended.

    A request that fails is counted, and its error kept; if all of them fail, the first is raised.
    """
    need("octavo bench serve", "httpx")
    return asyncio.run(_run(case, on_request))


async def _run(case: ServingCase, on_request: Callable[[], None]) -> Served:
    import httpx

    headers = {} if case.api_key is None else {"Authorization": f"Bearer {case.api_key}"}
    prompts: Sequence[RandomPrompt | ServingPrompt] = case.workload.draw(case.vocab_size)
    async with httpx.AsyncClient(
        base_url=case.base_url.rstrip("/"),
        headers=headers,
        timeout=case.timeout_s,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as client:
        model = case.model or await _first_model(client)
        for prompt in prompts[: case.num_warmups]:
            warmed = await _send(client, case, model, prompt)
            if warmed.error is not None:
                raise OctavoError(f"the warm-up failed: {warmed.error}")
        gate = asyncio.Semaphore(case.max_concurrency or len(prompts))

        async def serve(prompt: RandomPrompt | ServingPrompt, delay_s: float) -> RequestTimes:
            await asyncio.sleep(delay_s)
            came_s = time.perf_counter()
            async with gate:
                waited_s = time.perf_counter() - came_s
                times = await _send(client, case, model, prompt)
            on_request()
            return replace(times, queue_s=waited_s)

        began = time.perf_counter()
        pairs = zip(prompts, case.delays_s(), strict=True)
        times = await asyncio.gather(*(serve(*pair) for pair in pairs))
        duration_s = time.perf_counter() - began
    if all(one.error is not None for one in times):
        raise OctavoError(f"all {len(times)} requests failed; the first: {times[0].error}")
    metrics = summarize(times, duration_s, case.percentiles)
    metrics["total_parts"] = sum(len(one.parts_s) for one in times if one.error is None)
    if case.goodput_ms:
        metrics["request_goodput"] = goodput(times, duration_s, case.goodput_ms)
    return Served(model, tuple(times), metrics)


async def _first_model(client: Any) -> str:
    import httpx

    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        raise OctavoError(
            f"expected a server with models at {client.base_url}, got {type(error).__name__}: "
            f"{error}"
        ) from None


async def _send(
    client: Any, case: ServingCase, model: str, prompt: RandomPrompt | ServingPrompt
) -> RequestTimes:
    import httpx

    body: dict[str, Any] = {
        "model": model,
        **request_body(prompt, is_chat=case.backend == "openai-chat"),
        "max_tokens": prompt.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if case.ignore_eos:
        body["ignore_eos"] = True
    # Of a text it is what the server counts.
    stream = _Stream(len(prompt.tokens) if isinstance(prompt, RandomPrompt) else 0)
    # Serialized before the clock starts: 20,000 tokens take a while.
    content = json.dumps(body)
    headers = {"Content-Type": "application/json"}
    stream.start_s = time.perf_counter()
    with contextlib.suppress(_Ended):
        try:
            request = client.stream(
                "POST", ENDPOINTS[case.backend], content=content, headers=headers
            )
            async with request as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")[:MAX_BODY]
                    stream.error = f"status {response.status_code}: {text}"
                    raise _Ended
                async for line in response.aiter_lines():
                    stream.read(line)
        except httpx.HTTPError as error:
            stream.error = f"{type(error).__name__}: {error}"
    return stream.times()


class _Ended(Exception):
    """A stream that needs no more reading."""


@dataclass
class _Stream:
    """What has come of an answer."""

    input_len: int
    start_s: float = 0.0
    parts_s: list[float] = field(default_factory=list)
    num_tokens: int | None = None
    is_done: bool = False
    error: str | None = None
    texts: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        """Take one line of the stream; anything but data is none of ours."""
        if not line.startswith("data:"):
            return
        now, text = time.perf_counter(), line.removeprefix("data:").strip()
        if text == DONE:
            self.is_done = True
            return
        try:
            event = json.loads(text)
        except ValueError:
            self.error = f"expected events of JSON, got {text[:MAX_BODY]}"
            raise _Ended from None
        if "error" in event:
            self.error = str(event["error"])[:MAX_BODY]
            raise _Ended
        if choices := event.get("choices"):
            self._take(choices[0], now)
        if usage := event.get("usage"):
            self.input_len = int(usage["prompt_tokens"])
            self.num_tokens = int(usage["completion_tokens"])

    def _take(self, choice: Mapping[str, Any], now: float) -> None:
        """Count a part; of chats the first may be a role alone, and the last a reason to end.

        An answer of tokens without text, which random weights give, has one part: its end.
        """
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text")
        else:
            text = delta.get("content") or delta.get("reasoning_content")
            is_end = choice.get("finish_reason") is not None
            if not text and (self.parts_s or not is_end):
                return
        self.parts_s.append(now)
        self.texts.append(str(text or ""))

    def times(self) -> RequestTimes:
        """The request's times; one without a whole answer has an error."""
        error = self.error
        if error is None and not (self.is_done and self.parts_s):
            error = f"the stream ended after {len(self.parts_s)} parts, without {DONE}"
            if self.is_done:
                error = "the answer has no parts"
        return RequestTimes(
            input_len=self.input_len,
            output_len=len(self.parts_s) if self.num_tokens is None else self.num_tokens,
            start_s=self.start_s,
            parts_s=tuple(self.parts_s),
            error=error,
            text="".join(self.texts),
        )
