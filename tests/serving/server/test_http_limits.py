"""Slow clients, many connections, ambiguous lengths: each costs its own connection, no more."""

import json
import logging
import threading
import time
from contextlib import ExitStack, closing

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.child_server import child_server
from octavo_testkit.serving.fake_server import CHAT, HELLO, listening
from octavo_testkit.serving.raw_client import connect, parse_answer, post, read_answer, read_to_end

MIB = 2**20


def limits(**settings):
    return listening(settings=ServerSettings(**settings))


def large_answers(**settings):
    """A server whose answers and events have a MiB, since the name of its model has."""
    settings = ServerSettings(model_names=("m" * MIB,), **settings)
    return listening(settings=settings, send_buffer=16384)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines_of(caplog):
    lines = [record.getMessage() for record in caplog.records if record.name == "octavo.requests"]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: loc"], ids=repr)
def test_late_headers_get_408(sent):
    with limits(header_timeout_s=0.3) as (url, _, _), closing(connect(url)) as client:
        client.sendall(sent)
        status, headers, body = parse_answer(read_to_end(client))
    assert (status, headers["connection"]) == (408, "close")
    assert "headers of a request within 0.3 s" in body["error"]["message"]


def test_a_byte_now_and_then_does_not_move_the_deadline():
    with limits(header_timeout_s=0.5) as (url, _, _), closing(connect(url)) as client:
        start = time.monotonic()
        client.settimeout(0.05)
        answer = b""
        while not answer:
            client.sendall(b"G")
            assert time.monotonic() - start < 10
            try:
                answer = client.recv(65536)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - start >= 0.5


def test_between_requests_no_headers_are_owed():
    with limits(header_timeout_s=0.3) as (url, _, _), closing(connect(url)) as client:
        for _ in range(2):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_answer(client)[0] == 200
            time.sleep(0.6)
        client.sendall(b"GET /health HTTP/1.1\r\n")
        assert parse_answer(read_to_end(client))[0] == 408


def test_a_late_body_ends_its_request(caplog):
    caplog.set_level(logging.INFO, "octavo.requests")
    with limits(body_timeout_s=0.3) as (url, engine, _), closing(connect(url)) as client:
        client.sendall(post(CHAT, {"messages": HELLO}, length=1000))
        status, _, body = parse_answer(read_to_end(client))
        wait_for(lambda: lines_of(caplog))
    assert status == 408
    assert "body of a request within 0.3 s" in body["error"]["message"]
    (line,) = lines_of(caplog)
    assert (line["status"], line["outcome"]) == (408, "timeout")
    assert "body" in line["error"]
    assert engine.added == []


def test_a_pipelined_request_has_a_deadline_too(caplog):
    caplog.set_level(logging.INFO, "octavo.requests")
    with limits(body_timeout_s=0.5) as (url, _, _), closing(connect(url)) as client:
        first, second = (
            post(CHAT, {"messages": HELLO}),
            post(CHAT, {"messages": HELLO}, length=1000),
        )
        client.sendall(first + second)
        assert read_answer(client)[0] == 200
        assert parse_answer(read_to_end(client))[0] == 408
        wait_for(lambda: len(lines_of(caplog)) == 2)
    assert [line["outcome"] for line in lines_of(caplog)] == ["stop", "timeout"]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_does_not_read_is_dropped(is_stream, caplog):
    caplog.set_level(logging.INFO, "octavo.requests")
    with large_answers(send_timeout_s=0.5) as (url, engine, _), ExitStack() as stack:
        client = stack.enter_context(closing(connect(url, 4096)))
        client.sendall(post(CHAT, {"messages": HELLO, "stream": is_stream}))
        wait_for(lambda: lines_of(caplog))
        if is_stream:  # a whole answer has left the application by then
            (line,) = lines_of(caplog)
            assert (line["status"], line["outcome"]) == (200, "timeout")
            assert "read nothing of its answer for 0.5 s" in line["error"]
        assert engine.num_open == 0
        time.sleep(1)
        # What the kernel had taken comes, and then the end.
        assert len(read_to_end(client)) < MIB


