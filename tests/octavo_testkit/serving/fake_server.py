"""A server over the fake engine: inside this process, or listening in a thread."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import uvicorn

from octavo.serving.server.admission import limited_protocol
from octavo.serving.server.app import create_app
from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine, FakeGrammar

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "say:hello"}]


@contextlib.asynccontextmanager
async def serving(engine=None, settings=None):
    """An httpx client of an application whose engine runs."""
    engine = engine or FakeEngine()
    app = create_app(engine, settings or ServerSettings(), FakeGrammar)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            client.server = app.state.server
            client.engine = engine
            yield client


@contextlib.contextmanager
def listening(engine=None, settings=None, make_grammar=FakeGrammar, send_buffer=None):
    """(base URL, engine, server) of one that listens on a free port, in a thread.

    send_buffer: bytes of an answer that the kernel takes before its client reads any.
    """
    engine = engine or FakeEngine()
    app = create_app(engine, settings or ServerSettings(), make_grammar)
    http = limited_protocol(app.state.server.settings)
    config = uvicorn.Config(app, http=http, port=0, log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    (listener,) = server.servers[0].sockets
    if send_buffer is not None:  # connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", engine, app.state.server
    finally:
        server.should_exit = True
        thread.join()


def with_client(scenario, engine=None, **settings):
    """Run a scenario against an application; afterwards no request may be open."""

    async def run():
        async with serving(engine, ServerSettings(**settings)) as client:
            result = await asyncio.wait_for(scenario(client), 20)
            assert client.server.engine.num_open == 0
        assert client.engine.num_open == 0
        return result

    return asyncio.run(run())


def post(path, body, engine=None, headers=None, **settings):
    async def scenario(client):
        return await client.post(path, json=body, headers=headers)

    return with_client(scenario, engine, **settings)


def get(path, headers=None, **settings):
    async def scenario(client):
        return await client.get(path, headers=headers)

    return with_client(scenario, **settings)


def events(response):
    """The documents of a stream, and whether it ended with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = [part.removeprefix("data: ") for part in response.text.strip().split("\n\n")]
    is_done = parts[-1] == "[DONE]"
    return [json.loads(part) for part in (parts[:-1] if is_done else parts)], is_done
