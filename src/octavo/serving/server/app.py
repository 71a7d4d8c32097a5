"""The routes: OpenAI's, and the server's own."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from octavo.errors import ConfigError
from octavo.serving.engine.request import Delta, gather
from octavo.serving.server.async_engine import Answer, AsyncEngine, Engine
from octavo.serving.server.bare_app import (
    ERRORS,
    ServedModels,
    add_page,
    add_status_routes,
    bare_app,
)
from octavo.serving.server.guidance import GuidedGrammars, MakeGrammar
from octavo.serving.server.jobs import Job, Jobs
from octavo.serving.server.metrics import (
    RequestRecord,
    TokenMetrics,
    engine_families,
    sum_and_count,
)
from octavo.serving.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.serving.server.settings import ServerSettings
from octavo.serving.server.stream import EventStream, until_client_leaves

# What is served under each path; the page asks for the others beside it.
PAGE_FILES = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}


class Server:
    """What the routes share."""

    def __init__(
        self, engine: Engine, settings: ServerSettings, make_grammar: MakeGrammar | None
    ) -> None:
        if engine.tokenizer is None:
            raise ConfigError("a server needs an engine with a tokenizer, got one without")
        self.models = ServedModels(
            settings.model_names or (engine.model_name,), max_model_len=engine.max_context
        )
        self.jobs = Jobs(engine, settings, make_grammar or GuidedGrammars(engine), self.models)
        self.settings = dataclasses.replace(
            settings,
            max_body_bytes=int(min(settings.max_body_bytes, self.jobs.most_body_bytes)),
            # Prompts may be lists of tokens.
            max_body_values=max(settings.max_body_values, 2 * engine.max_context),
        )
        self.engine = AsyncEngine(engine, self.settings)
        self.metrics = TokenMetrics()
        self.metrics.add(lambda: engine_families(self.engine))

    async def answer(self, request: HttpRequest, making: Coroutine[Any, Any, Job]) -> Response:
        """The whole answer, or the beginning of a stream; the request ends if its client leaves."""
        record: RequestRecord = request.state.record
        job = await until_client_leaves(request.receive, making)
        record.answer_id = job.writer.answer_id
        submit = self.engine.submit(*job.requests, deadline=record.deadline)
        answer = await until_client_leaves(request.receive, submit)
        record.hand_over()
        if job.is_stream:
            return EventStream(answer, job, record)
        async with answer:
            content = await until_client_leaves(request.receive, self._whole(answer, job, record))
        return Response(content, media_type="application/json")

    async def _whole(self, answer: Answer, job: Job, record: RequestRecord) -> bytes:
        deltas: dict[str, list[Delta]] = {one.request_id: [] for one in job.requests}
        async for delta in answer:
            record.saw(delta, job.writer.count(delta), is_last=answer.is_over)
            deltas[delta.request_id].append(delta)
            self.jobs.token_texts.learn(delta.logprobs)
        completions = [gather(of_one) for of_one in deltas.values()]
        if job.is_small:
            return job.writer.content(completions)
        return await asyncio.to_thread(job.writer.content, completions)

    def numbers(self) -> dict[str, Any]:
        """What the page shows; times as sums and counts, so that it can take differences."""
        self.engine.ask_for_saturation()
        histograms = {
            "queue": self.metrics.queue_time,
            "ttft": self.metrics.time_to_first_token,
            "itl": self.metrics.inter_token,
            "request": self.metrics.request_time,
        }
        times = {name: sum_and_count(histogram) for name, histogram in histograms.items()}
        return {
            "model": self.models.names[0],
            "max_model_len": self.engine.engine.max_context,
            "status": self.status()[1],
            "num_open": self.engine.num_open,
            "engine": dataclasses.asdict(self.engine.last_stats),
            "precision": self.engine.engine.precision.words(),
            "times": {name: {"sum_s": sum_s, "count": n} for name, (sum_s, n) in times.items()},
        }

    def status(self) -> tuple[int, str]:
        """(HTTP status, word) of /health."""
        if self.engine.problem is not None:
            return 503, f"engine failed: {self.engine.problem}"
        return (503, "shutting down") if self.engine.is_closing else (200, "ok")


def create_app(
    engine: Engine, settings: ServerSettings, make_grammar: MakeGrammar | None = None
) -> FastAPI:
    """The application; its lifespan starts and ends the engine's thread."""
    server = Server(engine, settings, make_grammar)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await server.engine.close()
        server.jobs.close()

    app = bare_app(server, lifespan)
    _add_openai_routes(app, server)
    server.models.add_routes(app)
    _add_own_routes(app, server)
    add_status_routes(app, server)
    add_page(app, PAGE_FILES)
    return app


def _add_openai_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", responses=ERRORS, response_model=None)
    async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
        """Answer a conversation."""
        return await server.answer(request, server.jobs.chat(body, request.state.at_end))

    @app.post("/v1/completions", responses=ERRORS, response_model=None)
    async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
        """Continue a text."""
        return await server.answer(request, server.jobs.completion(body))


def _add_own_routes(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest, request: HttpRequest) -> dict[str, Any]:
        """The tokens of a prompt or of a conversation."""
        return await until_client_leaves(request.receive, server.jobs.tokenize(body))

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest, request: HttpRequest) -> dict[str, Any]:
        """The text of tokens."""
        server.models.check(body.model)
        return await until_client_leaves(request.receive, server.jobs.detokenize(body.tokens))
