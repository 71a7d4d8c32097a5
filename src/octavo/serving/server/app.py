"""The routes: OpenAI's, and the server's own."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from octavo.errors import ConfigError
from octavo.serving.engine.request import Delta, gather
from octavo.serving.server.async_engine import Answer, AsyncEngine, Engine
from octavo.serving.server.bare_app import ERRORS, add_page, add_status_routes, bare_app
from octavo.serving.server.guidance import MakeGrammar
from octavo.serving.server.jobs import Job, Jobs
from octavo.serving.server.metrics import Metrics
from octavo.serving.server.request_log import RequestRecord
from octavo.serving.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.serving.server.served_models import ServedModels
from octavo.serving.server.settings import ServerSettings
from octavo.serving.server.stream import EventStream, until_client_leaves

# What is served under each path; the page asks for the others beside it.
PAGE_FILES = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}


class Server:
    """What the routes share."""

    def __init__(self, engine: Engine, settings: ServerSettings, make_grammar: MakeGrammar) -> None:
        if engine.tokenizer is None:
            raise ConfigError("a server needs an engine with a tokenizer, got one without")
        self.settings = settings
        self.metrics = Metrics()
        self.engine = AsyncEngine(engine, settings)
        self.models = ServedModels(
            settings.model_names or (engine.model_name,), max_model_len=engine.max_context
        )
        self.jobs = Jobs(engine, settings, make_grammar, self.models)

    async def answer(self, request: Request, job: Job) -> Response:
        """The whole answer, or the beginning of a stream; the request ends if its client leaves."""
        record: RequestRecord = request.state.record
        record.answer_id = job.writer.answer_id
        submit = self.engine.submit(*job.requests)
        answer = await until_client_leaves(request.receive, submit)
        if job.is_stream:
            return EventStream(answer, job, record)
        async with answer:
            body = await until_client_leaves(request.receive, self._whole(answer, job, record))
        return JSONResponse(body)

    async def _whole(self, answer: Answer, job: Job, record: RequestRecord) -> dict[str, Any]:
        deltas: dict[str, list[Delta]] = {one.request_id: [] for one in job.requests}
        async for delta in answer:
            record.saw(delta, job.writer.count(delta), is_last=answer.is_over)
            deltas[delta.request_id].append(delta)
        return job.writer.body([gather(of_one) for of_one in deltas.values()])

    def numbers(self) -> dict[str, Any]:
        """What the page shows; times as sums and counts, so that it can take differences."""
        times = {
            "ttft": self.metrics.time_to_first_token,
            "itl": self.metrics.inter_token,
            "request": self.metrics.request_time,
        }
        return {
            "model": self.models.names[0],
            "max_model_len": self.engine.engine.max_context,
            "status": self.status()[1],
            "num_open": self.engine.num_open,
            "engine": dataclasses.asdict(self.engine.last_stats),
            "times": {name: {"sum_s": h.total, "count": h.num_values} for name, h in times.items()},
        }

    def status(self) -> tuple[int, str]:
        """(HTTP status, word) of /health."""
        if self.engine.problem is not None:
            return 503, f"engine failed: {self.engine.problem}"
        return (503, "shutting down") if self.engine.is_closing else (200, "ok")


def guided_grammar(engine: Engine) -> MakeGrammar:
    """What makes the engine's grammars; its library is imported when the first one is asked for."""

    def make(schema: dict[str, Any]) -> Any:
        from octavo.serving.engine.guided import Grammar

        # The model's own: a tokenizer may name another end, or none. It must know them, though.
        num_texts = len(engine.tokenizer)
        eos_tokens = [token for token in getattr(engine, "eos_tokens", ()) if token < num_texts]
        return Grammar.from_json_schema(schema, engine.tokenizer, eos_tokens=eos_tokens or None)

    return make


def create_app(
    engine: Engine, settings: ServerSettings, make_grammar: MakeGrammar | None = None
) -> FastAPI:
    """The application; its lifespan starts and ends the engine's thread."""
    server = Server(engine, settings, make_grammar or guided_grammar(engine))

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
    add_status_routes(
        app, server, lambda: server.metrics.expose(server.engine.last_stats, server.engine.num_open)
    )
    add_page(app, PAGE_FILES)
    return app


def _add_openai_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", responses=ERRORS, response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        server.engine.check_open()
        return await server.answer(request, await server.jobs.chat(body))

    @app.post("/v1/completions", responses=ERRORS, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        server.engine.check_open()
        return await server.answer(request, await server.jobs.completion(body))


def _add_own_routes(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt or of a conversation."""
        return await server.jobs.tokenize(body)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens."""
        server.models.check(body.model)
        return await server.jobs.detokenize(body.tokens)
