"""What the applications of octavo share: keys, limits, errors as OpenAI writes them, a page."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive

from octavo.brief import brief
from octavo.serving.server.admission import Gate, error_response
from octavo.serving.server.api_error import ApiError, bad_request, client_left
from octavo.serving.server.async_engine import RequestThread
from octavo.serving.server.metrics import Metrics
from octavo.serving.server.schema import ErrorBody
from octavo.serving.server.settings import ServerSettings
from octavo.version import __version__

T = TypeVar("T")
STATUSES = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in STATUSES}
NUM_PROBLEMS_SHOWN = 3
CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 429: "queue_full"}
# Routes of OpenAI's that clients ask for and that no server of ours has.
NOT_SUPPORTED = {
    "/v1/embeddings": "the model served here generates, and makes no embeddings",
    "/v1/responses": "this server does not speak OpenAI's Responses API",
}


class BaseServer(ABC):
    """What an application serves: a model by its names, and the thread that answers.

    page: the name of the page's files. about_model: what /v1/models adds. A subclass sets `engine`,
    the thread, and `metrics`.
    """

    engine: RequestThread
    metrics: Metrics
    page = "page"
    # Nothing from elsewhere: the page works without a network, and cannot be made to speak to one.
    page_policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
    failed = "engine failed"  # how /health begins if the thread's worker has failed

    def __init__(self, settings: ServerSettings, model_name: str, **about_model: Any) -> None:
        self.settings = settings
        self.model_names = settings.model_names or (model_name,)  # the first is in answers
        self._about_model = {"created": int(time.time()), "owned_by": "octavo", **about_model}

    def status(self) -> tuple[int, str]:
        """(HTTP status, word) of /health."""
        if self.engine.problem is not None:
            return 503, f"{self.failed}: {self.engine.problem}"
        return (503, "shutting down") if self.engine.is_closing else (200, "ok")

    def check_model(self, name: str | None) -> None:
        """ApiError unless the model is one that is served here; None is the one we have."""
        if name is not None and name not in self.model_names:
            message = f"expected a model served here ({', '.join(self.model_names)}), got {name!r}"
            raise ApiError(404, message, "model_not_found", param="model")

    def model_entry(self, name: str) -> dict[str, Any]:
        """A model as OpenAI describes it."""
        self.check_model(name)
        return {"id": name, "object": "model", **self._about_model}

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """What the page shows."""

    @abstractmethod
    def add_routes(self, app: FastAPI) -> None:
        """Add the routes that only this kind of server has."""

    async def close(self) -> None:
        """End the thread, and all that was started beside it."""
        await self.engine.close()


def make_app(server: BaseServer) -> FastAPI:
    """The application of a server; its lifespan starts and ends the server's thread."""

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
    for kind in (ApiError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _refuse)
    settings = server.settings
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
    _add_common_routes(app, server)
    _add_page(app, "/", "text/html", server.page_policy, f"{server.page}.html")
    scripts = ("common.js", f"{server.page}.js")
    _add_page(app, "/page.js", "text/javascript", server.page_policy, *scripts)
    _add_page(app, "/page.css", "text/css", server.page_policy, "page.css")
    return app


def _add_common_routes(app: FastAPI, server: BaseServer) -> None:
    @app.get("/v1/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """The names under which the model can be asked."""
        return {"object": "list", "data": [server.model_entry(x) for x in server.model_names]}

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return server.model_entry(name)

    @app.get("/health", responses={503: {"description": "Not accepting requests."}})
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
        content = generate_latest(server.metrics)
        return Response(content, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """The numbers that the page shows."""
        return server.numbers()


def _add_page(app: FastAPI, path: str, media_type: str, policy: str, *names: str) -> None:
    """Serve files of this package, one behind the other, under this path."""
    folder = resources.files("octavo.serving.server")
    content = b"".join(folder.joinpath(name).read_bytes() for name in names)
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}

    @app.get(path, include_in_schema=False)
    async def respond() -> Response:
        return Response(content, media_type=f"{media_type}; charset=utf-8", headers=headers)


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; if the client leaves first, it is cancelled and this is an ApiError."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise client_left()
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    """What an error is to the client: a route's own, or one that FastAPI has found."""
    match error:
        case ApiError():
            refusal = error
        case RequestValidationError():
            problems = error.errors()
            shown = "; ".join(map(_problem, problems[:NUM_PROBLEMS_SHOWN]))
            refusal = bad_request(shown, _place(problems[0]) or None)
        case HTTPException(status_code=404) if request.url.path.startswith("/v1/"):
            refusal = _unknown_route(request)
        case HTTPException(status_code=status):
            refusal = ApiError(status, str(error.detail), CODES.get(status), headers=error.headers)
        case _:
            raise error
    request.state.record.failed(refusal)
    return error_response(refusal)


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
    return ApiError(404, f"{why}; this server offers {', '.join(offered)}", code)


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
