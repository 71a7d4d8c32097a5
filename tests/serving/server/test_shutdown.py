"""SIGTERM and Ctrl-C under load, in a process of its own: every request ends, in time."""

import asyncio
import json
import signal
import time
from collections import Counter
from contextlib import closing

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from octavo_testkit.serving.child_server import child_server
from octavo_testkit.serving.raw_client import connect, post

END_S = 1.5  # from the end of the last request, or of its grace, to the end of the process
BUSY_S = 2.0  # for a machine with much else to do


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
    assert took_s < (grace_s if num_signals == 1 else 0) + END_S + BUSY_S
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
@pytest.mark.alone
def test_sigterm_with_a_model():
    pytest.importorskip("transformers")
    # Long enough for a busy machine to finish some of them, too short for all.
    with child_server("tiny", grace_s=8.0) as server:
        outcomes = check_end(server, 150, grace_s=8.0)
    assert outcomes["done"] >= 1
    assert outcomes["aborted"] >= 1


def stuck_stream(server):
    """A client of an endless stream that reads nothing of it, once its answer has begun."""
    client = connect(server.base_url, receive_buffer=4096)
    body = {"prompt": "long:", "max_tokens": 4000, "stream": True}
    client.sendall(post("/v1/completions", body))
    client.recv(1)
    return client


def seconds_to_end(server, *signals):
    """Between the last of these signals and the end."""
    for number in signals:
        time.sleep(0.3)  # a signal that is pending swallows another of its kind
        server.process.send_signal(number)
    start_s = time.monotonic()
    server.process.wait(60)
    assert server.process.returncode == 0, server.log()
    return time.monotonic() - start_s


# With a step of 3 ms, 4,000 tokens take 12 s. An event has the model's name, and so 40 kB: after a
# hundred of them the kernel takes no more from the server.
STUCK = {"step_s": 0.003, "model_names": ["m" * 40_000]}


@pytest.mark.parametrize(
    ("signals", "grace_s", "expected_s"),
    [
        ([signal.SIGTERM], 1.0, 1.0),
        ([signal.SIGINT, signal.SIGINT], 30.0, 0.0),
        pytest.param([signal.SIGINT], 30.0, 5.0, marks=pytest.mark.slow),
    ],
    ids=["SIGTERM", "two times Ctrl-C", "Ctrl-C"],
)
def test_a_client_that_does_not_read_holds_up_no_end(signals, grace_s, expected_s):
    with child_server("fake", grace_s, **STUCK) as server, closing(stuck_stream(server)):
        time.sleep(1)
        took_s = seconds_to_end(server, *signals)
        log, lines = server.log(), server.request_lines()
    assert expected_s - 0.1 <= took_s < expected_s + END_S + BUSY_S
    assert [line["outcome"] for line in lines] == ["aborted"]
    assert "Traceback" not in log, log
    again = "signal" if signals[0] == signal.SIGTERM else "Ctrl-C"
    shown_s = f"{min(grace_s, 5.0) if signals[0] == signal.SIGINT else grace_s:g}"
    assert f"1 open requests get {shown_s} s to finish; a second {again} aborts them" in log
