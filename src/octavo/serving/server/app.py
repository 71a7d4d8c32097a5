"""The routes: OpenAI's, and the server's own."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import ConfigError
from octavo.serving.engine.request import Delta, gather
from octavo.serving.server.api_error import ApiError, server_error
from octavo.serving.server.async_engine import Answer, AsyncEngine, Engine
from octavo.serving.server.bare_app import (
    ERRORS,
    BaseServer,
    ServedModels,
    make_app,
    until_client_leaves,
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

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# What is served under each path; the page asks for the others beside it.
PAGE_FILES = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}


class Server(BaseServer):
    """Answers chats and completions; tells tokens."""

    engine: AsyncEngine
    metrics: TokenMetrics

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
        times = {
            "queue": self.metrics.queue_time,
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
            "precision": self.engine.engine.precision.words(),
            "times": {name: sum_and_count(histogram) for name, histogram in times.items()},
        }

    async def close(self) -> None:
        """End the engine's thread, and those of prompts, images and grammars."""
        await super().close()
        self.jobs.close()

    def add_routes(self, app: FastAPI) -> None:
        """Add OpenAI's routes of texts, and those of tokens."""

        @app.post("/v1/chat/completions", responses=ERRORS, response_model=None)
        async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
            """Answer a conversation."""
            return await self.answer(request, self.jobs.chat(body, request.state.at_end))

        @app.post("/v1/completions", responses=ERRORS, response_model=None)
        async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
            """Continue a text."""
            return await self.answer(request, self.jobs.completion(body))

        @app.post("/tokenize", responses=ERRORS)
        async def tokenize(body: TokenizeRequest, request: HttpRequest) -> dict[str, Any]:
            """The tokens of a prompt or of a conversation."""
            return await until_client_leaves(request.receive, self.jobs.tokenize(body))

        @app.post("/detokenize", responses=ERRORS)
        async def detokenize(body: DetokenizeRequest, request: HttpRequest) -> dict[str, Any]:
            """The text of tokens."""
            self.models.check(body.model)
            return await until_client_leaves(request.receive, self.jobs.detokenize(body.tokens))


def create_app(
    engine: Engine, settings: ServerSettings, make_grammar: MakeGrammar | None = None
) -> FastAPI:
    """The application of a language model's engine."""
    return make_app(Server(engine, settings, make_grammar), PAGE_FILES)


def event(document: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


async def events(answer: Answer, job: Job, record: RequestRecord) -> AsyncIterator[bytes]:
    """The events of all choices; an answer that fails ends with an error in place of [DONE]."""
    try:
        for chunk in job.writer.opening():
            yield event(chunk)
        async for delta in answer:
            record.saw(delta, job.writer.count(delta), is_last=answer.is_over)
            for chunk in job.writer.chunks(delta):
                yield event(chunk)
        if job.has_usage_chunk:
            yield event(job.writer.usage_chunk())
        yield DONE
        record.is_sent = True
    except ApiError as error:
        record.failed(error)
        yield event(error.body())
    except Exception as error:
        logger.exception("request %s: the stream failed", record.request_id)
        failure = server_error(f"{type(error).__name__}: {error}", "internal_error")
        record.failed(failure)
        yield event(failure.body())


class EventStream(Response):
    """A response that sends events until they end or the client leaves, and then lets go."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, job: Job, record: RequestRecord) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer, self._job, self._record = answer, job, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answer:
            try:
                await until_client_leaves(receive, self._send(send))
            except ApiError as error:  # nobody to tell
                self._record.left()
                if not self._record.is_sent:
                    self._record.error = error.message

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for part in events(self._answer, self._job, self._record):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
