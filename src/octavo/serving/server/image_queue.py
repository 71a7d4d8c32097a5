"""Pictures in a thread of their own, one request after the other, and their results for coroutines.

The thread owns the pipeline. Everything else here belongs to the event loop. A request that nobody
waits for any more ends after the step that runs, and one that has not begun is not begun.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.errors import CapacityError, OctavoError
from octavo.serving.engine.image_request import ImageResult, ImageSampling
from octavo.serving.server.api_error import (
    ApiError,
    bad_request,
    server_error,
    timed_out,
    too_many_requests,
    unavailable,
)
from octavo.serving.server.settings import ServerSettings

logger = logging.getLogger(__name__)

THREAD_END_S = 10.0


class Drawer(Protocol):
    """What the server asks of an `Omni`; one thread calls it, `check` any."""

    model_name: str

    @property
    def makes_video(self) -> bool: ...
    def check(self, sampling: ImageSampling) -> None: ...
    def generate(
        self,
        prompts: str | Sequence[str],
        sampling: ImageSampling = ...,
        *,
        on_step: Callable[[int, int], object] | None = None,
    ) -> list[ImageResult]: ...


class _Stopped(Exception):
    """Nobody waits for this picture any more."""


@dataclass(eq=False)
class _Job:
    prompt: str
    sampling: ImageSampling
    answer: asyncio.Future[ImageResult]
    stop: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False


class ImageQueue:
    """Requests of many coroutines for one pipeline."""

    def __init__(self, drawer: Drawer, settings: ServerSettings) -> None:
        self.drawer = drawer
        self.settings = settings
        self.problem: str | None = None  # why the pipeline has failed for good
        self.is_closing = False
        self.num_steps = 0
        self._open: set[_Job] = set()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-images", daemon=True)

    @property
    def num_open(self) -> int:
        """Requests that have been submitted and have not ended."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Those of them that have not begun."""
        return sum(not job.has_begun for job in self._open)

    def start(self) -> None:
        """Start the thread; its results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check_open(self) -> None:
        """ApiError if a request would be refused now, whatever it asks for."""
        if self.problem is not None:
            raise unavailable(f"the pipeline has failed: {self.problem}", "engine_failed")
        if self.is_closing:
            raise unavailable("the server is ending and takes no new requests", "shutting_down")
        if self.num_open >= self.settings.max_open:
            raise too_many_requests(
                f"{self.num_open} requests are open, which is all this server takes: try later",
                self.settings.retry_after_s,
            )

    async def generate(self, prompt: str, sampling: ImageSampling) -> ImageResult:
        """What a prompt became; ApiError if it did not, or not in time."""
        self.check_open()
        assert self._loop is not None, "start() comes first"
        job = _Job(prompt, sampling, self._loop.create_future())
        self._open.add(job)
        self._idle.clear()
        self._jobs.put(job)
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await job.answer
        except TimeoutError:
            assert self.settings.timeout_s is not None
            raise timed_out(self.settings.timeout_s) from None
        finally:
            job.stop.set()
            if not job.has_begun:
                self._forget(job)

    async def drain(self, grace_s: float) -> bool:
        """Take no new requests and wait for the open ones; whether all of them ended in time."""
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        return not self._open

    def stop_waiting(self) -> None:
        """Make `drain` return now, whatever is open."""
        self._idle.set()

    async def close(self) -> None:
        """End the thread after the step that runs; open requests end with an error."""
        self.is_closing = True
        for job in list(self._open):
            job.stop.set()
            self._end(job, unavailable("the server has ended before the picture did", "aborted"))
        if self._thread.is_alive():
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, THREAD_END_S)

    def _forget(self, job: _Job) -> None:
        self._open.discard(job)
        if not self._open:
            self._idle.set()

    def _end(self, job: _Job, outcome: ImageResult | ApiError) -> None:
        self._forget(job)
        if job.answer.done():
            return  # its caller has left
        if isinstance(outcome, ApiError):
            job.answer.set_exception(outcome)
        else:
            job.answer.set_result(outcome)

    # Below: the pipeline's thread.

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.stop.is_set():
                continue
            job.has_begun = True
            outcome = self._draw(job)
            assert self._loop is not None
            # A loop that has been closed has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end, job, outcome)

    def _draw(self, job: _Job) -> ImageResult | ApiError:
        def on_step(num_done: int, total: int) -> None:
            self.num_steps += 1
            if job.stop.is_set():
                raise _Stopped

        try:
            (result,) = self.drawer.generate([job.prompt], job.sampling, on_step=on_step)
            return result
        except _Stopped:
            return unavailable("the server has ended before the picture did", "aborted")
        except CapacityError as error:
            return bad_request(str(error), code="out_of_memory")
        except OctavoError as error:
            return bad_request(str(error), param_of(str(error)))
        except Exception as error:
            logger.exception("a picture could not be drawn")
            if _is_final(error):
                self.problem = f"{type(error).__name__}: {error}"
            return server_error(f"{type(error).__name__}: {error}")


def param_of(message: str) -> str | None:
    """The field that an error of ours is about: messages begin with it."""
    name = message.partition(":")[0]
    return name if name in ImageSampling.__dataclass_fields__ else None


def _is_final(error: Any) -> bool:
    """Whether a GPU has failed: every call after this one would fail as well."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
