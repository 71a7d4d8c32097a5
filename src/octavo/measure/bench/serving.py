"""A server under load: random prompts over HTTP to OpenAI's completions, answers as streams.

Any server that takes prompts of tokens will do; fields are those of vLLM's `bench serve`.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.measure.bench.request_times import (
    RandomPrompt,
    RequestTimes,
    Workload,
    summarize,
)
from octavo.measure.records import Machine, Measurement, Scalar

ENDPOINT = "/v1/completions"
DONE = "[DONE]"
# Of an error's body, for a message.
MAX_BODY = 300


@dataclass(frozen=True, kw_only=True)
class ServingCase:
    """A load, where it goes, and how it comes.

    model: None is the first one that the server names. request_rate: requests per second, inf for
    all at once; burstiness 1 is a Poisson process, less comes in bursts, more is steadier.
    max_concurrency: requests open at once; others wait here, and their clock with them. ignore_eos:
    whether answers have the length that was asked for; servers of others may refuse the field.
    vocab_size: random tokens are below it. timeout_s: between two parts of an answer.
    """

    base_url: str
    workload: Workload
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    ignore_eos: bool = True
    vocab_size: int = 1000
    timeout_s: float = 600.0
    percentiles: tuple[float, ...] = (99.0,)

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

    def delays_s(self) -> list[float]:
        """When each request comes, in seconds after the first; by vLLM's gamma distribution."""
        count = self.workload.num_prompts
        if math.isinf(self.request_rate):
            return [0.0] * count
        random = np.random.default_rng(self.workload.seed)
        scale = 1 / (self.request_rate * self.burstiness)
        gaps = random.gamma(self.burstiness, scale, count - 1)
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
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "octavo bench serve needs httpx, not installed here: pip install 'octavo[server]'; "
            "octavo bench throughput has the same load without HTTP"
        ) from None
    return asyncio.run(_run(case, on_request))


async def _run(case: ServingCase, on_request: Callable[[], None]) -> Served:
    import httpx

    headers = {} if case.api_key is None else {"Authorization": f"Bearer {case.api_key}"}
    prompts = case.workload.draw(case.vocab_size)
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

        async def serve(prompt: RandomPrompt, delay_s: float) -> RequestTimes:
            await asyncio.sleep(delay_s)
            async with gate:
                times = await _send(client, case, model, prompt)
            on_request()
            return times

        began = time.perf_counter()
        pairs = zip(prompts, case.delays_s(), strict=True)
        times = await asyncio.gather(*(serve(*pair) for pair in pairs))
        duration_s = time.perf_counter() - began
    if all(one.error is not None for one in times):
        raise OctavoError(f"all {len(times)} requests failed; the first: {times[0].error}")
    metrics = summarize(times, duration_s, case.percentiles)
    metrics["total_parts"] = sum(len(one.parts_s) for one in times if one.error is None)
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


async def _send(client: Any, case: ServingCase, model: str, prompt: RandomPrompt) -> RequestTimes:
    import httpx

    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt.tokens),
        "max_tokens": prompt.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if case.ignore_eos:
        body["ignore_eos"] = True
    stream = _Stream(len(prompt.tokens))
    # Serialized before the clock starts: 20,000 tokens take a while.
    content = json.dumps(body)
    headers = {"Content-Type": "application/json"}
    stream.start_s = time.perf_counter()
    with contextlib.suppress(_Ended):
        try:
            request = client.stream("POST", ENDPOINT, content=content, headers=headers)
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
        if event.get("choices"):
            self.parts_s.append(now)
        if usage := event.get("usage"):
            self.input_len = int(usage["prompt_tokens"])
            self.num_tokens = int(usage["completion_tokens"])

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
        )


def vllm_result(
    case: ServingCase, served: Served, *, metadata: Mapping[str, str], is_detailed: bool
) -> dict[str, Any]:
    """The JSON document that vLLM's `bench serve` writes, of this run.

    is_detailed: with the times and errors of every request.
    """
    metrics = {name: _plain(value) for name, value in served.metrics.items()}
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": served.model,
        "tokenizer_id": served.model,
        "num_prompts": case.workload.num_prompts,
        **metadata,
        "request_rate": "inf" if math.isinf(case.request_rate) else case.request_rate,
        "burstiness": case.burstiness,
        "max_concurrency": case.max_concurrency,
        **metrics,
        "request_goodput": None,
    }
    if is_detailed:
        done = [one for one in served.times if one.error is None]
        result |= {
            "input_lens": [one.input_len for one in done],
            "output_lens": [one.output_len for one in done],
            "start_times": [one.start_s for one in done],
            "ttfts": [one.ttft_s for one in done],
            "itls": [one.itls_s for one in done],
            "errors": [one.error or "" for one in served.times],
        }
    return result


def _plain(value: float) -> float | int | None:
    """A number as JSON has it: whole ones without a point, NaN as null."""
    if math.isnan(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def make_record(
    case: ServingCase, served: Served, *, command: str, has_own_server: bool, options: Sequence[str]
) -> Measurement:
    """The run as a record. The GPU is known if the server is our own: it is this machine's."""
    work = case.workload
    about: dict[str, Scalar] = {
        "model": served.model,
        "num_prompts": work.num_prompts,
        "input_len": work.input_len,
        "output_len": work.output_len,
        "range_ratio": work.range_ratio,
        "seed": work.seed,
        "request_rate": "inf" if math.isinf(case.request_rate) else case.request_rate,
        "burstiness": case.burstiness,
    }
    if case.max_concurrency is not None:
        about["max_concurrency"] = case.max_concurrency
    if options:
        about["server_options"] = " ".join(options)
    machine = Machine.current()
    if has_own_server:
        from octavo.kernels.device import default_device

        device = default_device()
        machine = Machine.current(gpu=device.gpu, capability=device.capability)
    return Measurement(
        op="serve",
        impl="octavo" if has_own_server else "http",
        case=about,
        values=dict(served.metrics),
        machine=machine,
        command=command,
    )
