"""What the applications of octavo share: keys, limits, errors as OpenAI writes them, a page."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive

from octavo.brief import brief
from octavo.serving.server.admission import Gate
from octavo.serving.server.api_error import ApiError, bad_request, client_left
from octavo.serving.server.async_engine import RequestThread
from octavo.serving.server.metrics import CONTENT_TYPE, Metrics, RequestRecord
from octavo.serving.server.schema import ErrorBody
from octavo.serving.server.settings import ServerSettings
from octavo.version import __version__

T = TypeVar("T")
STATUSES = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in STATUSES}
# Nothing from elsewhere: the page works without a network, and cannot be made to speak to one.
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
PAGE_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
NUM_PROBLEMS_SHOWN = 3
CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 429: "queue_full"}
# Routes of OpenAI's that clients ask for and that no server of ours has.
NOT_SUPPORTED = {
    "/v1/embeddings": "the model served here generates, and makes no embeddings",
    "/v1/responses": "this server does not speak OpenAI's Responses API",
}


class BaseServer(ABC):
    """What an application serves: a thread that answers, with its settings, metrics and models."""

    settings: ServerSettings
    metrics: Metrics
    engine: RequestThread
    models: "ServedModels"
    failed = "engine failed"  # how /health begins if the thread's worker has failed

    def status(self) -> tuple[int, str]:
        """(HTTP status, word) of /health."""
        if self.engine.problem is not None:
            return 503, f"{self.failed}: {self.engine.problem}"
        return (503, "shutting down") if self.engine.is_closing else (200, "ok")

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """What the page shows."""

    @abstractmethod
    def add_routes(self, app: FastAPI) -> None:
        """Add the routes that only this kind of server has."""

    async def close(self) -> None:
        """End the thread, and all that was started beside it."""
        await self.engine.close()


def make_app(server: BaseServer, page: Mapping[str, str], policy: str = PAGE_POLICY) -> FastAPI:
    """The application of a server; its lifespan starts and ends the server's thread.

    page: the files of this package to serve, by their paths. policy: of their content.
    """
    settings = server.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await server.close()

    # FastAPI's documentation pages load scripts from elsewhere; /openapi.json is enough.
    app = FastAPI(
        title="octavo", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.server = server
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_middleware(Gate, settings=settings, metrics=server.metrics, slots=server.engine)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    server.add_routes(app)
    server.models.add_routes(app)
    _add_status_routes(app, server)
    for path, name in page.items():
        _add_page(app, path, name, policy)
    return app


def _add_status_routes(app: FastAPI, server: BaseServer) -> None:
    @app.get("/health", responses={503: {"description": "It answers nobody."}})
    async def health() -> JSONResponse:
        """Whether requests are answered."""
        status, word = server.status()
        return JSONResponse({"status": word}, status)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of octavo."""
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters and histograms for Prometheus."""
        return Response(server.metrics.expose(), media_type=CONTENT_TYPE)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """The numbers that the page shows."""
        return server.numbers()


def _add_page(app: FastAPI, path: str, name: str, policy: str) -> None:
    """Serve a file of this package under this path."""
    content = resources.files("octavo.serving.server").joinpath(name).read_bytes()
    media_type = f"{PAGE_KINDS[Path(name).suffix]}; charset=utf-8"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}

    @app.get(path, include_in_schema=False)
    async def respond() -> Response:
        return Response(content, media_type=media_type, headers=headers)


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; if the client leaves first, it is cancelled and this is an ApiError."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise client_left()
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    record: RequestRecord = request.state.record
    record.failed(error)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _http_exception(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and request.url.path.startswith("/v1/"):
        return await _api_error(request, _unknown_route(request))
    refusal = ApiError(
        error.status_code,
        str(error.detail),
        kind="rate_limit_error" if error.status_code == 429 else "invalid_request_error",
        code=CODES.get(error.status_code),
        headers=error.headers,
    )
    return await _api_error(request, refusal)


def _unknown_route(request: HttpRequest) -> ApiError:
    path = request.url.path.rstrip("/")
    why = NOT_SUPPORTED.get(path, f"there is no {brief(path)} here")
    offered = [
        f"{method} {route.path}"
        for route in request.app.routes
        if isinstance(route, APIRoute) and route.path.startswith("/v1/")
        for method in sorted(route.methods or ())
    ]
    code = "not_supported" if path in NOT_SUPPORTED else "not_found"
    return ApiError(404, f"{why}; this server offers {', '.join(offered)}", code=code)


async def _invalid(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    shown = "; ".join(map(_problem, problems[:NUM_PROBLEMS_SHOWN]))
    return await _api_error(request, bad_request(shown, _place(problems[0]) or None))


def _place(problem: Any) -> str:
    parts = [str(part) for part in problem["loc"] if part != "body"]
    return ".".join(parts)[:200] if problem["type"] != "json_invalid" else ""


def _problem(problem: Any) -> str:
    place = _place(problem)
    match problem["type"]:
        case "json_invalid":
            return f"expected a JSON body: {problem['ctx']['error']}"
        case "extra_forbidden":
            return f"{place}: this server does not know this field; remove it"
        case "missing":
            return f"{place or 'body'}: expected, got none"
        case "value_error":
            return f"{place}: {problem['ctx']['error']}"
    expected = problem["msg"].replace("Input should be", "expected")
    return f"{place or 'body'}: {expected}, got {brief(problem['input'])}"


class ServedModels:
    """One model by its names, the first of which answers carry; about: what /v1/models adds."""

    def __init__(self, names: tuple[str, ...], **about: Any) -> None:
        self.names = names
        self._about = {"created": int(time.time()), "owned_by": "octavo", **about}

    def check(self, name: str | None) -> None:
        """ApiError unless the model is one that is served here; none at all is the one we have."""
        if name is not None and name not in self.names:
            message = f"expected a model served here ({', '.join(self.names)}), got {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def add_routes(self, app: FastAPI) -> None:
        """OpenAI's two routes."""

        @app.get("/v1/models", responses=ERRORS)
        async def models() -> dict[str, Any]:
            """The names under which the model can be asked."""
            return {"object": "list", "data": [self._entry(name) for name in self.names]}

        @app.get("/v1/models/{name:path}", responses=ERRORS)
        async def model(name: str) -> dict[str, Any]:
            """One of them."""
            self.check(name)
            return self._entry(name)

    def _entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", **self._about}
