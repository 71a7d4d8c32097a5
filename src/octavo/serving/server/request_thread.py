"""A thread that works for many coroutines: it begins, refuses requests, and is waited for."""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from octavo.serving.server.api_error import too_many_requests, unavailable
from octavo.serving.server.settings import ServerSettings

THREAD_END_S = 10.0


class RequestThread(ABC):
    """What the event loop knows of the thread; `_run` alone is the thread's.

    worker: what does the work, as errors say it. A subclass keeps `_open`, its open requests, and
    `_idle` in step with them.
    """

    _open: Collection[Any]

    def __init__(self, settings: ServerSettings, *, worker: str, thread_name: str) -> None:
        self.settings = settings
        self.problem: str | None = None  # why the worker has failed for good
        self.is_closing = False
        self._is_asked_to_end = False
        self._worker = worker
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    @property
    def num_open(self) -> int:
        """Requests that have been submitted and have not ended."""
        return len(self._open)

    def start(self) -> None:
        """Start the thread; its results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check_open(self) -> None:
        """ApiError if a request would be refused now, whatever it asks for."""
        if self.problem is not None:
            raise unavailable(f"the {self._worker} has failed: {self.problem}", "engine_failed")
        if self.is_closing:
            raise unavailable("the server is ending and takes no new requests", "shutting_down")
        if self.num_open >= self.settings.max_open:
            raise too_many_requests(
                f"{self.num_open} requests are open, which is all this server takes: try later",
                self.settings.retry_after_s,
            )

    async def drain(self, grace_s: float) -> bool:
        """Take no new requests and wait for the open ones; whether all of them ended in time."""
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        return not self._open

    def stop_waiting(self) -> None:
        """Make `drain` return now, whatever is open."""
        self._idle.set()

    async def _end_thread(self, ask: Callable[[], None]) -> None:
        """Wait for the thread's end, after asking for it, if it runs; but only once."""
        if self._thread.is_alive() and not self._is_asked_to_end:
            self._is_asked_to_end = True
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
