"""Requests for several answers: n, lists of prompts, echo; all of them end, or none is left."""

import asyncio
import json
import logging

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import (
    CHAT,
    TEXT,
    events,
    listening,
    post,
    serving,
    with_client,
)


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def streamed_texts(chunks):
    """The text of each choice by its index, from the chunks of a stream."""
    texts = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def test_choices_have_seeds_of_their_own_and_come_again():
    engine = FakeEngine()
    asked = chat("hello", n=3, seed=5, max_tokens=60)
    bodies = [post(CHAT, asked, one).json() for one in (engine, FakeEngine())]
    texts = [[choice["message"]["content"] for choice in body["choices"]] for body in bodies]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert [choice["index"] for choice in bodies[0]["choices"]] == [0, 1, 2]
    requests = engine.added[:3]
    first = bodies[0]["id"]
    assert [one.request_id for one in requests] == [first, f"{first}-1", f"{first}-2"]
    assert [one.sampling.seed for one in requests] == [5, 6, 7]
    assert all(one.prompt is requests[0].prompt for one in requests)
    usage = bodies[0]["usage"]
    assert usage["prompt_tokens"] == len(requests[0].prompt)
    assert usage["completion_tokens"] == sum(map(len, texts[0]))
    alone = [
        post(CHAT, {**asked, "n": 1, "seed": seed}).json()["choices"][0]["message"]["content"]
        for seed in (5, 6, 7)
    ]
    assert alone == texts[0]


def test_the_seed_after_the_largest_is_the_smallest():
    engine = FakeEngine()
    post(TEXT, {"prompt": "x", "n": 2, "seed": 2**63 - 1}, engine)
    assert [one.sampling.seed for one in engine.added] == [2**63 - 1, -(2**63)]
    engine = FakeEngine()
    post(TEXT, {"prompt": "x", "n": 2}, engine)
    assert [one.sampling.seed for one in engine.added] == [None, None]


def test_greedy_choices_are_equal():
    body = post(CHAT, chat("hello", n=4, seed=5, temperature=0)).json()
    assert len(body["choices"]) == 4
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 1


