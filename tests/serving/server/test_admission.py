"""What clients send before the engine has anything to do: it is bounded, and ends with them."""

import asyncio
import contextlib
import functools
import json
import signal
import socket
import time
from collections import Counter

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from octavo.serving.server import async_engine
from octavo.serving.server.admission import Gate
from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.child_server import child_server
from octavo_testkit.serving.fake_engine import FakeEngine, SlowTokenizer
from octavo_testkit.serving.fake_server import CHAT, HELLO, TEXT, listening, post, with_client

MIB = 2**20


def slow_engine():
    """One whose context is so long that the length of a text does not tell that it is too long."""
    return FakeEngine(tokenizer=SlowTokenizer(), max_context=MIB // 2)


def format_of(schema):
    named = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def timed(base_url, **body):
    """(status, seconds) of a small request."""
    start_s = time.monotonic()
    answer = httpx.post(base_url + CHAT, json={"messages": HELLO, **body}, timeout=60)
    return answer.status_code, time.monotonic() - start_s


def test_clients_that_leave_take_the_work_on_their_long_prompts_with_them():
    """Three prompts of 8 MiB held up everybody for 55 s."""
    with listening(slow_engine()) as (base_url, engine, server):
        for _ in range(3):
            with pytest.raises(httpx.TimeoutException):
                httpx.post(base_url + TEXT, json={"prompt": "q" * 8 * MIB}, timeout=1)
        status, took_s = timed(base_url)
        assert status == 200
        assert took_s < 10
        deadline = time.monotonic() + 20
        while server.engine.num_open:
            assert time.monotonic() < deadline, "their slots are still taken"
            time.sleep(0.01)
        assert len(engine.added) == 1


def test_the_beginning_of_a_text_shows_that_it_is_too_long():
    """Most of it is never encoded."""
    engine = FakeEngine(tokenizer=SlowTokenizer())
    start_s = time.monotonic()
    answer = post(TEXT, {"prompt": "q" * 8 * MIB}, engine)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "8,388,608 characters" in error["message"]
    assert time.monotonic() - start_s < 15


def test_a_long_prompt_does_not_hold_up_short_ones():
    async def scenario(client):
        long = asyncio.ensure_future(client.post(TEXT, json={"prompt": "q" * 2 * MIB}))
        await asyncio.sleep(0.1)
        short = await client.post(CHAT, json={"messages": HELLO})
        assert short.status_code == 200
        assert not long.done()
        answer = await long
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    with_client(scenario, slow_engine())


def test_slots_and_clocks_come_before_bodies():
    """Twenty bodies of 4 MiB against a limit of 2 got neither 429 nor 504."""

    async def scenario(client):
        async def ask():
            start_s = time.monotonic()
            answer = await client.post(TEXT, json={"prompt": "q" * 4 * MIB})
            return answer, time.monotonic() - start_s

        answers = await asyncio.gather(*(ask() for _ in range(20)))
        assert Counter(answer.status_code for answer, _ in answers) == {429: 18, 504: 2}
        assert all(took_s < 8 for _, took_s in answers)
        refused = next(answer for answer, _ in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"

    with_client(scenario, slow_engine(), max_open=2, timeout_s=1.0)


def test_the_clock_runs_while_a_body_comes():
    with listening(settings=ServerSettings(timeout_s=0.5)) as (base_url, _, server):
        host, port = base_url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
            assert slow.recv(4096).startswith(b"HTTP/1.1 504 ")
        assert server.engine.num_open == 0


@pytest.mark.parametrize("value", [b"{},", b"[],", b"0,", b'"",'])
def test_bodies_of_many_tiny_values_are_refused_before_they_are_read(value):
    body = b'{"messages": [' + value * (ServerSettings().max_body_values + 1) + b"0]}"

    async def scenario(client):
        start_s = time.monotonic()
        answer = await client.post(CHAT, content=body)
        return answer, time.monotonic() - start_s

    answer, took_s = with_client(scenario)
    assert answer.status_code == 413
    assert "300,000 commas and brackets" in answer.json()["error"]["message"]
    assert took_s < 2


def test_large_bodies_are_limited_in_sum():
    async def scenario(client):
        body = {"prompt": "q" * MIB}
        first = asyncio.ensure_future(client.post(TEXT, json=body))
        await asyncio.sleep(0.3)
        second = await client.post(TEXT, json=body)
        assert second.status_code == 429
        assert second.json()["error"]["type"] == "rate_limit_error"
        small = await client.post(CHAT, json={"messages": HELLO})
        assert small.status_code == 200
        await first
        again = await client.post(TEXT, json=body)
        assert again.json()["error"]["code"] == "context_length_exceeded"

    with_client(scenario, slow_engine(), max_open_body_bytes=3 * MIB // 2)


def test_refused_bodies_are_given_back_once():
    """Bodies that were refused half-way were subtracted more than they had been added."""

    async def scenario(client):
        app = client._transport.app
        for _ in range(3):
            answer = await client.post(TEXT, content=b'"' + b"q" * 3 * MIB)
            assert answer.status_code == 413
        assert app.middleware_stack is not None
        stack = app.middleware_stack
        while not isinstance(stack, Gate):
            stack = stack.app
        assert stack.num_large_bytes == 0

    with_client(scenario, max_body_bytes=2 * MIB)


def test_idle_requests_make_way_for_others(monkeypatch):
    """Two headers without bodies took both places of a server for a minute."""
    monkeypatch.setattr(async_engine, "PATIENCE_S", 0.02)
    with listening(settings=ServerSettings(max_open=4)) as (base_url, _, server):
        host, port = base_url.removeprefix("http://").split(":")
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        idle = []
        for _ in range(6):
            one = socket.create_connection((host, int(port)), timeout=20)
            one.sendall(f"{head}Content-Length: 10\r\n\r\n".encode())
            idle.append(one)
            time.sleep(0.05)
        assert timed(base_url)[0] == 200
        assert idle[0].recv(4096).startswith(b"HTTP/1.1 408 ")
        for one in idle:
            one.close()
        deadline = time.monotonic() + 20
        while server.engine.num_open:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_tokenizing_ends_with_its_client():
    with listening(slow_engine()) as (base_url, _, server):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(base_url + "/tokenize", json={"prompt": "q" * 8 * MIB}, timeout=1)
        deadline = time.monotonic() + 15
        while server.engine.num_open:
            assert time.monotonic() < deadline, "its slot is still taken"
            time.sleep(0.01)


@pytest.mark.parametrize(
    "parameters",
    [
        functools.reduce(lambda below, _: {"items": below}, range(300), {}),
        {"description": "\ud800"},
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1200)}},
    ],
    ids=["deep", "surrogate", "chain"],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parameters_that_nobody_can_write_are_no_failure_of_the_server(parameters, choice):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = json.dumps({"messages": HELLO, "tools": [tool], "tool_choice": choice})

    async def scenario(client):
        return await client.post(CHAT, content=body)

    answer = with_client(scenario)
    assert answer.status_code in (200, 400), answer.text


def test_a_schema_of_many_references_does_not_hold_up_the_loop():
    """Forty references to each other took the event loop 3 s."""
    many = [{"$ref": "#/$defs/H"}] * 60
    parameters = {"anyOf": many, "allOf": many, "$defs": {"H": {"anyOf": many}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}

    async def scenario(client):
        asked = {"messages": HELLO, "tools": [tool], "tool_choice": "required"}
        slow = asyncio.ensure_future(client.post(CHAT, json=asked))
        longest_s, last_s = 0.0, time.monotonic()
        while not slow.done():
            await asyncio.sleep(0.01)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        assert (await slow).status_code in (200, 400)
        return longest_s

    assert with_client(scenario) < 1.5


def test_an_echo_is_not_multiplied_without_end():
    answer = post(
        TEXT, {"prompt": "q" * 50_000, "n": 100, "echo": True}, FakeEngine(max_context=MIB)
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "echo"


def test_tiny_chunks_are_refused():
    """One connection with chunks of one byte took most of the event loop's time."""
    with listening() as (base_url, _, _):
        host, port = base_url.removeprefix("http://").split(":")
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as attacker:
            attacker.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            with contextlib.suppress(ConnectionError):
                attacker.sendall(b"1\r\nx\r\n" * 40_000)
            with contextlib.suppress(ConnectionError):
                assert attacker.recv(4096).startswith(b"HTTP/1.1 400 ")
        body = b'{"prompt": "say:hi"}' + b" " * 100_000

        def chunks():
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        headers = {"Content-Type": "application/json"}
        assert httpx.post(base_url + TEXT, content=chunks(), headers=headers).status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"property_{i}": {"type": "string"} for i in range(9500)}},
        {"const": "x" * 10**6},
    ],
)
def test_huge_schemas_are_refused_at_once(schema):
    """A schema of 9,500 properties held up everybody for 30 s and more."""
    for asked in (
        format_of(schema),
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
        },
    ):
        start_s = time.monotonic()
        answer = post(CHAT, {"messages": HELLO, **asked})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "schema_too_large"
        assert time.monotonic() - start_s < 5


