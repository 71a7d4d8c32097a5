"""A server over the fake engine: inside this process, or listening in a thread."""

import contextlib
import threading
import time

import httpx
import uvicorn
from fake_engine import FakeEngine, FakeGrammar

from octavo.serving.server.app import create_app
from octavo.serving.server.settings import ServerSettings


@contextlib.asynccontextmanager
async def serving(engine=None, settings=None):
    """An httpx client of an application whose engine runs."""
    engine = engine or FakeEngine()
    app = create_app(engine, settings or ServerSettings(), FakeGrammar)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            client.server = app.state.server
            client.engine = engine
            yield client


@contextlib.contextmanager
def listening(engine=None, settings=None, make_grammar=FakeGrammar):
    """(base URL, engine, server) of one that listens on a free port, in a thread."""
    engine = engine or FakeEngine()
    app = create_app(engine, settings or ServerSettings(), make_grammar)
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", engine, app.state.server
    finally:
        server.should_exit = True
        thread.join()
