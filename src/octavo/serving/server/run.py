"""The server as a process: it listens, and ends in order."""

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from octavo.serving.server.api_error import unavailable
from octavo.serving.server.bare_app import Serving
from octavo.serving.server.bind import Address
from octavo.serving.server.http_protocol import LimitedProtocol, limited_protocol
from octavo.serving.server.request_thread import ENDED_FIRST

logger = logging.getLogger(__name__)

# After all answers have ended: what is left to flush to clients that read slowly.
FLUSH_S = 0.5
# Somebody who presses Ctrl-C looks on; SIGTERM comes from a supervisor and gives --grace.
INTERRUPT_GRACE_S = 5.0
# Files that are no connections: libraries, weights, pipes.
NUM_OTHER_FILES = 512


class DrainingServer(uvicorn.Server):
    """Listens on after the first signal, to refuse with 503, until open requests have ended.

    SIGTERM gives them grace_s, Ctrl-C at most 5 s of it. A second signal aborts them at once; a
    third one waits for nothing.
    """

    def __init__(self, config: uvicorn.Config, server: Serving) -> None:
        super().__init__(config)
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for one in sockets or ():
            logger.info("listening on %s, port %d", *one.getsockname()[:2])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._loop is None or not self.started or self._num_signals > 2:
            super().handle_exit(sig, frame)
        elif self._num_signals == 2:
            self._loop.call_soon_threadsafe(self._server.engine.stop_waiting)
        else:
            self._server.engine.is_closing = True
            self._loop.call_soon_threadsafe(self._start_to_drain, sig)

    def _start_to_drain(self, sig: int) -> None:
        self._draining = asyncio.ensure_future(self._drain(sig))

    async def _drain(self, sig: int) -> None:
        grace_s, again = self._server.settings.grace_s, "signal"
        if sig == signal.SIGINT:
            grace_s, again = min(grace_s, INTERRUPT_GRACE_S), "Ctrl-C"
        if num_open := self._server.engine.num_open:
            logger.info(
                "ending: %d open requests get %g s to finish; a second %s aborts them",
                *(num_open, grace_s, again),
            )
        else:
            logger.info("ending: no requests are open")
        try:
            if not await self._server.engine.drain(grace_s):
                logger.warning("ending: %d requests are aborted", self._server.engine.num_open)
            await self._server.engine.close()
        finally:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        aborting = loop.call_later(FLUSH_S, self._abort_connections)
        await super().shutdown(sockets)
        aborting.cancel()

    def _abort_connections(self) -> None:
        """Let go of clients that do not read: their requests see a disconnect and end."""
        ended = unavailable(ENDED_FIRST, "aborted")
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.abort(ended)


def run(app: FastAPI, address: Address, *, log_level: str = "info") -> None:
    """Serve until a signal ends it; log lines go to stderr."""
    _set_up_logs(log_level)
    server: Serving = app.state.server
    config = uvicorn.Config(
        app,
        http=limited_protocol(server.settings),
        access_log=False,  # a request has a line of its own
        log_config=None,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    _allow_files(server.settings.max_connections + NUM_OTHER_FILES)
    address.allow_successor()
    # A model and its libraries are hundreds of thousands of objects that stay. The collector would
    # look through them while requests wait, and for seconds when the process ends.
    gc.collect()
    gc.freeze()
    DrainingServer(config, server).run(sockets=list(address.sockets))


def _allow_files(wanted: int) -> None:
    """Raise the number of open files to this; most systems allow 1,024 until they are asked."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= wanted:
        return
    if most != resource.RLIM_INFINITY and most < wanted:
        logger.warning(
            "%d files may be open, fewer than --max-connections and %d others: raise ulimit -Hn, "
            "or allow fewer connections",
            *(most, NUM_OTHER_FILES),
        )
        wanted = most
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


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
