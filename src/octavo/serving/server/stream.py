"""Server-sent events, and noticing that nobody listens any more."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.serving.server.api_error import ApiError, client_left, server_error
from octavo.serving.server.async_engine import Answer
from octavo.serving.server.jobs import Job
from octavo.serving.server.metrics import RequestRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


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
