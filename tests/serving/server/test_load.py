"""Many clients at once, some of them bad: no request is stuck, and each ends exactly once."""

import asyncio
import json
import logging
import random
from collections import Counter

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import listening

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MALFORMED = [b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "n": 129}', b"\xff"]


async def good(client, index):
    content = f"say:answer {index}"
    body = {"messages": [{"role": "user", "content": content}], "stream": index % 2 == 0}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200
    if index % 2:
        assert response.json()["choices"][0]["message"]["content"] == f"answer {index}"
        return "answered"
    parts = response.text.strip().split("\n\n")
    assert parts[-1] == "data: [DONE]"
    deltas = [json.loads(part[6:])["choices"][0]["delta"] for part in parts[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == f"answer {index}"
    return "answered"


async def leaving(client, index):
    """Ask for something long, and go away: before, during or between events."""
    body = {"prompt": "long:", "max_tokens": 3000, "stream": index % 2 == 0}
    try:
        async with asyncio.timeout(random.uniform(0.0, 0.5)):
            async with client.stream("POST", TEXT, json=body) as response:
                async for _ in response.aiter_bytes():
                    pass
    except TimeoutError:
        return "left"
    raise AssertionError("expected to leave first")


async def malformed(client, index):
    content = MALFORMED[index % len(MALFORMED)]
    headers = {"content-type": "application/json"}
    response = await client.post(TEXT, content=content, headers=headers)
    assert response.status_code == 400
    return "refused"


async def too_long(client, index):
    response = await client.post(TEXT, json={"prompt": "x" * 5000})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    return "refused"


async def crowd(base_url, num_clients):
    kinds = [leaving, leaving, malformed, too_long, *[good] * 6]
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=limits) as client:
        found = await asyncio.gather(
            *(kinds[index % 10](client, index) for index in range(num_clients))
        )
    return Counter(found)


def test_a_crowd(caplog):
    num_clients = 60
    caplog.set_level(logging.INFO, "octavo.requests")
    engine = FakeEngine(max_num_seqs=32, step_s=0.0005)
    with listening(engine, ServerSettings()) as (base_url, _, server):
        found = asyncio.run(crowd(base_url, num_clients))
        tenth = num_clients // 10
        assert found == {"answered": 6 * tenth, "left": 2 * tenth, "refused": 2 * tenth}

        async def settle():
            for _ in range(1000):
                if not (engine.num_open or server.engine.num_open):
                    return
                await asyncio.sleep(0.01)

        asyncio.run(settle())
        assert (engine.num_open, server.engine.num_open) == (0, 0)
        assert server.status() == (200, "ok")
    # The engine ended what it was given, and the log has one line for each.
    assert len(engine.ended) == len(engine.added)
    assert Counter(engine.ended.values())["stop"] == 6 * tenth
    records = [record for record in caplog.records if record.name == "octavo.requests"]
    lines = [json.loads(record.getMessage()) for record in records]
    outcomes = Counter(line["outcome"] for line in lines)
    assert outcomes["stop"] == 6 * tenth
    assert outcomes["refused"] == 2 * tenth
    assert set(outcomes) <= {"stop", "refused", "cancelled"}
    ids = [line["answer_id"] for line in lines if "answer_id" in line]
    assert len(ids) == len(set(ids))
    assert {request.request_id for request in engine.added} <= set(ids)
