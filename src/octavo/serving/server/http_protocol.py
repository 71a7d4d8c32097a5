"""HTTP/1.1 with limits: how many connections, and how long a client may take to send and to read.

A client owes headers, then a body, and has to read its answer. Each has a deadline, and a client
that misses one loses its connection; an answer of 408 tells it why where an answer can be sent.
Between two requests uvicorn's own keep-alive timer runs.
"""

import asyncio
import json
import re
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.serving.server.admission import CLOSED
from octavo.serving.server.api_error import ApiError, late, too_many_connections, unread
from octavo.serving.server.settings import ServerSettings

# What a client has to read of a large answer in each period of send_timeout_s.
MIN_READ_BYTES = 16 * 2**10
SLICE_BYTES = 16 * 2**10
TINY_CHUNK = re.compile(rb"\r\n[0-9a-fA-F]{1,2}\r\n")
MAX_TINY_CHUNKS = 256  # of less than 256 bytes, in a slice


class LimitedProtocol(H11Protocol):
    """One connection; `limits` is set by `limited_protocol`."""

    limits: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owed: tuple[object, object] | None = None  # what the clock below is for
        self._arriving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._unparsed = b""
        self._is_parsing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.limits.max_connections:
            self.transport = transport
            self._refuse(too_many_connections(len(self.connections), self.limits.retry_after_s))
            return
        super().connection_made(transport)
        # Writing counts as paused while anything is unsent, not only above 64 KiB: the last bytes
        # of an answer would otherwise wait without a deadline.
        transport.set_write_buffer_limits(high=0)
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if not self._is_parsing:
            self._parse()

    def _parse(self) -> None:
        """Hand on what has come, in slices if they may be slow to parse.

        The event loop serves others between two slices: 256 KiB of tiny chunks, which come at once,
        would take the parser most of a second.
        """
        self._is_parsing = False
        size = len(self._unparsed) if self._has_plain_body() else SLICE_BYTES
        part, self._unparsed = self._unparsed[:size], self._unparsed[size:]
        if self.transport.is_closing():
            return
        if len(TINY_CHUNK.findall(part)) > MAX_TINY_CHUNKS:
            message = "expected a body in chunks of a useful size, got tiny ones"
            self._refuse(ApiError(400, message, code="invalid_http"))
            return
        super().data_received(part)
        self._watch()
        if self._unparsed:
            self._is_parsing = True
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _has_plain_body(self) -> bool:
        is_body = self.conn.their_state is h11.SEND_BODY
        return is_body and not any(name == b"transfer-encoding" for name, _ in self.headers)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next request may be here already, and its body not; headers have no deadline before
        # their first byte.
        self._watch(is_between=self.conn.their_state is h11.IDLE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._sending)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._arriving)
        _cancel(self._sending)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, f"expected an HTTP/1.1 request: {msg}", code="invalid_http"))

    def abort(self, error: ApiError) -> None:
        """End the connection at once, whatever is unsent."""
        self._tell_request(error)
        self.transport.abort()

    def _watch(self, *, is_between: bool = False) -> None:
        """Start the clock of what the client owes now, and go on with it if it owed that before."""
        state = self.conn.their_state
        owed = None if is_between else (state, self.cycle)
        if owed == self._owed or self.transport.is_closing():
            return
        self._owed = owed
        _cancel(self._arriving)
        if owed is None:
            return
        if state is h11.IDLE:
            self._start_clock("headers", self.limits.header_timeout_s)
        elif state is h11.SEND_BODY:
            self._start_clock("body", self.limits.body_timeout_s)

    def _start_clock(self, part: str, timeout_s: float) -> None:
        self._arriving = self.loop.call_later(timeout_s, self._end_late, part, timeout_s)

    def _end_late(self, part: str, timeout_s: float) -> None:
        if self.flow.read_paused:  # the application reads slowly: the client is not to blame
            self._start_clock(part, timeout_s)
            return
        self._refuse(late(part, timeout_s))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close the connection."""
        self._tell_request(error)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_answer(error))
        self.transport.close()

    def _watch_reader(self) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(
            self.limits.send_timeout_s, self._end_reader, num_unsent
        )

    def _end_reader(self, num_unsent: int) -> None:
        if num_unsent - self.transport.get_write_buffer_size() >= MIN_READ_BYTES:
            self._watch_reader()
            return
        self.abort(unread(self.limits.send_timeout_s))

    def _tell_request(self, error: ApiError) -> None:
        """Leave the reason for the request's record: to the application, the client has left."""
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self.scope["state"][CLOSED] = error


def limited_protocol(settings: ServerSettings) -> type[LimitedProtocol]:
    """The protocol with these limits; uvicorn makes one for each connection."""
    return type("Http", (LimitedProtocol,), {"limits": settings})


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _answer(error: ApiError) -> bytes:
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": len(body), **error.headers}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
