"""Threads that work for many coroutines: the base of all, and the one of the engine.

The thread owns the engine: it adds, aborts and steps. Everything else here belongs to the event
loop. The two speak through a queue of commands (loop to thread) and `call_soon_threadsafe` (thread
to loop). A request that was submitted ends exactly once: with its last delta, or with an ApiError.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from octavo.errors import CapacityError, OctavoError
from octavo.serving.engine.request import Delta, GrammarFailure, Request, Stats
from octavo.serving.server.api_error import ApiError, bad_request, failure
from octavo.serving.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.serving.engine.engine import Engine

logger = logging.getLogger(__name__)

SATURATION_EVERY_S = 5.0
THREAD_END_S = 10.0
DRAIN_POLL_S = 0.02
NO_LIMIT_S = 1e9
PATIENCE_S = 2.0  # with a body that has not come while others need its place


def aborted() -> ApiError:
    """The server did not wait for the answer."""
    return ApiError(503, "the server has ended before the answer did", "aborted")


class Slot:
    """The place of a request in the server, from its arrival to its end, and the time it has."""

    def __init__(self, timeout_s: float | None) -> None:
        self.at_end = ExitStack()  # what the request holds until it has ended, however it ends
        self.is_whole = False  # all of the request is here
        self.since_s = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + (timeout_s or NO_LIMIT_S)
        self._clock: asyncio.Timeout | None = None
        message = f"expected an answer within {timeout_s or NO_LIMIT_S:g} s, which this server"
        self._error = ApiError(504, f"{message} allows; ask for less", "request_timeout")

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Inside, the calling task alone ends with an ApiError at the deadline."""
        self.stop()
        self._clock = clock = asyncio.timeout_at(self._deadline)
        try:
            async with clock:
                yield
        except TimeoutError:
            if not clock.expired():
                raise
            raise self._error from None
        finally:
            self._clock = None

    def end(self, error: ApiError) -> None:
        """End the task now, with this error, if it has a deadline."""
        if self._clock is not None and not self._clock.expired():
            self._error, self._deadline = error, 0.0
            self._clock.reschedule(0.0)

    def stop(self) -> None:
        """Lift the deadline: the answer is there."""
        if self._clock is not None and not self._clock.expired():
            self._clock.reschedule(None)
            self._clock = None


