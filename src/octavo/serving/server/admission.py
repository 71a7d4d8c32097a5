"""What every connection and request passes before a route sees it.

A connection has deadlines: a client owes headers, then a body, and has to read its answer. A client
that misses one loses its connection; an answer of 408 tells it why where an answer can be sent.
Between two requests uvicorn's own keep-alive timer runs. A request gets an id; its host, its key
and its size are checked.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import socket
from collections.abc import Collection
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.brief import brief
from octavo.serving.server.api_error import (
    ApiError,
    bad_request,
    late,
    server_error,
    too_many_connections,
    unread,
)
from octavo.serving.server.async_engine import RequestThread
from octavo.serving.server.metrics import Metrics, RequestRecord, choose_id
from octavo.serving.server.settings import ServerSettings

logger = logging.getLogger(__name__)

LARGE_BODY_BYTES = 64 * 1024
# The page asks for the key itself; a probe has none.
OPEN_PATHS: Collection[str] = ("/", "/page.js", "/page.css", "/health")
# In a request's state: the ApiError because of which the server closed its connection.
CLOSED = "octavo.closed"
# What a client has to read of a large answer in each period of send_timeout_s.
MIN_READ_BYTES = 16 * 2**10
SLICE_BYTES = 16 * 2**10
TINY_CHUNK = re.compile(rb"\r\n[0-9a-fA-F]{1,2}\r\n")
MAX_TINY_CHUNKS = 256  # of less than 256 bytes, in a slice


class ArrivingBody:
    """Counts what comes of a request's body, and refuses more than the settings allow."""

    def __init__(self, settings: ServerSettings, headers: Headers) -> None:
        self._settings = settings
        self._num_bytes = self._num_values = 0
        self.num_charged = 0  # of the bytes that large bodies may have together
        self.is_whole = False
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > settings.max_body_bytes:
            raise ApiError(413, self._too_large, code="body_too_large")

    @property
    def _too_large(self) -> str:
        return f"expected a body of at most {self._settings.max_body_bytes} bytes, got more"

    @property
    def num_large_bytes(self) -> int:
        """The bytes so far of a large body, 0 of another: small ones are not limited in sum."""
        return self._num_bytes if self._num_bytes > LARGE_BODY_BYTES else 0

    def add(self, message: Message) -> None:
        """Count a part; an HTTPException, which FastAPI hands on, if it is too much."""
        part: bytes = message.get("body", b"")
        self.is_whole = self.is_whole or not message.get("more_body", False)
        self._num_bytes += len(part)
        if self._num_bytes > self._settings.max_body_bytes:
            raise HTTPException(413, self._too_large)
        # Many tiny values take a parser far more time and memory than one long text does.
        self._num_values += sum(map(part.count, (b",", b"[", b"{")))
        most = self._settings.max_body_values
        if self._num_values > most:
            raise HTTPException(
                413, f"expected at most {most:,} commas and brackets in a body, got more"
            )


class Gate:
    """ASGI middleware: a record of each request, and refusals that need no route.

    A POST takes a slot and its clock starts before its body is read, so that nobody's work comes
    before its admission.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        metrics: Metrics,
        slots: RequestThread,
    ) -> None:
        self.app = app
        self._settings = settings
        self._slots = slots
        self._num_large_bytes = 0  # of all large bodies of open requests
        self._metrics = metrics
        self._keys = [key.encode() for key in settings.api_keys]
        names = ("localhost", socket.gethostname(), *settings.allowed_hosts)
        self._hosts = frozenset(name.lower().removesuffix(".") for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(
            choose_id(headers.get("x-request-id")), scope["method"], scope["path"], self._metrics
        )
        at_end = ExitStack()  # what the request holds until it has ended, however it ends
        state: dict[str, Any] = scope.setdefault("state", {})
        state.update(record=record, at_end=at_end)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if CLOSED not in state:  # else it goes nowhere
                    record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.request_id
            await send(message)

        try:
            _check_framing(headers)
            self._check_host(headers.get("host"))
            self._check_key(scope["path"], headers)
            await self._admit(scope, headers, receive, send_with_id, record)
        except ApiError as error:
            await self._refuse(error, record, scope, receive, send_with_id)
        except asyncio.CancelledError:  # a server that is made to end at once
            record.outcome = record.outcome or "aborted"
            raise
        except Exception as error:
            logger.exception("request %s failed", record.request_id)
            failure = server_error(f"{type(error).__name__}: {error}", "internal_error")
            await self._refuse(failure, record, scope, receive, send_with_id)
        finally:
            at_end.close()
            route: Any = scope.get("route")
            record.route = getattr(route, "path", record.route)
            if CLOSED in state:
                record.closed(state[CLOSED])
            record.end()

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Every key is compared, in constant time: the answer tells nothing about them.
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "expected an API key of this server as 'Authorization: Bearer KEY', got another "
                "one or none",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_host(self, given: str | None) -> None:
        """Refuse names that are not this server's, unless a key protects it.

        A web page can point its own name at this machine (DNS rebinding) and would then be of the
        same origin as the server: a browser lets it ask, and read the answers.
        """
        if self._keys or given is None or self._is_ours(given):
            return
        message = (
            f"expected a Host that is an IP address, localhost or a name of this server, got "
            f"{brief(given)}: start the server with --allowed-host NAME for each name that its "
            "clients use, or with --api-key"
        )
        raise ApiError(403, message, code="host_not_allowed")

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            if name in self._hosts or name.endswith(".localhost"):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def _admit(
        self, scope: Scope, headers: Headers, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        """Let the application have the request, in a slot and in time if it asks for work."""
        body = ArrivingBody(self._settings, headers)
        if scope["method"] != "POST":
            await self.app(scope, self._limited(body, receive, record), send)
            return
        try:
            async with self._slots.slot() as record.clock:
                await self.app(scope, self._limited(body, receive, record), send)
        finally:
            self._num_large_bytes -= body.num_charged

    def _limited(self, body: ArrivingBody, receive: Receive, record: RequestRecord) -> Receive:
        """`receive` that stops at the first part of a body that is too much."""

        async def receive_limited() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not body.is_whole:
                record.left()  # FastAPI makes a 400 of it
            body.add(message)
            if body.is_whole and record.clock is not None:
                self._slots.has_arrived(record.clock)
            self._num_large_bytes += body.num_large_bytes - body.num_charged
            body.num_charged = body.num_large_bytes
            if self._num_large_bytes > self._settings.max_open_body_bytes:
                retry = {"Retry-After": str(self._settings.retry_after_s)}
                raise HTTPException(429, "too many large requests are open: try later", retry)
            return message

        return receive_limited

    async def _refuse(
        self, error: ApiError, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record.failed(error)
        if record.status is not None:
            return  # half an answer is out; the connection ends with it
        headers = {"connection": "close", **error.headers}
        await JSONResponse(error.body(), error.status, headers)(scope, receive, send)


def _check_framing(headers: Headers) -> None:
    """Refuse a body of two lengths: a proxy in front may take the other one (smuggling)."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise bad_request(
            "expected Content-Length or Transfer-Encoding, got both: send one of them",
            code="ambiguous_length",
        )


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