def test_a_client_that_reads_slowly_gets_all_of_its_answer():
    with large_answers(send_timeout_s=0.5) as (url, _, _), ExitStack() as stack:
        client = stack.enter_context(closing(connect(url, 16384)))
        client.sendall(post(CHAT, {"messages": HELLO}, "Connection: close"))
        start, num_bytes = time.monotonic(), 0
        while part := client.recv(16384):
            num_bytes += len(part)
            time.sleep(0.02)
    assert time.monotonic() - start > 1  # twice what a client has that reads nothing
    assert num_bytes > MIB


def test_connections_above_the_limit_get_503():
    with limits(max_connections=2) as (url, _, _), ExitStack() as stack:
        kept = [stack.enter_context(closing(connect(url))) for _ in range(2)]
        for client in kept:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_answer(client)[0] == 200
        more = stack.enter_context(closing(connect(url)))
        status, headers, body = parse_answer(read_to_end(more))
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert body["error"]["code"] == "too_many_connections"
        kept[0].close()
        wait_for(lambda: _answers(url))


def _answers(url):
    return httpx.get(f"{url}/health").status_code == 200


CHUNKED = "Transfer-Encoding: chunked"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        (["Content-Length: 5", CHUNKED], b"0\r\n\r\n", "Content-Length or Transfer-Encoding"),
        ([CHUNKED, "Content-Length: 46"], b"0\r\n\r\n", "Content-Length or Transfer-Encoding"),
        (["Content-Length: 2", "Content-Length: 3"], b"{} ", "HTTP/1.1"),
        (["Content-Length: 2, 3"], b"{} ", "HTTP/1.1"),
        (["Transfer-Encoding: gzip, chunked"], b"0\r\n\r\n", "HTTP/1.1"),
        ([CHUNKED], b"no size\r\n", "HTTP/1.1"),
    ],
    ids=["length, chunked", "chunked, length", "two lengths", "a list", "gzip", "a bad chunk"],
)
def test_a_body_of_unclear_length_closes_the_connection(headers, body, message):
    with listening() as (url, engine, _), closing(connect(url)) as client:
        head = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        request = "\r\n".join([*head, *headers, "", ""]).encode() + body
        client.sendall(request + SMUGGLED)
        # One answer and the end: what follows the body is not taken for a request.
        status, headers, answer = parse_answer(read_to_end(client))
    assert (status, headers["connection"]) == (400, "close")
    assert message in answer["error"]["message"]
    assert engine.added == []


@pytest.mark.slow
def test_400_slow_connections_hold_nobody_up():
    slow_s = 3.0
    with ExitStack() as stack:
        server = child_server("fake", num_files=256, header_timeout_s=slow_s)
        server = stack.enter_context(server)
        num_sockets, num_tasks = server.num_sockets(), server.memory()["num_tasks"]
        start = time.monotonic()
        clients = [stack.enter_context(closing(connect(server.base_url))) for _ in range(400)]
        opened = time.monotonic()
        drips = threading.Thread(target=drip, args=(clients[::2], opened + slow_s))
        drips.start()
        wait_for(lambda: server.num_sockets() >= 400)
        while time.monotonic() < start + slow_s - 0.5:
            asked = time.monotonic()
            body = {"messages": HELLO}
            assert httpx.post(server.base_url + CHAT, json=body, timeout=10).status_code == 200
            assert time.monotonic() - asked < 2
        drips.join()
        for client in clients:
            assert read_to_end(client).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - opened < slow_s + 3
        wait_for(lambda: server.num_sockets() <= num_sockets)
        wait_for(lambda: server.memory()["num_connections"] == 0)
        wait_for(lambda: server.memory()["num_tasks"] <= num_tasks)
        assert "Traceback" not in server.log()


def drip(clients, until):
    """One byte a second from each of them."""
    while time.monotonic() < until:
        for client in clients:
            try:
                client.sendall(b"G")
            except OSError:
                return
        time.sleep(1)