class RequestThread(ABC):
    """What the event loop knows of the thread; `_run` alone is the thread's.

    worker: what does the work, as errors say it. A subclass keeps `_open`, the requests that the
    thread has.
    """

    _open: Collection[Any]

    def __init__(self, settings: ServerSettings, worker: str) -> None:
        self.settings = settings
        self.problem: str | None = None  # why the worker has failed for good
        self.is_closing = False
        self._has_ended = False
        self._worker = worker
        self._slots: list[Slot] = []  # the oldest first
        self._can_wait = True
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"octavo-{worker}", daemon=True)

    @property
    def num_open(self) -> int:
        """Requests that have come in and have not ended."""
        return max(len(self._open), len(self._slots))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """Inside, a request counts as open and its time runs; ApiError if there is no room for it.

        Those that are not whole get half of the slots: the oldest one makes way for a new one,
        unless it has just come.
        """
        arriving = [slot for slot in self._slots if not slot.is_whole]
        is_half = len(arriving) >= max(1, self.settings.max_open // 2)
        if is_half and time.monotonic() - arriving[0].since_s > PATIENCE_S:
            message = "the request was not complete when others needed its place: send it at once"
            arriving[0].end(ApiError(408, message, "request_late"))
        self.check_works()
        if self.is_closing:
            message = "the server is ending and takes no new requests"
            raise ApiError(503, message, "shutting_down")
        self.check_room(self.num_open)
        slot = Slot(self.settings.timeout_s)
        self._slots.append(slot)
        try:
            with slot.at_end:
                async with slot.limit():
                    yield slot
        finally:
            self._slots.remove(slot)

    def start(self) -> None:
        """Start the thread; its results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check_works(self) -> None:
        """ApiError if the worker has failed or has ended."""
        if self.problem is not None:
            message = f"the {self._worker} has failed: {self.problem}"
            raise ApiError(503, message, "engine_failed")
        if self._has_ended:
            raise ApiError(503, "the server has ended", "shutting_down")

    def check_room(self, num_open: int, num_new: int = 1) -> None:
        """ApiError if so many open requests leave no room for the new ones."""
        max_open = self.settings.max_open
        if num_new > max_open:
            message = f"{num_new} choices exceed the {max_open} that this server answers at once"
            raise bad_request(f"{message}: ask for fewer")
        if num_open + num_new > max_open:
            raise self._full(
                f"{num_open} of at most {max_open} requests are open, which leaves no room for "
                f"{num_new} more: try later"
            )

    def _full(self, message: str) -> ApiError:
        return ApiError(429, message, "queue_full", retry_after_s=self.settings.retry_after_s)

    async def drain(self, grace_s: float) -> bool:
        """Take no new requests and wait for the open ones; whether all of them ended in time."""
        self.is_closing = True
        end_s = time.monotonic() + grace_s
        while self.num_open and self._can_wait and time.monotonic() < end_s:
            await asyncio.sleep(DRAIN_POLL_S)
        return not self.num_open

    def stop_waiting(self) -> None:
        """Make `drain` return now, whatever is open."""
        self._can_wait = False

    async def close(self) -> None:
        """End the thread; requests that are still open end with an error."""
        self.is_closing = True
        if self._has_ended:
            return
        self._has_ended = True
        for slot in self._slots:
            slot.end(aborted())
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join, THREAD_END_S)

    @abstractmethod
    def _run(self) -> None:
        """The thread; a command that is None ends it."""

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Called in the thread: let the event loop call this."""
        assert self._loop is not None
        # A loop that has been closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


class Answer:
    """The deltas of requests that belong together: `async for` over it.

    It ends with the last of its requests, or with the first error of one.
    """

    def __init__(self, requests: Sequence[Request], slot: Slot | None) -> None:
        self.slot = slot
        self.request_ids = tuple(request.request_id for request in requests)
        # First None, when the engine has the requests, then what they became; an error is the last.
        self.items: asyncio.Queue[Delta | ApiError | None] = asyncio.Queue()
        self._num_left = len(requests)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._num_left == 0

    async def get(self) -> Any:
        """What comes next; ApiError if it is one."""
        item = await self.items.get()
        if isinstance(item, ApiError):
            self._num_left = 0
            raise item
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self.is_over:
            raise StopAsyncIteration
        delta: Delta = await self.get()
        if delta.finish_reason is not None:
            self._num_left -= 1
        return delta


class AsyncEngine(RequestThread):
    """Requests of many coroutines for one engine."""

    def __init__(self, engine: "Engine", settings: ServerSettings) -> None:
        super().__init__(settings, "engine")
        self.engine = engine
        self.last_stats = engine.stats()
        self._saturation_due_s = 0.0
        self._open: dict[str, Answer] = {}

    @asynccontextmanager
    async def submit(self, *requests: Request, slot: Slot | None = None) -> AsyncIterator[Answer]:
        """Give requests to the engine, all of them or none; ApiError if one is refused.

        What came in before the server began to end is still taken. What has not ended when the
        caller leaves is aborted. slot: its deadline is lifted with the last token, however long
        that takes to send.
        """
        self.check_works()
        self.check_room(len(self._open), len(requests))
        answer = Answer(requests, slot)
        if known := self._open.keys() & answer.request_ids:
            raise ApiError(500, f"request {min(known)} is open already", "engine_error")
        self._open.update(dict.fromkeys(answer.request_ids, answer))
        self._commands.put(partial(self._add, requests, answer))
        try:
            await answer.get()
            yield answer
        finally:
            self._cancel(answer)

    def _cancel(self, answer: Answer) -> None:
        """Abort what is still open of an answer that nobody waits for any more."""
        if request_ids := [one for one in answer.request_ids if self._open.pop(one, None)]:
            self._commands.put(partial(self._call, self._abort, request_ids))

    def ask_for_saturation(self) -> None:
        """Have the engine read its counters of saturated values, at most every 5 s.

        `last_stats` has them as soon as they have come from the device.
        """
        now_s = time.monotonic()
        if self._thread.is_alive() and now_s >= self._saturation_due_s:
            self._saturation_due_s = now_s + SATURATION_EVERY_S
            self._commands.put(partial(self._call, self.engine.read_saturation))

    async def close(self) -> None:
        await super().close()
        self._end_all(aborted())

    def _end_all(self, error: ApiError) -> None:
        for answer in dict.fromkeys(self._open.values()):
            self._end(answer, error)

    def _end(self, answer: Answer, error: ApiError) -> None:
        """End an answer with an error; its other requests are aborted."""
        self._cancel(answer)
        answer.items.put_nowait(error)

    def _deliver(self, deltas: list[Delta], stats: Stats) -> None:
        self.last_stats = stats
        for delta in deltas:
            if (answer := self._open.get(delta.request_id)) is None:
                continue  # its caller has left
            match delta.finish_reason:
                case "error" if isinstance(delta.error, GrammarFailure):
                    message = f"this JSON schema cannot be followed: {delta.error}"
                    self._end(answer, bad_request(message, code="schema_too_large"))
                case "error":
                    message = delta.error or "the engine failed"
                    self._end(answer, ApiError(500, message, "engine_error"))
                case "abort":
                    self._end(answer, aborted())
                case reason:
                    answer.items.put_nowait(delta)
                    if reason is not None:
                        del self._open[delta.request_id]
                        if answer.slot and not self._open.keys() & answer.request_ids:
                            answer.slot.stop()

    def _fail(self, error: BaseException) -> None:
        self.problem = f"{type(error).__name__}: {error}"
        self._end_all(ApiError(500, f"the engine has failed: {self.problem}", "engine_failed"))

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
            if command is None:
                return False
            command()
            del command  # it has the request, and with it its images

    def _step(self) -> None:
        deltas = self.engine.step()
        self._post(self._deliver, deltas, self.engine.stats())

    def _add(self, requests: Sequence[Request], answer: Answer) -> None:
        num_added = 0
        try:
            for request in requests:
                self.engine.add(request)
                num_added += 1
        except Exception as error:
            added, refused = answer.request_ids[:num_added], answer.request_ids[num_added]
            self._abort(added)
            self._post(self._end, answer, self._refusal(refused, error))
        else:
            self._post(answer.items.put_nowait, None)

    def _refusal(self, request_id: str, error: Exception) -> ApiError:
        if isinstance(error, CapacityError):
            return self._full(str(error))
        if isinstance(error, OctavoError):
            return bad_request(str(error))
        logger.error("request %s could not be added", request_id, exc_info=error)
        return failure(error)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)
        # An aborted request frees its pages at once; the page at / shows it without another step.
        self._post(self._deliver, [], self.engine.stats())
