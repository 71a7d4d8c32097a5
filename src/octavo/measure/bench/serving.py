"""A server under load: prompts over HTTP to OpenAI's completions or chat, answers as streams.

Any server will do for texts, and any that takes prompts of tokens for random ones; fields are those
of vLLM's `bench serve`. `own_server` runs `octavo serve` for as long as a benchmark needs it.
"""

import asyncio
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from octavo.errors import OctavoError
from octavo.extras import need
from octavo.measure.bench.cases import ENDPOINTS, ServingCase
from octavo.measure.bench.requests import (
    METRICS,
    DataSet,
    Prompt,
    RequestTimes,
    goodput,
    summarize,
)
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.measure.report.tables import Cell, Table, format_column

# What vLLM prints of a run, and the metric.
LINES = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Maximum request concurrency": "max_concurrency",
    "Request rate configured (RPS)": "request_rate",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput",
    "Request goodput (req/s)": "request_goodput",
    "Output token throughput (tok/s)": "output_throughput",
    "Peak output token throughput (tok/s)": "max_output_tokens_per_s",
    "Peak concurrent requests": "max_concurrent_requests",
    "Total token throughput (tok/s)": "total_token_throughput",
}
DONE = "[DONE]"
MAX_BODY = 300  # characters of an error's body, for a message
MAX_LOG = 2000  # characters of what a server that failed had to say
POLL_S = 0.2  # between two looks at whether the server is ready
# Until a server that was asked to end is killed; it gives open requests GRACE_S.
GRACE_S, KILL_S = 5, 20


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
    load = case.workload
    prompts: Sequence[Prompt] = (
        load.prompts if isinstance(load, DataSet) else load.draw(case.vocab_size)
    )
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

        async def serve(prompt: Prompt, delay_s: float) -> RequestTimes:
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


