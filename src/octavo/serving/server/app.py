"""The routes: OpenAI's, and the server's own."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import ConfigError
from octavo.serving.engine.request import Delta, gather
from octavo.serving.server.answers import Job
from octavo.serving.server.api_error import ApiError, failure
from octavo.serving.server.async_engine import Answer, AsyncEngine
from octavo.serving.server.bare_app import ERRORS, BaseServer, make_app, until_client_leaves
from octavo.serving.server.guidance import MakeGrammar, guided_grammars
from octavo.serving.server.jobs import Jobs
from octavo.serving.server.metrics import TOKEN_TIMES, Metrics, RequestRecord, engine_families
from octavo.serving.server.saved import saved_bytes
from octavo.serving.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.serving.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.serving.engine.engine import Engine

logger = logging.getLogger(__name__)

Asked = ChatRequest | CompletionRequest
DONE = b"data: [DONE]\n\n"


class Server(BaseServer):
    """Answers chats and completions; tells tokens."""

    engine: AsyncEngine

    def __init__(
        self, engine: "Engine", settings: ServerSettings, make_grammar: MakeGrammar | None
    ) -> None:
        if engine.tokenizer is None:
            raise ConfigError("a server needs an engine with a tokenizer, got one without")
        super().__init__(settings, engine.model_name, max_model_len=engine.max_context)
        grammars = make_grammar or guided_grammars(engine)
        self.jobs = Jobs(engine, settings, grammars, self.model_names[0])
        self.settings = dataclasses.replace(
            settings,
            max_body_bytes=int(min(settings.max_body_bytes, self.jobs.most_body_bytes)),
            # Prompts may be lists of tokens.
            max_body_values=max(settings.max_body_values, 2 * engine.max_context),
        )
        self.saved = saved_bytes([engine.model], engine.precision.cache)
        self.engine = AsyncEngine(engine, self.settings)
        self.metrics = Metrics(TOKEN_TIMES, lambda: engine_families(self.engine))

    async def answer(self, request: HttpRequest, asked: Asked) -> Response:
        """The whole answer, or the beginning of a stream; the request ends if its client leaves."""
        self.check_model(asked.model)
        record: RequestRecord = request.state.record
        if asked.stream:
            return EventStream(self, record, asked)
        content = await until_client_leaves(request.receive, self._whole(record, asked))
        record.slot.stop()
        return Response(content, media_type="application/json")

    @asynccontextmanager
    async def answering(
        self, record: RequestRecord, asked: Asked
    ) -> AsyncIterator[tuple[Job, AsyncIterator[Delta]]]:
        """A job, and its answer as it comes; what has not come at the end is aborted."""
        job = await self.jobs.make(asked, record.slot.at_end)
        record.answer_id = job.answer_id
        async with self.engine.submit(*job.requests, slot=record.slot) as answer:
            yield job, _noted(answer, job, record)

    async def _whole(self, record: RequestRecord, asked: Asked) -> bytes:
        async with self.answering(record, asked) as (job, answer):
            deltas: dict[str, list[Delta]] = {one.request_id: [] for one in job.requests}
            async for delta in answer:
                deltas[delta.request_id].append(delta)
                for one in delta.logprobs or ():  # while no other thread uses the tokenizer
                    for token in (one.token, *(token for token, _ in one.top)):
                        self.jobs.text_of(token)
        completions = [gather(of_one) for of_one in deltas.values()]
        if job.is_small:
            return job.content(completions)
        return await asyncio.to_thread(job.content, completions)

    def numbers(self) -> dict[str, Any]:
        """What the page shows; times as sums and counts, so that it can take differences."""
        self.engine.ask_for_saturation()
        return {
            "model": self.model_names[0],
            "max_model_len": self.engine.engine.max_context,
            "status": self.status()[1],
            "num_open": self.engine.num_open,
            "engine": dataclasses.asdict(self.engine.last_stats),
            "precision": self.engine.engine.precision.words(),
            "saved_bytes": self.saved,
            "times": {name: self.metrics.sum_and_count(name) for name in TOKEN_TIMES},
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
            return await self.answer(request, body)

        @app.post("/v1/completions", responses=ERRORS, response_model=None)
        async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
            """Continue a text."""
            return await self.answer(request, body)

        @app.post("/tokenize", responses=ERRORS)
        async def tokenize(body: TokenizeRequest, request: HttpRequest) -> dict[str, Any]:
            """The tokens of a prompt or of a conversation."""
            self.check_model(body.model)
            return await until_client_leaves(request.receive, self.jobs.tokenize(body))

        @app.post("/detokenize", responses=ERRORS)
        async def detokenize(body: DetokenizeRequest, request: HttpRequest) -> dict[str, Any]:
            """The text of tokens."""
            self.check_model(body.model)
            return await until_client_leaves(request.receive, self.jobs.detokenize(body.tokens))


def create_app(
    engine: "Engine", settings: ServerSettings, make_grammar: MakeGrammar | None = None
) -> FastAPI:
    """The application of a language model's engine."""
    return make_app(Server(engine, settings, make_grammar))


class EventStream(Response):
    """A response that sends events until they end or the client leaves, and then lets go.

    An answer that fails ends with an error in place of [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, server: Server, record: RequestRecord, asked: Asked) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._server, self._record, self._asked = server, record, asked
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_client_leaves(receive, self._send(send))
        except ApiError as error:
            if not self._has_begun:
                raise
            self._record.left()  # nobody to tell
            if not self._record.is_sent:
                self._record.error = error.message

    async def _send(self, send: Send) -> None:
        record, answering = self._record, self._server.answering(self._record, self._asked)
        try:
            async with record.slot.limit(), answering as (job, answer):
                start = {"status": self.status_code, "headers": self.raw_headers}
                self._has_begun = True
                await send({"type": "http.response.start", **start})
                for chunk in job.opening():
                    await _send_event(send, chunk)
                async for delta in answer:
                    for chunk in job.chunks(delta):
                        await _send_event(send, chunk)
                if job.has_usage_chunk:
                    await _send_event(send, job.usage_chunk())
                await send({"type": "http.response.body", "body": DONE, "more_body": True})
                record.is_sent = True
        except Exception as error:
            if not self._has_begun:
                raise
            if not isinstance(error, ApiError):
                logger.exception("request %s: the stream failed", record.request_id)
                error = failure(error, "internal_error")
            record.failed(error)
            await _send_event(send, error.body())
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _noted(answer: Answer, job: Job, record: RequestRecord) -> AsyncIterator[Delta]:
    async for delta in answer:
        job.note(delta)
        record.usage = job.usage
        record.saw(delta, is_last=answer.is_over)
        yield delta


async def _send_event(send: Send, document: dict[str, Any]) -> None:
    body = b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})
