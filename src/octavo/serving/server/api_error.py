"""Errors as OpenAI's clients know them: a status, and {"error": {message, type, param, code}}."""

from collections.abc import Mapping
from typing import Any

CLIENT_LEFT_STATUS = 499  # nginx's number: nobody reads the answer, but logs and metrics do


class ApiError(Exception):
    """A request that ends without an answer, and what its caller is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message)  # with which pickle makes it again in another process
        self.status, self.message = status, message
        self.kind, self.param, self.code = kind, param, code
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        fields = {"message": self.message, "type": self.kind}
        return {"error": {**fields, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong: the same again would fail again."""
    return ApiError(400, message, param=param, code=code)


def too_many_requests(message: str, retry_after_s: int) -> ApiError:
    """There is no room now."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def unavailable(message: str, code: str, retry_after_s: int = 5) -> ApiError:
    """The server takes no requests: it ends, its engine has failed, or there is no room."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind="service_unavailable", code=code, headers=headers)


def server_error(message: str, code: str = "engine_error") -> ApiError:
    """A failure that is not the caller's."""
    return ApiError(500, message, kind="server_error", code=code)


def timed_out(timeout_s: float) -> ApiError:
    """The request took longer than the server allows one."""
    message = f"expected an answer within {timeout_s:g} s, which this server allows; ask for less"
    return ApiError(504, message, kind="timeout_error", code="request_timeout")


def late(part: str, timeout_s: float) -> ApiError:
    """The client took too long to send a part of its request."""
    message = f"expected the {part} of a request within {timeout_s:g} s, got a part or nothing"
    return ApiError(408, message, kind="timeout_error", code="request_late")


def made_way() -> ApiError:
    """The client was slow to send its request, and others needed the room."""
    message = "the request was not complete when others needed its place: send it at once"
    return ApiError(408, message, kind="timeout_error", code="request_late")


def unread(timeout_s: float) -> ApiError:
    """The client has stopped reading its answer."""
    message = f"the client read nothing of its answer for {timeout_s:g} s"
    return ApiError(408, message, kind="timeout_error", code="answer_unread")


def too_many_connections(num_open: int, retry_after_s: int) -> ApiError:
    """There is no room for another connection now."""
    message = f"{num_open} connections are open, which is all this server takes: try later"
    return unavailable(message, "too_many_connections", retry_after_s)


def client_left() -> ApiError:
    """Nobody is there to read the answer."""
    return ApiError(CLIENT_LEFT_STATUS, "the client has left", kind="cancelled", code="cancelled")