def test_an_endless_schema_holds_up_nobody_and_not_the_end():
    """SIGTERM with 2 s of grace took 32 s while a grammar was compiled."""
    with child_server("fake", grace_s=1.0) as server:
        with pytest.raises(httpx.ReadTimeout):
            body = {"messages": HELLO, **format_of({"type": "endless"})}
            httpx.post(server.base_url + CHAT, json=body, timeout=1)
        assert timed(server.base_url)[0] == 200
        host, port = server.base_url.removeprefix("http://").split(":")
        body = b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
        body += b'"json_schema", "json_schema": {"name": "a", "schema": {"type": "endless"}}}}'
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as waiting:
            waiting.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while httpx.get(server.base_url + "/stats").json()["num_open"] < 1:
                time.sleep(0.01)
            start_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(25) == 0
            # An idle machine takes 4 s, one with three times as much to do 15.
            assert time.monotonic() - start_s < 20
        assert "Traceback" not in server.log(), server.log()


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "string", "pattern": "(?=x)"},
        {"const": "x" * 10**6},
    ],
)
def test_schemas_that_nobody_can_follow_are_the_clients_mistake(real_grammars, schema):
    for asked in (
        format_of(schema),
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
        },
    ):
        answer = httpx.post(real_grammars + CHAT, json={"messages": HELLO, **asked}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert "schema" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def real_grammars():
    """The address of a server that compiles schemas as the real one does."""
    pytest.importorskip("llguidance")
    pytest.importorskip("transformers")
    from octavo_testkit.models.tokenizers_of_kinds import byte_level

    class Engine(FakeEngine):
        eos_tokens = (9,)

    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = Engine(tokenizer=tokenizer)
    with listening(engine, ServerSettings(), make_grammar=None) as (base_url, _, _):
        yield base_url
