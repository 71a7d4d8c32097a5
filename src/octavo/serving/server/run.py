"""The server as a process: it listens, and ends in order."""

import asyncio
import logging
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from octavo.serving.server.bare_app import Serving

logger = logging.getLogger(__name__)

# After all answers have ended: what is left to flush to clients that read slowly.
FLUSH_S = 2


class DrainingServer(uvicorn.Server):
    """Listens on after the first signal, to refuse with 503, until open requests have ended.

    A second signal aborts them at once; a third one waits for nothing.
    """

    def __init__(self, config: uvicorn.Config, server: Serving) -> None:
        super().__init__(config)
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._num_signals = 0

    async def startup(self, *args: object, **kwargs: object) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(*args, **kwargs)  # type: ignore[arg-type]  # handed on as they came

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._loop is None or not self.started or self._num_signals > 2:
            super().handle_exit(sig, frame)
        elif self._num_signals == 2:
            self._loop.call_soon_threadsafe(self._server.engine.stop_waiting)
        else:
            self._server.engine.is_closing = True
            self._loop.call_soon_threadsafe(self._start_to_drain)

    def _start_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        grace_s = self._server.settings.grace_s
        num_open = self._server.engine.num_open
        logger.info("ending: %d requests are open, and get %g s", num_open, grace_s)
        if not await self._server.engine.drain(grace_s):
            logger.warning("ending: %d requests are aborted", self._server.engine.num_open)
        await self._server.engine.close()
        self.should_exit = True


def run(app: FastAPI, host: str, port: int, *, log_level: str = "info") -> None:
    """Serve until a signal ends it; log lines go to stderr."""
    _set_up_logs(log_level)
    server: Serving = app.state.server
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,  # a request has a line of its own
        log_config=None,
        timeout_graceful_shutdown=FLUSH_S,
        ws="none",
    )
    DrainingServer(config, server).run()


def _set_up_logs(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    plain = logging.StreamHandler(sys.stderr)
    plain.setFormatter(logging.Formatter("%(message)s"))
    for name, chosen in (("octavo", handler), ("uvicorn", handler), ("octavo.requests", plain)):
        named = logging.getLogger(name)
        named.handlers = [chosen]
        named.propagate = False
        named.setLevel(level.upper())
