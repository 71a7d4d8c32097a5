"""Errors as OpenAI's clients know them: a status, and {"error": {message, type, param, code}}."""

from collections.abc import Mapping
from typing import Any

CLIENT_LEFT_STATUS = 499  # nginx's number: nobody reads the answer, but logs and metrics do
# The error's type by its status; that of others is invalid_request_error.
KINDS = {
    408: "timeout_error",
    429: "rate_limit_error",
    CLIENT_LEFT_STATUS: "cancelled",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that ends without an answer, and what its caller is told.

    retry_after_s: when the caller may try again; 5 s if the server is unavailable.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(status, message)  # with which pickle makes it again in another process
        self.status, self.message = status, message
        self.param, self.code = param, code
        self.headers = dict(headers or {})
        if retry_after_s is not None or status == 503:
            self.headers["Retry-After"] = str(retry_after_s or 5)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        kind = KINDS.get(self.status, "invalid_request_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong: the same again would fail again."""
    return ApiError(400, message, code, param=param)


def failure(error: BaseException, code: str = "engine_error") -> ApiError:
    """A failure that is not the caller's."""
    return ApiError(500, f"{type(error).__name__}: {error}", code)


def client_left() -> ApiError:
    """Nobody is there to read the answer."""
    return ApiError(CLIENT_LEFT_STATUS, "the client has left", "cancelled")
