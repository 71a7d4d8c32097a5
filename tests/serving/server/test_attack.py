"""A hundred clients who chat, and one who means harm: nobody but that one notices."""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")
pytest.importorskip("PIL")

from octavo_testkit.serving.child_server import child_server

pytestmark = [pytest.mark.slow, pytest.mark.alone]

NUM_CLIENTS, NUM_ROUNDS, ROUND_S, THINK_S = 100, 3, 14.0, 8.0
ATTACKS_PER_S = 4.0
MAX_STALL_S = 0.25
MAX_SLOWDOWN = 2.0
MIN_ANSWERED = 0.7
MAX_GROWN_BYTES = 300 * 2**20
# A machine that lets a waking process wait for so long says nothing about the server on it.
MAX_MACHINE_STALL_S = 0.1
MAX_ROUNDS = 7
HERE = Path(__file__).parent

METRONOME = """
import select, sys, time
last_s, worst_s = time.monotonic(), 0.0
while not select.select([sys.stdin], [], [], 0.01)[0]:
    now_s = time.monotonic()
    last_s, worst_s = now_s, max(worst_s, now_s - last_s)
print(worst_s)
"""


async def ask(host, port, index):
    """Seconds to the first token of a streamed answer, which is read to its end."""
    body = {"prompt": f"{index}: hello, server", "max_tokens": 8, "stream": True}
    content = json.dumps({**body, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    start_s = time.monotonic()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode())
    writer.write(content)
    answer = await reader.readuntil(b"data: ")
    first_s = time.monotonic() - start_s
    answer += await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert b"data: [DONE]" in answer and b'"error"' not in answer, answer
    return first_s


async def chat(host, port, index, until_s):
    """The times to the first token of one client, who thinks before each question."""
    thinking, times = random.Random(index), []
    await asyncio.sleep(thinking.uniform(0, THINK_S))
    while time.monotonic() < until_s:
        times.append(await ask(host, port, index))
        await asyncio.sleep(thinking.uniform(0, 2 * THINK_S))
    return times


async def crowd(host, port):
    until_s = time.monotonic() + ROUND_S
    clients = (chat(host, port, index, until_s) for index in range(NUM_CLIENTS))
    return sorted(sum(await asyncio.gather(*clients), []))


def p95(times):
    return times[int(0.95 * (len(times) - 1))]


@contextmanager
def attacking(host, port):
    """Inside, a process attacks; yields what its requests got, afterwards."""
    command = [sys.executable, str(HERE / "attacker.py"), host, str(port)]
    command += [str(ATTACKS_PER_S), str(ROUND_S + 4)]
    statuses = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19)
    ) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(2)
        yield statuses
        statuses |= json.loads(process.stdout.readline())


@contextmanager
def metronome():
    """Inside, an idle process wakes up 100 times a second; yields its longest wait, afterwards."""
    waits_s = []
    command = [sys.executable, "-c", METRONOME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield waits_s
        process.stdin.close()
        waits_s.append(float(process.stdout.read()))


@dataclass(frozen=True)
class Round:
    """What one calm and one disturbed crowd saw.

    ratio: of the times to the first token. answered: how many questions the disturbed crowd had
    answered, as a share of the calm one's. stall_s, machine_s: how long the server's event loop
    and the machine stood still.
    """

    ratio: float
    answered: float
    stall_s: float
    machine_s: float


def run_round(server, place):
    with metronome() as waits_s:
        calm = asyncio.run(crowd(*place))
        server.memory()  # starts to measure anew
        with attacking(*place) as statuses:
            disturbed = asyncio.run(crowd(*place))
    server.settled_metrics(60)
    memory = server.memory()
    found = Round(
        ratio=p95(disturbed) / p95(calm),
        answered=len(disturbed) / len(calm),
        stall_s=memory["max_stall_s"],
        machine_s=waits_s[0],
    )
    print(f"p95 to first token: {p95(calm):.3f} s calm, {p95(disturbed):.3f} s under attack")
    print(f"{found}, memory {memory}, {statuses}")
    check(statuses)
    return found, memory


def test_an_attack_disturbs_nobody():
    with child_server("vision") as server:
        url = urlsplit(server.base_url)
        place = url.hostname, url.port
        asyncio.run(crowd(*place))  # warms up
        rounds, quiet, memory = [], [], [server.memory()]
        while len(rounds) < MAX_ROUNDS and len(quiet) < NUM_ROUNDS:
            found, used = run_round(server, place)
            rounds.append(found)
            memory.append(used)
            if found.machine_s < MAX_MACHINE_STALL_S:
                quiet.append(found)
        peak = max(one["peak_bytes"] for one in memory[1:])
        assert peak - memory[0]["all_bytes"] < MAX_GROWN_BYTES, memory
        # The first round fills caches; what the last ones add would be a leak. Workers are not
        # counted: they are killed and started anew, and each takes tens of megabytes.
        assert memory[-1]["rss_bytes"] - memory[1]["rss_bytes"] < 60 * 2**20, memory
        assert memory[-1]["num_files"] <= memory[0]["num_files"] + 8, memory
        assert memory[-1]["num_tasks"] <= memory[0]["num_tasks"] + 2, memory
        log = server.log()
        assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
    if not quiet:
        pytest.skip(f"the machine itself stood still in all {MAX_ROUNDS} rounds: {rounds}")
    assert min(one.answered for one in quiet) >= MIN_ANSWERED, rounds
    assert max(one.stall_s for one in quiet) <= MAX_STALL_S, rounds
    assert statistics.median(one.ratio for one in quiet) < MAX_SLOWDOWN, rounds


def check(statuses):
    """Each attack was refused, cut off, or is legal and was answered."""
    legal = {"1,000 properties", "heavy pattern", "one huge image"}
    for name, counts in statuses.items():
        allowed = {"left", "400", "413", "429", "504"} | ({"200"} if name in legal else set())
        assert set(counts) <= allowed, (name, counts)
