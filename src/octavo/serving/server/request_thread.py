"""A thread that works for many coroutines: it begins, refuses requests, and is waited for."""

import asyncio
import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from octavo.serving.server.api_error import (
    bad_request,
    made_way,
    timed_out,
    too_many_requests,
    unavailable,
)
from octavo.serving.server.settings import ServerSettings

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
