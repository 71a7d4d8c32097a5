"""Pictures in a thread of their own, one request after the other, and their results for coroutines.

The thread owns the pipeline. Everything else here belongs to the event loop. A request that nobody
waits for any more ends after the step that runs, and one that has not begun is not begun.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.errors import CapacityError, OctavoError
from octavo.serving.engine.image_request import ImageResult, ImageSampling
from octavo.serving.engine.precision import Precision
from octavo.serving.server.api_error import (
    ApiError,
    bad_request,
    server_error,
    timed_out,
    unavailable,
)
from octavo.serving.server.request_thread import RequestThread
from octavo.serving.server.settings import ServerSettings

logger = logging.getLogger(__name__)


class Drawer(Protocol):
    """What the server asks of an `Omni`; one thread calls it, `check` any."""

    model_name: str
    precision: Precision

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
    arrival_s: float = field(default_factory=time.perf_counter)
    stop: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False


class ImageQueue(RequestThread):
    """Requests of many coroutines for one pipeline.

    on_begin: called in the thread with the seconds that a request has waited.
    """

    def __init__(
        self, drawer: Drawer, settings: ServerSettings, on_begin: Callable[[float], None]
    ) -> None:
        super().__init__(settings, worker="pipeline", thread_name="octavo-images")
        self.drawer, self._on_begin = drawer, on_begin
        self.num_steps = 0
        self._open: set[_Job] = set()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    @property
    def num_waiting(self) -> int:
        """Those of them that have not begun."""
        return sum(not job.has_begun for job in self._open)

    async def generate(self, prompt: str, sampling: ImageSampling) -> ImageResult:
        """What a prompt became; ApiError if it did not, or not in time."""
        self.check_works()
        self.check_room(len(self._open))
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

    async def close(self) -> None:
        """End the thread after the step that runs; open requests end with an error."""
        self.is_closing = True
        for job in list(self._open):
            job.stop.set()
            self._end(job, unavailable("the server has ended before the picture did", "aborted"))
        await self._end_thread(lambda: self._jobs.put(None))

    def _forget(self, job: _Job) -> None:
        self._open.discard(job)
        self._note_idle()

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
            self._on_begin(time.perf_counter() - job.arrival_s)
            self._post(self._end, job, self._draw(job))

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