def test_streams_interleave_their_choices():
    fields = {"n": 3, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    chunks, is_done = events(post(CHAT, chat("hello", **fields)))
    assert is_done and len({chunk["id"] for chunk in chunks}) == 1
    whole = post(CHAT, chat("hello", n=3, seed=1)).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert streamed_texts(chunks) == dict(enumerate(texts))
    ends = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert ends.count("stop") == 3
    indices = [c["choices"][0]["index"] for c in chunks[:-1]]
    assert indices != sorted(indices)  # none waits for another one's end
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all("usage" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("kind", ["texts", "tokens"])
def test_a_list_of_prompts(kind):
    prompts = ["say:one", "say:three", "say:two"]
    given = prompts if kind == "texts" else [list(map(ord, prompt)) for prompt in prompts]
    engine = FakeEngine()
    asked = {"prompt": given, "n": 2, "seed": 3, "logprobs": 0}
    body = post(TEXT, asked, engine).json()
    expected = ["one", "one", "three", "three", "two", "two"]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["logprobs"]["tokens"] for choice in body["choices"]] == list(map(list, expected))
    assert body["choices"][3]["logprobs"]["text_offset"] == list(range(5))
    assert [one.sampling.seed for one in engine.added] == [3, 4] * 3
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == sum(map(len, expected))
    chunks, is_done = events(post(TEXT, {**asked, "stream": True}))
    assert is_done and streamed_texts(chunks) == dict(enumerate(expected))


def test_each_prompt_has_its_own_room():
    engine = FakeEngine(max_context=20)
    answer = post(TEXT, {"prompt": ["long:", "long: " + "x" * 10]}, engine)
    assert answer.status_code == 200
    assert [one.sampling.max_tokens for one in engine.added] == [15, 4]
    refused = post(TEXT, {"prompt": ["long:", "long: " + "x" * 10], "min_tokens": 5}, engine)
    assert refused.status_code == 400 and "min_tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_puts_the_prompt_in_front(is_stream):
    for prompt in ("say:hé", list(map(ord, "say:hé"))):
        answer = post(TEXT, {"prompt": prompt, "echo": True, "stream": is_stream})
        if is_stream:
            assert streamed_texts(events(answer)[0]) == {0: "say:héhé"}
        else:
            assert answer.json()["choices"][0]["text"] == "say:héhé"
            assert answer.json()["usage"]["completion_tokens"] == 2
    answer = post(TEXT, {"prompt": "say:x", "echo": False, "best_of": 2, "n": 2})
    assert [choice["text"] for choice in answer.json()["choices"]] == ["x", "x"]


def test_choices_share_a_grammar_and_read_calls_of_their_own():
    tool = {"type": "function", "function": {"name": "look_up"}}
    asked = chat("x", n=2, tools=[tool], tool_choice="required")
    with listening() as (url, engine, _):
        body = httpx.post(url + CHAT, json=asked, timeout=20).json()
    first, second = (one.sampling.grammar for one in engine.added)
    assert first is second
    calls = [choice["message"]["tool_calls"][0] for choice in body["choices"]]
    assert {call["function"]["name"] for call in calls} == {"look_up"}
    assert calls[0]["id"] != calls[1]["id"]


class FailsOne(FakeEngine):
    """Its second request fails after two tokens, all others never end by themselves."""

    def _advance(self, one):
        if one.request.request_id.endswith("-1") and one.num_done >= 2:
            return self._end(one, "error", error="this request cannot go on")
        return super()._advance(one)


@pytest.mark.parametrize("is_stream", [False, True])
def test_one_choice_that_fails_ends_them_all(is_stream):
    engine = FailsOne(step_s=0.001)
    asked = {"prompt": "long:", "n": 3, "max_tokens": 3000, "stream": is_stream}

    async def scenario(client):
        answer = await client.post(TEXT, json=asked)
        while engine.num_open:
            await asyncio.sleep(0.005)
        return answer

    answer = with_client(scenario, engine)
    if is_stream:
        documents, is_done = events(answer)
        assert not is_done and documents[-1]["error"]["message"] == "this request cannot go on"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
    assert sorted(engine.ended.values()) == ["abort", "abort", "error"]


def test_a_choice_that_ends_before_another_fails_is_no_success(caplog):
    caplog.set_level(logging.INFO, "octavo.requests")

    class Mixed(FakeEngine):
        def add(self, request):
            super().add(request)
            if request.request_id.endswith("-1"):
                self.waiting[-1].answer = self.waiting[-1].answer[:1]

        def _advance(self, one):
            if not one.request.request_id.endswith("-1") and one.num_done >= 3:
                return self._end(one, "error", error="too bad")
            return super()._advance(one)

    assert post(TEXT, {"prompt": "long:", "n": 2}, Mixed()).status_code == 500
    (line,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == "octavo.requests"]
    assert line["outcome"] == "error"
    assert line["prompt_tokens"] == 5 and line["completion_tokens"] == 4


def test_a_time_out_ends_all_choices():
    engine = FakeEngine(step_s=0.02)

    async def scenario(client):
        asked = {"prompt": ["long:", "long:"], "n": 2, "max_tokens": 1000}
        answer = await client.post(TEXT, json=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        while engine.num_open:
            await asyncio.sleep(0.005)

    with_client(scenario, engine, timeout_s=0.1)
    assert list(engine.ended.values()) == ["abort"] * 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_all_choices(is_stream):
    engine = FakeEngine(step_s=0.005)

    async def leave(url, server):
        async with httpx.AsyncClient(timeout=20) as client:
            asking = client.post(url + CHAT, json=chat("long:", n=3, stream=is_stream))
            task = asyncio.ensure_future(asking)
            while len(engine.added) < 3:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while engine.num_open or server.engine.num_open:
            await asyncio.sleep(0.005)

    with listening(engine) as (url, _, server):
        asyncio.run(asyncio.wait_for(leave(url, server), 20))
    assert list(engine.ended.values()) == ["abort"] * 3


@pytest.mark.parametrize("limit", ["engine", "server"])
def test_there_is_room_for_all_choices_or_none_is_begun(limit):
    engine = FakeEngine(step_s=0.002, max_queue=4 if limit == "engine" else 100, max_num_seqs=1)

    async def run():
        settings = ServerSettings(max_open=5 if limit == "server" else 100)
        async with serving(engine, settings) as client:
            first = asyncio.ensure_future(client.post(TEXT, json={"prompt": "long:", "n": 3}))
            while len(engine.running) + len(engine.waiting) < 3:
                await asyncio.sleep(0.002)
            refused = await client.post(TEXT, json={"prompt": "say:x", "n": 3})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert client.server.engine.num_open == 3
            fits = await client.post(TEXT, json={"prompt": "say:x", "n": 2})
            assert fits.status_code == 200
            assert len((await first).json()["choices"]) == 3
            assert client.server.engine.num_open == 0

    asyncio.run(asyncio.wait_for(run(), 20))
    assert engine.num_open == 0
    assert set(engine.ended.values()) <= {"length", "stop", "abort"}


def test_more_choices_than_the_server_ever_takes_are_a_400():
    answer = post(CHAT, chat("x", n=5), max_open=4)
    assert answer.status_code == 400
    assert "5 choices exceed the 4" in answer.json()["error"]["message"]


def test_128_choices_are_answered():
    body = post(TEXT, {"prompt": ["say:hi"] * 32, "n": 4}, FakeEngine(max_num_seqs=64)).json()
    assert [choice["text"] for choice in body["choices"]] == ["hi"] * 128
