"""SIGTERM under load, in a process of its own: every request ends, in time."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

HERE = Path(__file__).parent
SRC = HERE.parents[2] / "src"


def start(grace_s, step_s):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "listen.py"), str(port), str(grace_s), str(step_s)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, f"http://127.0.0.1:{port}"


async def ask(client, index):
    """How one request ended, as its client sees it."""
    body = {"prompt": "long:", "max_tokens": 60, "stream": index % 2 == 0}
    response = await client.post("/v1/completions", json=body)
    if response.status_code == 200 and index % 2 == 0:
        last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
        return "done" if last == "[DONE]" else json.loads(last)["error"]["code"]
    return "done" if response.status_code == 200 else response.json()["error"]["code"]


async def terminate_under_load(process, base_url, num_signals):
    """(outcomes of requests before SIGTERM, of one after it, seconds to the end)."""
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=base_url, timeout=30, limits=limits) as client:
        for _ in range(400):
            try:
                assert (await client.get("/health")).status_code == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
        tasks = [asyncio.ensure_future(ask(client, index)) for index in range(24)]
        num_in = 0
        while num_in < len(tasks):
            await asyncio.sleep(0.01)
            stats = (await client.get("/stats")).json()
            num_in = stats["num_open"] + stats["engine"]["num_finished"]
        process.send_signal(signal.SIGTERM)
        start_s = time.monotonic()
        await asyncio.sleep(0.05)
        late = await ask(client, 1)
        health = (await client.get("/health")).status_code
        if num_signals == 2:
            process.send_signal(signal.SIGTERM)
        outcomes = await asyncio.gather(*tasks)
        await asyncio.to_thread(process.wait, 20)
        return outcomes, late, health, time.monotonic() - start_s


@pytest.mark.parametrize(
    ("grace_s", "step_s", "num_signals"), [(20.0, 0.005, 1), (0.3, 0.02, 1), (20.0, 0.02, 2)]
)
def test_sigterm(grace_s, step_s, num_signals):
    process, base_url = start(grace_s, step_s)
    try:
        outcomes, late, health, took_s = asyncio.run(
            terminate_under_load(process, base_url, num_signals)
        )
    finally:
        process.kill()
        log = process.stderr.read()
        process.stderr.close()
        process.wait()
    assert process.returncode == 0, log
    assert (late, health) == ("shutting_down", 503)
    if grace_s > 10 and num_signals == 1:
        assert outcomes == ["done"] * 24
    else:
        assert "aborted" in outcomes
        assert set(outcomes) <= {"done", "aborted"}
    assert took_s < (grace_s if num_signals == 1 else 0) + 3
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    answers = [line for line in lines if "answer_id" in line]
    assert len(answers) == len({line["answer_id"] for line in answers}) == 24
    assert {line["outcome"] for line in answers} <= {"length", "aborted"}
    assert "Traceback" not in log
