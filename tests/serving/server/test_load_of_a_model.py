"""500 clients at once of a server with a model, some of them bad: nothing is left of them."""

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import struct
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")

import httpx

from octavo_testkit.serving.child_server import child_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc"),
]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_CLIENTS, NUM_GROWING = 500, 12
# A client that waits longer than this hangs.
HANG_S = 240
# What a round may leave: 16 kB for each of its requests (measured: 2 MB in all, as the allocator's
# pools fill), and less than one object (measured: none; a request that is kept has dozens).
MAX_GROWN_BYTES = 8 * 2**20
MAX_GROWN_OBJECTS = NUM_CLIENTS // 2
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
VARIANTS = [
    {},
    {"logprobs": 2},
    {"stop": ["e", "the"]},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
]
MALFORMED = [
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "x", "n": 129}',
    b"\xff",
    b'{"prompt": ""}',
]


def text_body(index, **fields):
    """A request for a completion; neighbours have prompts that begin alike."""
    prompt = "The cache holds keys. " * (1 + index % 5) + f"{index % 50}"
    return {"prompt": prompt, "max_tokens": 12 + index % 40, "stream": index % 2 == 0, **fields}


def is_turned_away(response):
    """Whether the server, or its machine, was too busy; it says so, and when to come back."""
    if response.status_code == 429:
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
    if response.status_code == 503:
        assert response.json()["error"]["code"] == "worker_busy"
    # 408: nobody waits for a late body while others need its place.
    return response.status_code in (408, 429, 503)


def check_answer(response, is_stream):
    """ "answered" or "turned away": both whole, nothing else."""
    if is_turned_away(response):
        return "turned away"
    assert response.status_code == 200, response.text
    if not is_stream:
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")
        return "answered"
    parts = response.text.strip().split("\n\n")
    assert parts[-1] == "data: [DONE]", parts[-1]
    assert json.loads(parts[-2][6:])["choices"][0]["finish_reason"] in ("stop", "length")
    return "answered"


async def completing(client, index):
    body = text_body(index, **VARIANTS[index % len(VARIANTS)])
    return check_answer(await client.post(TEXT, json=body), body["stream"])


async def chatting(client, index):
    messages = [{"role": "user", "content": f"say {index}"}]
    body = {"messages": messages, "max_tokens": 20, "stream": index % 2 == 0}
    return check_answer(await client.post(CHAT, json=body), body["stream"])


async def leaving(client, index):
    """Ask for much, and go away: inside the body, before the answer, or at some event of it."""
    url = client.base_url
    body = json.dumps(text_body(index, max_tokens=300, ignore_eos=True)).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    is_half, is_reset = index % 8 == 0, index % 3 == 0
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head.encode() + body[: len(body) // 2 if is_half else None])
    await writer.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(random.uniform(0.0, 4.0)):
            for _ in range(random.randrange(1, 20)):
                await reader.readline()
    if is_reset:  # lingering for no time: RST in place of FIN
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return "left"


async def malformed(client, index):
    content = MALFORMED[index % len(MALFORMED)]
    headers = {"content-type": "application/json"}
    response = await client.post(TEXT, content=content, headers=headers)
    if is_turned_away(response):
        return "turned away"
    assert response.status_code == 400, response.text
    return "refused"


async def too_long(client, index):
    response = await client.post(TEXT, json={"prompt": "q" * 3000})
    if is_turned_away(response):
        return "turned away"
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    return "refused"


async def too_large(client, index):
    response = await client.post(TEXT, json={"prompt": "q" * 30_000})
    assert response.status_code == 413
    return "refused"


KINDS = [
    *[leaving] * 4,
    *(malformed, malformed, too_long, too_large),
    *[chatting] * 4,
    *[completing] * 8,
]


async def crowd(base_url):
    """How each of the clients, all of whom come at once, sees its end."""
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits) as client:
        clients = (KINDS[index % len(KINDS)](client, index) for index in range(NUM_CLIENTS))
        return await asyncio.gather(*(asyncio.wait_for(one, HANG_S) for one in clients))


async def grow_together(base_url):
    """Ask for answers that begin together and need more pages than there are."""
    body = {"prompt": "again", "max_tokens": 150, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=base_url, timeout=HANG_S) as client:
        asked = (client.post(TEXT, json=body) for _ in range(NUM_GROWING))
        return [check_answer(one, False) for one in await asyncio.gather(*asked)]


def outcomes_of(found):
    """How many requests had each outcome."""
    counts = Counter()
    for name, value in found.items():
        if match := re.search(r'^octavo_requests_total{outcome="(\w+)",route="/v1', name):
            counts[match[1]] += int(value)
    return counts


def test_a_crowd_leaves_nothing_behind():
    with child_server("tiny") as server:
        rounds, seen, memory = [], [], []
        for _ in range(3):
            random.seed(0)
            rounds.append(Counter(asyncio.run(crowd(server.base_url))))
            assert asyncio.run(grow_together(server.base_url)) == ["answered"] * NUM_GROWING
            seen.append(server.settled_metrics())
            memory.append(server.memory())
        for found in rounds:
            assert found["left"] == NUM_CLIENTS // 5
            assert found["answered"] >= 60
            assert found["turned away"] >= 1
            assert found["refused"] >= NUM_CLIENTS // len(KINDS)
            assert found["refused"] + found["turned away"] >= 3 * NUM_CLIENTS // len(KINDS)
        assert seen[-1]["octavo_preemptions_total"] >= 1
        outcomes = outcomes_of(seen[-1])
        assert set(outcomes) <= {"stop", "length", "refused", "cancelled"}
        assert outcomes["cancelled"] >= 30
        assert outcomes["stop"] + outcomes["length"] >= (
            sum(r["answered"] + NUM_GROWING for r in rounds)
        )
        log = server.log()
        assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
        answers = [line["answer_id"] for line in server.request_lines()]
        assert len(answers) == len(set(answers))
        # The first round fills caches and the allocator's pools.
        assert memory[2]["rss_bytes"] - memory[1]["rss_bytes"] <= MAX_GROWN_BYTES, memory
        assert memory[2]["num_objects"] - memory[1]["num_objects"] <= MAX_GROWN_OBJECTS, memory
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
