"""What every request passes: keys, sizes, ids, logs, metrics; and bodies that are none."""

import json
import logging
import socket
from contextlib import closing

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from octavo.version import __version__
from octavo_testkit.serving.fake_server import CHAT, HELLO, TEXT, get, listening, post, with_client
from octavo_testkit.serving.metrics_text import samples
from octavo_testkit.serving.raw_client import connect, read_to_end


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000],
    ids=lambda content: repr(content[:20]),
)
def test_bodies_that_are_no_request(content):
    async def scenario(client):
        headers = {"content-type": "application/json"}
        return await client.post(CHAT, content=content, headers=headers)

    response = with_client(scenario)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_half_a_surrogate_pair_is_refused():
    async def scenario(client):
        headers = {"content-type": "application/json"}
        for path, body in (
            (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
            (
                CHAT,
                b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": '
                b'"function", "function": {"name": "f", "parameters": {"\\ud800": 1}}}]}',
            ),
            (TEXT, b'{"prompt": "\\udfff"}'),
            ("/tokenize", b'{"prompt": "\\udfff"}'),
        ):
            response = await client.post(path, content=body, headers=headers)
            assert response.status_code in (200, 400), response.text

    with_client(scenario)


def test_metrics_and_stats():
    async def scenario(client):
        await client.post(CHAT, json={"messages": HELLO})
        await client.post(TEXT, json={"prompt": "long:", "max_tokens": 4})
        await client.post(CHAT, json={"messages": []})
        await client.get("/nowhere")
        return (await client.get("/metrics")), (await client.get("/stats")).json()

    metrics, stats = with_client(scenario)
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(metrics.text)
    for name, labels, value in (
        ("octavo_requests_total", {"route": CHAT, "outcome": "stop"}, 1),
        ("octavo_requests_total", {"route": CHAT, "outcome": "refused"}, 1),
        ("octavo_requests_total", {"route": TEXT, "outcome": "length"}, 1),
        ("octavo_requests_total", {"route": "unmatched", "outcome": "refused"}, 1),
        ("octavo_completion_tokens_total", {}, 9),
        ("octavo_pages", {}, 100),
        ("octavo_requests_waiting", {}, 0),
        ("octavo_time_to_first_token_seconds_count", {}, 2),
        ("octavo_time_to_first_token_seconds_bucket", {"le": "+Inf"}, 2),
        ("octavo_inter_token_latency_seconds_count", {}, 7),
        ("octavo_request_seconds_count", {}, 2),
    ):
        assert found[name, frozenset(labels.items())] == value
    assert stats["engine"]["completion_tokens"] == 9
    assert stats["times"]["itl"]["count"] == 7


def test_unknown_paths_and_methods():
    missing = get("/v2/chat")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("path", "word"), [("embeddings", "generates"), ("responses", "Responses")]
)
def test_routes_of_openai_that_are_not_here_say_what_is(path, word):
    answer = post(f"/v1/{path}", {"input": "hello", "model": "fake"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_supported")
    assert word in error["message"]
    assert "POST /v1/chat/completions, POST /v1/completions" in error["message"]


def test_unknown_paths_name_the_routes_that_exist():
    error = post("/v1/chat/completion", {}).json()["error"]
    assert error["code"] == "not_found"
    assert "there is no '/v1/chat/completion' here" in error["message"]
    assert "POST /v1/chat/completions" in error["message"]
    assert "GET /v1/models" in error["message"]
    unknown_model = get("/v1/models/other").json()["error"]
    assert unknown_model["code"] == "model_not_found"


def test_version():
    assert get("/version").json() == {"version": __version__}


OTHER_NAMES = ["evil.example", "evil.example:8000", "localhost.evil.example", "1.2.3.4.nip.io", ""]


@pytest.mark.parametrize("host", [*OTHER_NAMES, "a b", "[::1", "notlocalhost", "u@localhost@evil"])
def test_without_a_key_other_hosts_are_refused(host):
    answer = get("/v1/models", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-host NAME" in answer.json()["error"]["message"]
    assert "--api-key" in answer.json()["error"]["message"]
    key = {"Authorization": "Bearer secret", "Host": host}
    assert get("/v1/models", headers=key, api_keys=("secret",)).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "app.localhost", "127.0.0.1:8000", "192.168.1.7", "[::1]"),
        *("[fe80::1]:80", "localhost.", socket.gethostname(), "box.lan:9", "BOX.lan."),
    ],
)
def test_hosts_that_are_the_servers_own(host):
    settings = {"allowed_hosts": ("0.0.0.0", "box.lan")}
    assert get("/v1/models", headers={"Host": host}, **settings).status_code == 200


def test_http_1_0_needs_no_host():
    with listening() as (url, *_), closing(connect(url)) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read_to_end(client).startswith(b"HTTP/1.1 200 ")


def test_api_key():
    keys = {"api_keys": ("secret", "other")}
    for headers in (None, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        response = post(CHAT, {"messages": HELLO}, headers=headers, **keys)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert get("/metrics", headers=headers, **keys).status_code == 401
    for key in keys["api_keys"]:
        headers = {"Authorization": f"Bearer {key}"}
        assert post(CHAT, {"messages": HELLO}, headers=headers, **keys).status_code == 200
    for path in ("/", "/page.js", "/page.css", "/health"):
        assert get(path, **keys).status_code == 200


def test_body_limit():
    large = {"messages": [{"role": "user", "content": "x" * 2000}]}
    response = post(CHAT, large, max_body_bytes=1000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

    async def scenario(client):
        async def parts():
            for _ in range(100):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        return await client.post(CHAT, content=parts(), headers=headers)

    response = with_client(scenario, max_body_bytes=1000)  # no Content-Length
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_request_ids_and_log_lines(caplog):
    caplog.set_level(logging.DEBUG, "octavo.requests")
    given = post(CHAT, {"messages": HELLO}, headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = post(CHAT, {"messages": HELLO}, headers={"X-Request-Id": "bad id\u00e9".encode()})
    assert made.headers["x-request-id"].startswith("req-")
    refused = post(CHAT, {}, headers={"X-Request-Id": "mine-2"})
    assert refused.headers["x-request-id"] == "mine-2"
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [line["outcome"] for line in lines] == ["stop", "stop", "refused"]
    assert lines[0]["id"] == "mine-1"
    assert lines[0]["answer_id"] == given.json()["id"]
    assert lines[0]["completion_tokens"] == 5
    assert 0 < lines[0]["ttft_s"] <= lines[0]["duration_s"]
    assert lines[2]["status"] == 400 and lines[2]["error"]


def test_cors_is_off_unless_asked_for():
    headers = {"Origin": "http://page"}
    assert "access-control-allow-origin" not in get("/health", headers=headers).headers
    allowed = get("/health", headers=headers, cors_origins=("http://page",))
    assert allowed.headers["access-control-allow-origin"] == "http://page"


def test_the_page_asks_nobody_else():
    page = get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/", "/page.js", "/page.css"):
        text = get(path).text
        assert text
        assert "http://" not in text and "https://" not in text


def test_a_client_that_leaves_before_its_body_is_complete_has_cancelled(caplog):
    caplog.set_level(logging.INFO, "octavo.requests")

    async def scenario(client):
        parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }

        async def receive():
            return next(parts, {"type": "http.disconnect"})

        async def send(message):
            pass

        await client._transport.app(scope, receive, send)

    with_client(scenario)
    (line,) = [json.loads(record.getMessage()) for record in caplog.records]
    assert line["outcome"] == "cancelled"
