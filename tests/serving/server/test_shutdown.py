"""SIGTERM under load, in a process of its own: every request ends, in time."""

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

sys.path.insert(0, str(Path(__file__).parent))

from child_server import child_server  # noqa: E402


async def ask(client, index):
    """How one request ended, as its client sees it."""
    body = {"prompt": "long:", "max_tokens": 60, "stream": index % 2 == 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    if response.status_code == 200 and index % 2 == 0:
        last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
        return "done" if last == "[DONE]" else json.loads(last)["error"]["code"]
    return "done" if response.status_code == 200 else response.json()["error"]["code"]


async def terminate_under_load(server, num_requests, num_signals):
    """(outcomes of requests before SIGTERM, of one after it, /health after it, seconds to the end).

    Seconds count from the last signal.
    """
    limits = httpx.Limits(max_connections=num_requests + 10)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60, limits=limits) as client:
        tasks = [asyncio.ensure_future(ask(client, index)) for index in range(num_requests)]
        num_in = 0
        while num_in < len(tasks):
            await asyncio.sleep(0.01)
            stats = (await client.get("/stats")).json()
            num_in = stats["num_open"] + stats["engine"]["num_finished"]
        server.process.send_signal(signal.SIGTERM)
        start_s = time.monotonic()
        await asyncio.sleep(0.05)
        late = await ask(client, 1)
        health = (await client.get("/health")).status_code
        if num_signals == 2:
            server.process.send_signal(signal.SIGTERM)
            start_s = time.monotonic()
        outcomes = await asyncio.gather(*tasks)
        await asyncio.to_thread(server.process.wait, 20)
        return outcomes, late, health, time.monotonic() - start_s


def check_end(server, num_requests, *, grace_s, num_signals=1):
    """SIGTERM to a server under load: it ends in time with 0, and each request by itself."""
    outcomes, late, health, took_s = asyncio.run(
        terminate_under_load(server, num_requests, num_signals)
    )
    log = server.log()
    assert server.process.returncode == 0, log
    assert (late, health) == ("shutting_down", 503)
    assert set(outcomes) <= {"done", "aborted"}
    # 2 s are for clients that read slowly, the others for a machine with much else to do.
    assert took_s < (grace_s if num_signals == 1 else 0) + 6
    lines = server.request_lines()
    assert len(lines) == len({line["answer_id"] for line in lines}) == num_requests
    assert {line["outcome"] for line in lines} <= {"length", "aborted"}
    assert "Traceback" not in log, log
    return Counter(outcomes)


@pytest.mark.parametrize(
    ("grace_s", "step_s", "num_signals"),
    [
        (20.0, 0.005, 1),
        pytest.param(0.3, 0.02, 1, marks=pytest.mark.slow),
        pytest.param(20.0, 0.02, 2, marks=pytest.mark.slow),
    ],
)
def test_sigterm(grace_s, step_s, num_signals):
    with child_server("fake", grace_s, step_s) as server:
        outcomes = check_end(server, 24, grace_s=grace_s, num_signals=num_signals)
    if grace_s > 10 and num_signals == 1:
        assert outcomes["done"] == 24
    else:
        assert outcomes["aborted"] >= 1


@pytest.mark.slow
def test_sigterm_with_a_model():
    pytest.importorskip("transformers")
    # Long enough for a busy machine to finish some of them, too short for all.
    with child_server("tiny", grace_s=8.0) as server:
        outcomes = check_end(server, 150, grace_s=8.0)
    assert outcomes["done"] >= 1
    assert outcomes["aborted"] >= 1
