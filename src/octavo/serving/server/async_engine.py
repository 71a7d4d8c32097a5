"""Threads that work for many coroutines: the base of all, and the one of the engine.

The thread owns the engine: it adds, aborts and steps. Everything else here belongs to the event
loop. The two speak through a queue of commands (loop to thread) and `call_soon_threadsafe` (thread
to loop). A request that was submitted ends exactly once: with its last delta, or with an ApiError.
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, Self

from octavo.errors import CapacityError, OctavoError
from octavo.serving.engine.precision import Precision
from octavo.serving.engine.request import Delta, GrammarFailure, Request, Stats
from octavo.serving.server.api_error import (
    ApiError,
    bad_request,
    made_way,
    server_error,
    timed_out,
    too_many_requests,
    unavailable,
)
from octavo.serving.server.settings import ServerSettings

logger = logging.getLogger(__name__)

SATURATION_EVERY_S = 5.0
THREAD_END_S = 10.0
NO_LIMIT_S = 1e9
PATIENCE_S = 2.0  # with a body that has not come while others need its place
MADE_WAY = -math.inf
ENDED_FIRST = "the server has ended before the answer did"


class RequestThread(ABC):
    """What the event loop knows of the thread; `_run` alone is the thread's.

    A request holds a slot from its arrival to the end of its answer, whatever happens in between.
    worker: what does the work, as errors say it. A subclass keeps `_open`, the requests that the
    thread has, and calls `_note_idle` when one has gone.
    """

    _open: Collection[Any]

    def __init__(self, settings: ServerSettings, *, worker: str, thread_name: str) -> None:
        self.settings = settings
        self.problem: str | None = None  # why the worker has failed for good
        self.is_closing = False
        self._has_ended = False
        self._worker = worker
        self._clocks: set[asyncio.Timeout] = set()  # one for each slot in use
        # Of requests that are not whole, the oldest first: since when.
        self._arriving: dict[asyncio.Timeout, float] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    @property
    def num_open(self) -> int:
        """Requests that have come in and have not ended."""
        return max(len(self._open), len(self._clocks))

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[asyncio.Timeout]:
        """Inside, a request counts as open and its clock runs; ApiError if there is no room for it.

        The clock ends it with an ApiError: in time, or when the server ends. Whoever watches over
        the request from then on stops the clock: `clock.reschedule(None)`. Until `has_arrived` it
        holds one of half the slots: if they are in use, the oldest one makes way for a new one.
        """
        if len(self._arriving) >= max(1, self.settings.max_open // 2):
            self._end_slowest()
        self.check_open()
        clock = asyncio.timeout(self.settings.timeout_s or NO_LIMIT_S)
        self._clocks.add(clock)
        self._arriving[clock] = time.monotonic()
        self._idle.clear()
        try:
            async with clock:
                yield clock
        except TimeoutError:
            if not clock.expired():
                raise
            if self._has_ended:
                raise unavailable(ENDED_FIRST, "aborted") from None
            if self._arriving.get(clock) == MADE_WAY:
                raise made_way() from None
            raise timed_out(self.settings.timeout_s or NO_LIMIT_S) from None
        finally:
            self._clocks.discard(clock)
            self._arriving.pop(clock, None)
            self._note_idle()

    def _end_slowest(self) -> None:
        """End the oldest of the requests that are not whole, unless it has just come."""
        oldest, since_s = next(iter(self._arriving.items()))
        if time.monotonic() - since_s > PATIENCE_S:
            self._arriving[oldest] = MADE_WAY
            _end_now(oldest)

    def has_arrived(self, clock: asyncio.Timeout) -> None:
        """Note that all of a request is here; its slot is its own from then on."""
        self._arriving.pop(clock, None)

    def start(self) -> None:
        """Start the thread; its results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def _note_idle(self) -> None:
        if not self._open and not self._clocks:
            self._idle.set()

    def check_open(self) -> None:
        """ApiError if a request would be refused now, whatever it asks for."""
        self.check_works()
        if self.is_closing:
            raise unavailable("the server is ending and takes no new requests", "shutting_down")
        self.check_room(self.num_open)

    def check_works(self) -> None:
        """ApiError if the worker has failed or has ended."""
        if self.problem is not None:
            raise unavailable(f"the {self._worker} has failed: {self.problem}", "engine_failed")
        if self._has_ended:
            raise unavailable("the server has ended", "shutting_down")

    def check_room(self, num_open: int, num_new: int = 1) -> None:
        """ApiError if so many open requests leave no room for the new ones."""
        max_open = self.settings.max_open
        if num_new > max_open:
            raise bad_request(
                f"{num_new} choices exceed the {max_open} that this server answers at once: ask "
                "for fewer"
            )
        if num_open + num_new > max_open:
            raise too_many_requests(
                f"{num_open} of at most {max_open} requests are open, which leaves no room for "
                f"{num_new} more: try later",
                self.settings.retry_after_s,
            )

    async def drain(self, grace_s: float) -> bool:
        """Take no new requests and wait for the open ones; whether all of them ended in time."""
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        return not self.num_open

    def stop_waiting(self) -> None:
        """Make `drain` return now, whatever is open."""
        self._idle.set()

    async def _end_thread(self, ask: Callable[[], None]) -> None:
        """Wait for the thread's end, after asking for it, if it runs; but only once."""
        if self._has_ended:
            return
        self._has_ended = True
        for clock in self._clocks:
            if clock.when() is not None:
                _end_now(clock)
        if self._thread.is_alive():
            ask()
            await asyncio.to_thread(self._thread.join, THREAD_END_S)

    @abstractmethod
    async def close(self) -> None:
        """End the thread; requests that are still open end with an error."""

    @abstractmethod
    def _run(self) -> None:
        """The thread."""

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Called in the thread: let the event loop call this."""
        assert self._loop is not None
        # A loop that has been closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


def _end_now(clock: asyncio.Timeout) -> None:
    if not clock.expired():
        clock.reschedule(0.0)


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
    """The deltas of requests that belong together: `async with` it, `async for` over it.

    It ends with the last of its requests, or with the first error of one. Leaving it before its end
    aborts them all.
    """

    def __init__(self, owner: "AsyncEngine", request_ids: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        self.request_ids = tuple(request_ids)
        self.admitted: asyncio.Future[None] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self._owner = owner
        self._items: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        self._num_left = len(self.request_ids)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._num_left == 0

    def put(self, item: Delta | ApiError) -> None:
        """Hand on what came; a finish reason is a request's last one, an error the answer's."""
        self._items.put_nowait(item)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._owner.cancel(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self.is_over:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, ApiError):
            self._num_left = 0
            raise item
        if item.finish_reason is not None:
            self._num_left -= 1
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

    async def submit(self, *requests: Request, deadline: float | None = None) -> Answer:
        """Give requests to the engine, all of them or none; ApiError if one is refused.

        deadline: when they must have ended, by the event loop's clock. None counts the settings'
        timeout from now. What came in before the server began to end is still taken.
        """
        self.check_works()
        self.check_room(len(self._open), len(requests))
        assert self._loop is not None, "start() comes first"
        answer = Answer(self, [request.request_id for request in requests])
        if known := self._open.keys() & answer.request_ids:
            raise server_error(f"request {min(known)} is open already")
        self._open.update(dict.fromkeys(answer.request_ids, answer))
        self._idle.clear()
        self._commands.put(lambda: self._add(requests, answer))
        if self.settings.timeout_s is not None:
            at = self._loop.time() + self.settings.timeout_s if deadline is None else deadline
            answer.timer = self._loop.call_at(at, self._time_out, answer)
        try:
            await answer.admitted
        except BaseException:  # refused, or the caller was cancelled while it waited
            self.cancel(answer)
            raise
        return answer

    def cancel(self, answer: Answer) -> None:
        """Abort what is still open of an answer that nobody waits for any more."""
        if request_ids := self._forget(answer, answer.request_ids):
            self._commands.put(lambda: self._call(self._abort, request_ids))

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
        for answer in list(self._open.values()):
            self._end(answer, error)

    def _end(self, answer: Answer, error: ApiError) -> None:
        """End an answer with an error, unless it has ended; its other requests are aborted."""
        if not any(request_id in self._open for request_id in answer.request_ids):
            return
        self.cancel(answer)
        if not answer.admitted.done():
            answer.admitted.set_exception(error)
        else:
            answer.put(error)

    def _forget(self, answer: Answer, request_ids: Sequence[str]) -> list[str]:
        """Close these requests of an answer; those of them that were open."""
        closed = [one for one in request_ids if self._open.pop(one, None) is not None]
        is_over = not any(one in self._open for one in answer.request_ids)
        if is_over and answer.timer is not None:
            answer.timer.cancel()
        self._note_idle()
        return closed

    def _time_out(self, answer: Answer) -> None:
        assert self.settings.timeout_s is not None
        self._end(answer, timed_out(self.settings.timeout_s))

    def _admit(self, answer: Answer, error: ApiError | None) -> None:
        if error is not None:
            self._end(answer, error)
        elif not answer.admitted.done():
            answer.admitted.set_result(None)

    def _deliver(self, deltas: list[Delta], stats: Stats) -> None:
        self.last_stats = stats
        for delta in deltas:
            if (answer := self._open.get(delta.request_id)) is None:
                continue  # its caller has left
            match delta.finish_reason:
                case "error":
                    self._end(answer, _failure(delta.error or "the engine failed"))
                case "abort":
                    self._end(answer, unavailable(delta.error or ENDED_FIRST, "aborted"))
                case None:
                    answer.put(delta)
                case _:
                    self._forget(answer, [delta.request_id])
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

    def _add(self, requests: Sequence[Request], answer: Answer) -> bool:
        error = None
        for num_added, request in enumerate(requests):
            error = self._try_to_add(request)
            if error is not None:
                for one in requests[:num_added]:
                    self.engine.abort(one.request_id)
                break
        self._post(self._admit, answer, error)
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

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)

    def _call(self, function: Callable[..., None], *args: Any) -> bool:
        function(*args)
        # An aborted request frees its pages at once; the page at / shows it without another step.
        self._post(self._deliver, [], self.engine.stats())
        return True


def _failure(error: str) -> ApiError:
    if isinstance(error, GrammarFailure):
        return bad_request(f"this JSON schema cannot be followed: {error}", code="schema_too_large")
    return server_error(error)
