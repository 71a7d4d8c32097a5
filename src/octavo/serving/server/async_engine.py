"""The engine in a thread of its own, and its answers for coroutines.

The thread owns the engine: it adds, aborts and steps. Everything else here belongs to the event
loop. The two speak through a queue of commands (loop to thread) and `call_soon_threadsafe` (thread
to loop). A request that was submitted ends exactly once: with its last delta, or with an ApiError.
"""

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self

from octavo.errors import CapacityError, OctavoError
from octavo.serving.engine.precision import Precision
from octavo.serving.engine.request import Delta, Request, Stats
from octavo.serving.server.api_error import (
    ApiError,
    bad_request,
    server_error,
    timed_out,
    too_many_requests,
    unavailable,
)
from octavo.serving.server.request_thread import ENDED_FIRST, RequestThread
from octavo.serving.server.settings import ServerSettings

logger = logging.getLogger(__name__)

SATURATION_EVERY_S = 5.0


class Engine(Protocol):
    """What the server asks of an engine; one thread calls it, what is about images any."""

    model_name: str
    max_context: int
    tokenizer: Any
    precision: Precision

    @property
    def has_work(self) -> bool: ...
    @property
    def has_images(self) -> bool: ...
    def count_image_tokens(self, width: int, height: int) -> int | None: ...
    def choose_image_reduction(self, width: int, height: int, factors: Iterable[int]) -> int: ...
    def prepare_images(self, prompt: Sequence[int], images: Iterable[Any]) -> Any: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def stats(self) -> Stats: ...
    def read_saturation(self) -> None: ...
    def close(self) -> None: ...


class Answer:
    """The deltas of one request as they come: `async with` it, `async for` over it.

    Leaving it before its end aborts the request.
    """

    def __init__(self, owner: "AsyncEngine", request_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.request_id = request_id
        self.admitted: asyncio.Future[None] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self._owner = owner
        self._items: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        self._is_over = False

    def put(self, item: Delta | ApiError) -> None:
        """Hand on what came; the last one is a delta with a finish reason, or an error."""
        self._items.put_nowait(item)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._owner.cancel(self.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._is_over:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, ApiError):
            self._is_over = True
            raise item
        self._is_over = item.finish_reason is not None
        return item


class AsyncEngine(RequestThread):
    """Requests of many coroutines for one engine."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        super().__init__(settings, worker="engine", thread_name="octavo-engine")
        self.engine = engine
        self.last_stats = engine.stats()
        self._saturation_due_s = 0.0
        self._open: dict[str, Answer] = {}
        self._commands: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()

    async def submit(self, request: Request, deadline: float | None = None) -> Answer:
        """Give a request to the engine; ApiError if it is refused.

        deadline: when it must have ended, by the event loop's clock. None counts the settings'
        timeout from now. A request that came in before the server began to end is still taken.
        """
        self.check_works()
        self.check_room(len(self._open))
        assert self._loop is not None, "start() comes first"
        request_id = request.request_id
        if request_id in self._open:
            raise server_error(f"request {request_id} is open already")
        answer = Answer(self, request_id)
        self._open[request_id] = answer
        self._idle.clear()
        self._commands.put(lambda: self._add(request, answer))
        if self.settings.timeout_s is not None:
            at = self._loop.time() + self.settings.timeout_s if deadline is None else deadline
            answer.timer = self._loop.call_at(at, self._time_out, answer)
        try:
            await answer.admitted
        except BaseException:  # refused, or the caller was cancelled while it waited
            self.cancel(request_id)
            raise
        return answer

    def cancel(self, request_id: str) -> None:
        """End a request that nobody waits for any more; one that has ended is left alone."""
        if self._forget(request_id) is not None:
            self._commands.put(lambda: self._call(self.engine.abort, request_id))

    def ask_for_saturation(self) -> None:
        """Have the engine read its counters of saturated values, at most every 5 s.

        `last_stats` has them as soon as they have come from the device.
        """
        now_s = time.monotonic()
        if self._thread.is_alive() and now_s >= self._saturation_due_s:
            self._saturation_due_s = now_s + SATURATION_EVERY_S
            self._commands.put(lambda: self._call(self.engine.read_saturation))

    async def close(self) -> None:
        """End the thread; requests that are still open end with an error."""
        self.is_closing = True
        await self._end_thread(lambda: self._commands.put(lambda: False))
        self._end_all(unavailable(ENDED_FIRST, "aborted"))

    def _end_all(self, error: ApiError) -> None:
        for request_id in list(self._open):
            self._end(request_id, error)

    def _end(self, request_id: str, error: ApiError) -> None:
        answer = self._forget(request_id)
        if answer is None:
            return
        if not answer.admitted.done():
            answer.admitted.set_exception(error)
        else:
            answer.put(error)

    def _forget(self, request_id: str) -> Answer | None:
        answer = self._open.pop(request_id, None)
        if answer is not None and answer.timer is not None:
            answer.timer.cancel()
        self._note_idle()
        return answer

    def _time_out(self, answer: Answer) -> None:
        if answer.request_id in self._open:
            assert self.settings.timeout_s is not None
            self._end(answer.request_id, timed_out(self.settings.timeout_s))
            self._commands.put(lambda: self._call(self.engine.abort, answer.request_id))

    def _admit(self, answer: Answer, error: ApiError | None) -> None:
        if error is not None:
            self._end(answer.request_id, error)
        elif not answer.admitted.done():
            answer.admitted.set_result(None)

    def _deliver(self, deltas: list[Delta], stats: Stats) -> None:
        self.last_stats = stats
        for delta in deltas:
            if (answer := self._open.get(delta.request_id)) is None:
                continue  # its caller has left
            match delta.finish_reason:
                case "error":
                    self._end(delta.request_id, server_error(delta.error or "the engine failed"))
                case "abort":
                    message = delta.error or ENDED_FIRST
                    self._end(delta.request_id, unavailable(message, "aborted"))
                case None:
                    answer.put(delta)
                case _:
                    self._forget(delta.request_id)
                    answer.put(delta)

    def _fail(self, error: BaseException) -> None:
        self.problem = f"{type(error).__name__}: {error}"
        self._end_all(server_error(f"the engine has failed: {self.problem}", "engine_failed"))

    # Below: the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_work:
                    self._step()
            self.engine.close()
            self._step()
        except BaseException as error:
            logger.exception("the engine has failed")
            self._post(self._fail, error)

    def _obey(self) -> bool:
        """Do what the loop asks for; wait for it if there is nothing else to do."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if not command():
                return False
            del command  # it has the request, and with it its images

    def _step(self) -> None:
        deltas = self.engine.step()
        self._post(self._deliver, deltas, self.engine.stats())

    def _add(self, request: Request, answer: Answer) -> bool:
        self._post(self._admit, answer, self._try_to_add(request))
        return True

    def _try_to_add(self, request: Request) -> ApiError | None:
        try:
            self.engine.add(request)
        except CapacityError as error:
            return too_many_requests(str(error), self.settings.retry_after_s)
        except OctavoError as error:
            return bad_request(str(error))
        except Exception as error:
            logger.exception("request %s could not be added", request.request_id)
            return server_error(f"{type(error).__name__}: {error}")
        return None

    def _call(self, function: Callable[..., None], *args: str) -> bool:
        function(*args)
        # An aborted request frees its pages at once; the page at / shows it without another step.
        self._post(self._deliver, [], self.engine.stats())
        return True
