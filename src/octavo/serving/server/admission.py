"""What every connection and request passes before a route sees it.

A connection has deadlines: a client owes headers, then a body, and has to read its answer. A client
that misses one loses its connection; an answer of 408 tells it why where an answer can be sent.
Between two requests uvicorn's own keep-alive timer runs. A request gets an id; its host, its key
and its size are checked.
"""

import asyncio
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Collection
from contextlib import nullcontext
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
from octavo.serving.server.api_error import ApiError, bad_request, failure
from octavo.serving.server.async_engine import RequestThread, Slot
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
    """`receive` that counts what comes of a request's body; an HTTPException if it is too much.

    FastAPI hands such an exception on, and makes a 400 of others.
    """

    def __init__(
        self, gate: "Gate", receive: Receive, record: RequestRecord, slot: Slot | None
    ) -> None:
        self._gate, self._receive = gate, receive
        self._record, self._slot = record, slot
        self._num_bytes = self._num_values = self._num_charged = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_whole:
            self._record.left()  # FastAPI makes a 400 of it
        part, settings = message.get("body", b""), self._gate.settings
        self._num_bytes += len(part)
        if self._num_bytes > settings.max_body_bytes:
            raise HTTPException(413, _too_large(settings))
        # Many tiny values take a parser far more time and memory than one long text does.
        self._num_values += sum(map(part.count, (b",", b"[", b"{")))
        most = settings.max_body_values
        if self._num_values > most:
            expected = f"expected at most {most:,} commas and brackets in a body"
            raise HTTPException(413, f"{expected}, got more")
        if self._num_bytes > LARGE_BODY_BYTES:  # small ones are not limited in sum
            self.charge(self._num_bytes)
            if self._gate.num_large_bytes > settings.max_open_body_bytes:
                retry = {"Retry-After": str(settings.retry_after_s)}
                raise HTTPException(429, "too many large requests are open: try later", retry)
        self._is_whole = self._is_whole or not message.get("more_body", False)
        if self._is_whole and self._slot is not None:
            self._slot.is_whole = True
        return message

    def charge(self, num_bytes: int) -> None:
        """Hold so many of the bytes that large bodies may have together, and no others."""
        self._gate.num_large_bytes += num_bytes - self._num_charged
        self._num_charged = num_bytes


def _too_large(settings: ServerSettings) -> str:
    return f"expected a body of at most {settings.max_body_bytes} bytes, got more"


class Gate:
    """ASGI middleware: a record of each request, and refusals that need no route.

    A POST takes a slot and its clock starts before its body is read, so that nobody's work comes
    before its admission.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, slots: RequestThread
    ) -> None:
        self.app, self.settings = app, settings
        self.num_large_bytes = 0  # of all large bodies of open requests
        self._slots, self._metrics = slots, metrics
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
        state: dict[str, Any] = scope.setdefault("state", {})
        state["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if CLOSED not in state:  # else it goes nowhere
                    record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.request_id
            await send(message)

        try:
            self._check(scope["path"], headers)
            # What asks for work gets it in a slot and in time.
            is_work = scope["method"] == "POST"
            async with self._slots.slot() if is_work else nullcontext() as slot:
                body = ArrivingBody(self, receive, record, slot)
                if slot is not None:
                    record.slot = slot
                    slot.at_end.callback(body.charge, 0)
                await self.app(scope, body, send_with_id)
        except asyncio.CancelledError:  # a server that is made to end at once
            record.outcome = record.outcome or "aborted"
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", record.request_id)
                error = failure(error, "internal_error")
            record.failed(error)
            if record.status is None:  # else half an answer is out; the connection ends with it
                respond = error_response(error, connection="close")
                await respond(scope, receive, send_with_id)
        finally:
            route: Any = scope.get("route")
            record.route = getattr(route, "path", record.route)
            if CLOSED in state:
                record.closed(state[CLOSED])
            record.end()

    def _check(self, path: str, headers: Headers) -> None:
        """ApiError for a request that needs no slot to be refused."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front may take the other one (smuggling).
            message = "expected Content-Length or Transfer-Encoding, got both: send one of them"
            raise bad_request(message, code="ambiguous_length")
        if not self._keys:
            self._check_host(headers.get("host"))
        elif path not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # Every key is compared, in constant time: the answer tells nothing about them.
            matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
            if scheme.lower() != "bearer" or not any(matches):
                expected = "expected an API key of this server as 'Authorization: Bearer KEY'"
                challenge = {"WWW-Authenticate": "Bearer"}
                message = f"{expected}, got another one or none"
                raise ApiError(401, message, "invalid_api_key", headers=challenge)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.settings.max_body_bytes:
            raise ApiError(413, _too_large(self.settings), "body_too_large")

    def _check_host(self, given: str | None) -> None:
        """Refuse names that are not this server's; only for a server that no key protects.

        A web page can point its own name at this machine (DNS rebinding) and would then be of the
        same origin as the server: a browser lets it ask, and read the answers.
        """
        if given is None:
            return
        try:
            name = (urlsplit(f"//{given}").hostname or "").removesuffix(".")
            if name not in self._hosts and not name.endswith(".localhost"):
                ipaddress.ip_address(name)
        except ValueError:
            message = (
                f"expected a Host that is an IP address, localhost or a name of this server, got "
                f"{brief(given)}: start the server with --allowed-host NAME for each name that its "
                "clients use, or with --api-key"
            )
            raise ApiError(403, message, "host_not_allowed") from None


