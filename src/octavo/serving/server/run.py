"""The server as a process: it takes an address before the model loads, listens, and ends in order.

Nobody can connect to the address until the server listens.
"""

import asyncio
import errno
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from octavo.errors import ConfigError
from octavo.serving.server.admission import LimitedProtocol, limited_protocol
from octavo.serving.server.async_engine import aborted
from octavo.serving.server.bare_app import BaseServer

logger = logging.getLogger(__name__)

# After all answers have ended: what is left to flush to clients that read slowly.
FLUSH_S = 0.5
# Somebody who presses Ctrl-C looks on; SIGTERM comes from a supervisor and gives --grace.
INTERRUPT_GRACE_S = 5.0
# Files that are no connections: libraries, weights, pipes.
NUM_OTHER_FILES = 512
# An address of a name that this machine does not have, such as ::1 where IPv6 is off.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(frozen=True)
class Address:
    """Bound sockets, one for each address of the host, all with the same port."""

    host: str
    port: int
    sockets: tuple[socket.socket, ...]

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def announcement(self) -> str:
        """A line for the person who starts the server."""
        return f"{self.url}/ is the page, {self.url}/v1 the API"

    def allow_successor(self) -> None:
        """Let the next server have the port while the kernel remembers this one's connections."""
        for one in self.sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


@contextmanager
def bound(host: str, port: int) -> Iterator[Address]:
    """Take the address, and give it back at the end; ConfigError if it cannot be had."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"expected --host of this machine, got {host!r}: {error}") from None
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            try:
                one = stack.enter_context(socket.socket(family, kind, protocol))
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind((place[0], port, *place[2:]))
                # Two sockets with this option may be bound to one port until the first of them
                # listens. A server that loads its model keeps its port to itself.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            except OSError as error:
                if error.errno in _ABSENT and len(found) > 1:
                    continue
                raise ConfigError(_problem(host, port, error)) from None
            sockets.append(one)
            port = one.getsockname()[1]
        if not sockets:
            raise ConfigError(f"expected --host of this machine, got {host!r}, which is another")
        yield Address(host, port, tuple(sockets))


def _problem(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {port} of {host} is in use: choose another with --port (0 takes a free "
                "one), or end the program that has it"
            )
        case errno.EACCES:
            return f"port {port} needs more rights than this user has: choose one from 1024 on"
        case errno.EADDRNOTAVAIL:
            return f"expected --host of this machine (0.0.0.0 is all of them), got {host}"
    return f"cannot listen on port {port} of {host}: {error.strerror}"


class DrainingServer(uvicorn.Server):
    """Listens on after the first signal, to refuse with 503, until open requests have ended.

    SIGTERM gives them grace_s, Ctrl-C at most 5 s of it. A second signal aborts them at once; a
    third one waits for nothing.
    """

    def __init__(self, config: uvicorn.Config, server: BaseServer) -> None:
        super().__init__(config)
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: Future[None] | None = None  # kept: nobody else does
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
            self._draining = asyncio.run_coroutine_threadsafe(self._drain(sig), self._loop)

    async def _drain(self, sig: int) -> None:
        engine, grace_s, again = self._server.engine, self._server.settings.grace_s, "signal"
        if sig == signal.SIGINT:
            grace_s, again = min(grace_s, INTERRUPT_GRACE_S), "Ctrl-C"
        what = "no requests are open"
        if engine.num_open:
            what = f"{engine.num_open} open requests get {grace_s:g} s to finish; a second {again}"
            what += " aborts them"
        logger.info("ending: %s", what)
        try:
            if not await engine.drain(grace_s):
                logger.warning("ending: %d requests are aborted", engine.num_open)
            await engine.close()
        finally:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        aborting = asyncio.get_running_loop().call_later(FLUSH_S, self._abort_connections)
        await super().shutdown(sockets)
        aborting.cancel()

    def _abort_connections(self) -> None:
        """Let go of clients that do not read: their requests see a disconnect and end."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.abort(aborted())


def run(app: FastAPI, address: Address, *, log_level: str = "info") -> None:
    """Serve until a signal ends it; log lines go to stderr."""
    for name in ("octavo", "uvicorn", "octavo.requests"):
        is_requests = name == "octavo.requests"  # whose lines are JSON
        layout = "%(message)s" if is_requests else "%(levelname)s %(name)s: %(message)s"
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(layout))
        named = logging.getLogger(name)
        named.handlers, named.propagate = [handler], False
        named.setLevel(log_level.upper())
    server: BaseServer = app.state.server
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
            most,
            NUM_OTHER_FILES,
        )
        wanted = most
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