async def _send(client: Any, case: ServingCase, model: str, prompt: Prompt) -> RequestTimes:
    """Send one prompt and read what comes; a request without a whole answer has an error."""
    import httpx

    # Serialized before the clock starts: 20,000 tokens take a while.
    content = json.dumps(_request_body(case, model, prompt))
    headers = {"Content-Type": "application/json"}
    request = client.stream("POST", ENDPOINTS[case.backend], content=content, headers=headers)
    parts: list[tuple[float, str]] = []  # when each came, and its text
    usage: Mapping[str, int] = {}
    error, is_done = None, False
    start_s = time.perf_counter()
    try:
        async with request as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")[:MAX_BODY]
                raise OctavoError(f"status {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                now_s, text = time.perf_counter(), line.removeprefix("data:").strip()
                is_done = is_done or text == DONE
                event = {} if text == DONE else _read_event(text)
                for choice in (event.get("choices") or ())[:1]:
                    if (part := _text_of(choice, is_first=not parts)) is not None:
                        parts.append((now_s, part))
                usage = event.get("usage") or usage
        if not is_done:
            error = f"the stream ended after {len(parts)} parts, without {DONE}"
        elif not parts:
            error = "the answer has no parts"
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    except OctavoError as failure:
        error = str(failure)
    return RequestTimes(
        input_len=usage.get("prompt_tokens", len(prompt.tokens)),
        output_len=usage.get("completion_tokens", len(parts)),
        start_s=start_s,
        parts_s=tuple(time_s for time_s, _ in parts),
        error=error,
        text="".join(text for _, text in parts),
    )


def _request_body(case: ServingCase, model: str, prompt: Prompt) -> dict[str, Any]:
    """The prompt as OpenAI's completions or chat take it."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if case.ignore_eos:
        body["ignore_eos"] = True
    if case.backend == "openai":
        return {**body, "prompt": prompt.text or list(prompt.tokens)}
    content: Any = prompt.text
    if prompt.images:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in prompt.images]
        content = [{"type": "text", "text": prompt.text}, *images]
    return {**body, "messages": [{"role": "user", "content": content}]}


def _read_event(text: str) -> Any:
    """The JSON of one event; OctavoError if it is none, or tells of an error."""
    try:
        event = json.loads(text)
    except ValueError:
        raise OctavoError(f"expected events of JSON, got {text[:MAX_BODY]}") from None
    if "error" in event:
        raise OctavoError(str(event["error"])[:MAX_BODY])
    return event


def _text_of(choice: Mapping[str, Any], *, is_first: bool) -> str | None:
    """The text of a part; None where it is no part of the answer.

    Of chats the first may be a role alone, and the last a reason to end. An answer of tokens
    without text, which random weights give, has one part: its end.
    """
    delta = choice.get("delta")
    if delta is None:
        return str(choice.get("text") or "")
    text = delta.get("content") or delta.get("reasoning_content")
    is_end = choice.get("finish_reason") is not None
    return str(text or "") if text or (is_first and is_end) else None


def vllm_result(
    case: ServingCase, served: Served, *, metadata: Mapping[str, str], is_detailed: bool
) -> dict[str, Any]:
    """The JSON document that vLLM's `bench serve` writes, of this run.

    is_detailed: with the times and errors of every request.
    """
    # NaN is null.
    metrics = {n: None if math.isnan(value) else value for n, value in served.metrics.items()}
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": case.backend,
        "backend": case.backend,
        "label": None,
        "model_id": served.model,
        "tokenizer_id": served.model,
        "num_prompts": case.workload.num_prompts,
        **metadata,
        "request_rate": _rate(case),
        "burstiness": case.burstiness,
        "max_concurrency": case.max_concurrency,
        **metrics,
        "request_goodput": metrics.get("request_goodput"),
        "rtfx": 0.0,  # of speech: none is sent
        "latencies": [0.0 if one.error else one.latency_s for one in served.times],
        "queue_times": [one.queue_s for one in served.times],
    }
    if case.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        result |= dict(zip(names, case.ramp, strict=True))
    if is_detailed:
        done = [one for one in served.times if one.error is None]
        result |= {
            "input_lens": [one.input_len for one in done],
            "output_lens": [one.output_len for one in done],
            "start_times": [one.start_s for one in done],
            "ttfts": [one.ttft_s for one in done],
            "itls": [one.itls_s for one in done],
            "generated_texts": [one.text for one in done],
            "errors": [one.error or "" for one in served.times],
        }
    return result


def told(case: ServingCase, served: Served) -> Iterator[str | Table]:
    """vLLM's lines as a table, then one of the latencies."""
    metrics = served.metrics
    values: dict[str, Cell] = {**metrics, "request_rate": str(case.request_rate)}
    values["max_concurrency"] = case.max_concurrency or "all"
    # Each in its own digits.
    lines = {line: format_column([values[key]])[0] for line, key in LINES.items() if key in values}
    caption = f"Serving Benchmark Result: {served.model}"
    yield Table(caption=caption, header=("", ""), rows=tuple(lines.items()))
    kinds = ["mean", "median", "std", *(f"p{p:g}" for p in case.percentiles)]
    times = {name: [metrics[f"{kind}_{name}_ms"] for kind in kinds] for name in METRICS}
    rows: list[tuple[Cell, ...]] = [(name.upper(), *own) for name, own in times.items()]
    header = ("ms", *map(str.capitalize, kinds))
    yield Table(caption="Latency", header=header, rows=tuple(rows))
    num_tokens, num_parts = metrics["total_output_tokens"], metrics["total_parts"]
    if num_parts < num_tokens:
        yield (
            f"{num_tokens:.0f} tokens came in {num_parts:.0f} parts: TTFT and ITL are those of "
            "parts, TPOT is that of tokens"
        )


def make_record(
    case: ServingCase, served: Served, *, command: str, has_own_server: bool, options: Sequence[str]
) -> Measurement:
    """The run as a record. The GPU is known if the server is our own: it is this machine's."""
    limits, (strategy, start, end) = case.goodput_ms.items(), case.ramp
    about: dict[str, Scalar | None] = {
        "model": served.model,
        **case.workload.about,
        "request_rate": _rate(case),
        "burstiness": case.burstiness,
        "backend": None if case.backend == "openai" else case.backend,
        "ramp_up": strategy and f"{strategy} {start:g} to {end:g} per second",
        "goodput": " ".join(f"{name}:{ms:g}" for name, ms in limits) or None,
        "max_concurrency": case.max_concurrency,
        "server_options": " ".join(options) or None,
    }
    machine = Machine.current()
    if has_own_server:
        from octavo.kernels.device import default_device
        from octavo.measure.bench.timing import machine_of

        machine = machine_of(default_device().torch_device)
    return Measurement(
        op="serve",
        impl="octavo" if has_own_server else "http",
        case={name: value for name, value in about.items() if value is not None},
        values=dict(served.metrics),
        machine=machine,
        command=command,
    )


def _rate(case: ServingCase) -> str | float:
    return "inf" if math.isinf(case.request_rate) else case.request_rate


@contextmanager
def own_server(arguments: Sequence[str], *, ready_s: float = 600.0) -> Iterator[str]:
    """The URL of a server with these arguments of `octavo serve`, which ends with the block.

    OctavoError with its last words if it ends before it is ready, or is not in ready_s seconds.
    """
    need("octavo bench serve", "httpx")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", *arguments]
    # Last, so that they are not what was asked for: the benchmark must find it.
    command += ["--host", "127.0.0.1", "--port", str(port), "--grace", str(GRACE_S)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            reason = _wait_until_ready(process, url, ready_s)
            if reason is not None:
                log.seek(0)
                words = log.read().decode(errors="replace")[-MAX_LOG:].strip()
                raise OctavoError(f"expected octavo serve to start, but {reason}: {words}")
            yield url
        finally:
            process.terminate()  # nothing happens if it has ended
            try:
                process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, ready_s: float) -> str | None:
    """None once the server is healthy; else why it is not."""
    import httpx

    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"it ended with {process.returncode}"
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return None
        except httpx.HTTPError:
            pass
        time.sleep(POLL_S)
    return f"it was not ready in {ready_s:g} s"