def error_response(error: ApiError, **headers: str) -> JSONResponse:
    """What a client gets to read."""
    return JSONResponse(error.body(), error.status, {**headers, **error.headers})


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
        if (num_open := len(self.connections)) >= self.limits.max_connections:
            self.transport = transport
            message = f"{num_open} connections are open, which is all this server takes: try later"
            retry_s = self.limits.retry_after_s
            self._refuse(ApiError(503, message, "too_many_connections", retry_after_s=retry_s))
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
        is_plain_body = self.conn.their_state is h11.SEND_BODY and all(
            name != b"transfer-encoding" for name, _ in self.headers
        )
        size = len(self._unparsed) if is_plain_body else SLICE_BYTES
        part, self._unparsed = self._unparsed[:size], self._unparsed[size:]
        if self.transport.is_closing():
            return
        if len(TINY_CHUNK.findall(part)) > MAX_TINY_CHUNKS:
            message = "expected a body in chunks of a useful size, got tiny ones"
            self._refuse(ApiError(400, message, "invalid_http"))
            return
        super().data_received(part)
        self._watch()
        if self._unparsed:
            self._is_parsing = True
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

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
        self._refuse(ApiError(400, f"expected an HTTP/1.1 request: {msg}", "invalid_http"))

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
        if owed is not None and state is h11.IDLE:
            self._start_clock("headers", self.limits.header_timeout_s)
        elif owed is not None and state is h11.SEND_BODY:
            self._start_clock("body", self.limits.body_timeout_s)

    def _start_clock(self, part: str, timeout_s: float) -> None:
        self._arriving = self.loop.call_later(timeout_s, self._end_late, part, timeout_s)

    def _end_late(self, part: str, timeout_s: float) -> None:
        if self.flow.read_paused:  # the application reads slowly: the client is not to blame
            self._start_clock(part, timeout_s)
            return
        message = f"expected the {part} of a request within {timeout_s:g} s, got a part or nothing"
        self._refuse(ApiError(408, message, "request_late"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close the connection."""
        self._tell_request(error)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error_response(error, connection="close")
            status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()
            lines = [status, *(b"%b: %b" % header for header in response.raw_headers), b"", b""]
            self.transport.write(b"\r\n".join(lines) + bytes(response.body))
        self.transport.close()

    def _watch_reader(self) -> None:
        num_unsent, timeout_s = self.transport.get_write_buffer_size(), self.limits.send_timeout_s
        self._sending = self.loop.call_later(timeout_s, self._end_reader, num_unsent)

    def _end_reader(self, num_unsent: int) -> None:
        if num_unsent - self.transport.get_write_buffer_size() >= MIN_READ_BYTES:
            self._watch_reader()
            return
        message = f"the client read nothing of its answer for {self.limits.send_timeout_s:g} s"
        self.abort(ApiError(408, message, "answer_unread"))

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
