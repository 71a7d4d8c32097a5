"""A server that draws: OpenAI's route for images, and a pipeline in a thread of its own.

The thread owns the pipeline and draws one request after the other. Everything else here belongs to
the event loop. A request that nobody waits for any more ends after the step that runs, and one that
has not begun is not begun.
"""

import asyncio
import base64
import logging
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily as Total
from prometheus_client.core import GaugeMetricFamily as Gauge
from pydantic import AfterValidator, Field

from octavo.brief import brief
from octavo.errors import CapacityError, ConfigError, OctavoError
from octavo.serving.engine.image_request import MAX_SIDE, ImageResult, ImageSampling
from octavo.serving.engine.precision import Precision
from octavo.serving.server.api_error import (
    ApiError,
    bad_request,
    server_error,
    timed_out,
    unavailable,
)
from octavo.serving.server.async_engine import RequestThread
from octavo.serving.server.bare_app import (
    ERRORS,
    PAGE_POLICY,
    BaseServer,
    ServedModels,
    make_app,
    until_client_leaves,
)
from octavo.serving.server.metrics import (
    Metrics,
    RequestRecord,
    precision_families,
    sum_and_count,
)
from octavo.serving.server.schema import MAX_INT, Body, only
from octavo.serving.server.settings import ServerSettings

logger = logging.getLogger(__name__)
AUTO = "auto"
SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
# Fields whose names and values are those of ImageSampling.
DIFFUSERS = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt", "seed")
MAX_PROMPT = 32_000  # characters, OpenAI's
PAGE_FILES = {"/": "image_page.html", "/page.js": "image_page.js", "/page.css": "page.css"}
# Images come inside the answers.
IMAGE_POLICY = f"{PAGE_POLICY}; img-src data:"


def _check_size(size: str) -> str:
    found = SIZE.fullmatch(size)
    if size != AUTO and found is None:
        raise ValueError(f"expected auto or WIDTHxHEIGHT, such as 1024x1024, got {brief(size)}")
    if found is not None and max(map(int, found.groups())) > MAX_SIDE:
        raise ValueError(f"expected sides of at most {MAX_SIDE} pixels, got {size}")
    return size


class ImageRequest(Body):
    """The body of /v1/images/generations."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    model: Annotated[str, Field(max_length=1000)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    size: Annotated[str, AfterValidator(_check_size)] | None = None
    user: str | None = None
    # of diffusers
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    true_cfg_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    # Images stay in no file of the server: there is no URL for them.
    response_format: Annotated[Any, only("b64_json")] = None
    # known, not served
    background: Annotated[Any, only(AUTO, "opaque")] = None
    moderation: Annotated[Any, only(AUTO)] = None
    output_compression: Annotated[Any, only(100)] = None
    output_format: Annotated[Any, only("png")] = None
    partial_images: Annotated[Any, only(0)] = None
    quality: Annotated[Any, only(AUTO)] = None
    stream: Annotated[Any, only(False)] = None
    style: Annotated[Any, only()] = None

    def width_and_height(self) -> tuple[int, int] | tuple[None, None]:
        """What `size` says; (None, None) leaves it to the pipeline."""
        found = SIZE.fullmatch(self.size or "")
        return (int(found[1]), int(found[2])) if found else (None, None)


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
    """Nobody waits for this image any more."""


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
            logger.exception("an image could not be drawn")
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


@dataclass(frozen=True, kw_only=True)
class DrawingLimits:
    """What one request may ask for; max_pixels are those of all its images."""

    max_images: int = 10
    max_pixels: int = 10 * 2048 * 2048
    max_steps: int = 200


LIMITS = DrawingLimits()


def _families(server: "ImageServer") -> Iterator[Metric]:
    """The numbers of a server that draws."""
    queue = server.engine
    yield Gauge("octavo_requests_open", "Requests inside the server.", queue.num_open)
    yield Gauge("octavo_requests_waiting", "Requests that have not begun.", queue.num_waiting)
    yield Total("octavo_images", "Pictures in answers.", server.num_images)
    yield Total("octavo_steps", "Denoising steps.", queue.num_steps)
    yield from precision_families(queue.drawer.precision)


class ImageServer(BaseServer):
    """Draws images, one request after the other."""

    engine: ImageQueue
    failed = "the pipeline failed"

    def __init__(self, drawer: Drawer, settings: ServerSettings, limits: DrawingLimits) -> None:
        if drawer.makes_video:
            raise ConfigError(
                f"expected a pipeline of pictures to serve, got {drawer.model_name}, which makes "
                "videos: use octavo image"
            )
        self.settings = settings
        self.limits = limits
        self.metrics = Metrics()
        self.num_images = 0
        self.engine = ImageQueue(drawer, settings, on_begin=self.metrics.queue_time.observe)
        self.metrics.add(lambda: _families(self))
        self.models = ServedModels(settings.model_names or (drawer.model_name,))

    def sampling(self, body: ImageRequest) -> ImageSampling:
        """What a body asks for; ApiError if it is too much, or if the pipeline cannot do it."""
        self.models.check(body.model)
        width, height = body.width_and_height()
        num_images = body.n or 1
        self._check_limits(num_images, (width or 0) * (height or 0), body.num_inference_steps)
        size: dict[str, Any] = {"width": width, "height": height}
        own = {name: getattr(body, name) for name in DIFFUSERS}
        try:
            sampling = ImageSampling(num_images_per_prompt=num_images, **size, **own)
            self.engine.drawer.check(sampling)
        except OctavoError as error:
            param = param_of(str(error))
            raise bad_request(
                str(error), "size" if param in ("height", "width") else param
            ) from None
        return sampling

    def _check_limits(self, num_images: int, num_pixels: int, num_steps: int | None) -> None:
        limits = self.limits
        if num_images > limits.max_images:
            raise bad_request(f"n: expected at most {limits.max_images}, got {num_images}", "n")
        if num_images * num_pixels > limits.max_pixels:
            raise bad_request(
                f"size: expected at most {limits.max_pixels} pixels in all pictures, got "
                f"{num_images * num_pixels}",
                "size",
            )
        if num_steps is not None and num_steps > limits.max_steps:
            name = "num_inference_steps"
            raise bad_request(f"{name}: expected at most {limits.max_steps}, got {num_steps}", name)

    def numbers(self) -> dict[str, Any]:
        """What the page shows."""
        time_s = sum_and_count(self.metrics.request_time)
        return {
            "model": self.models.names[0],
            "status": self.status()[1],
            "num_open": self.engine.num_open,
            "num_waiting": self.engine.num_waiting,
            "num_images": self.num_images,
            "mean_s": time_s["sum_s"] / time_s["count"] if time_s["count"] else None,
            "precision": self.engine.drawer.precision.words(),
        }

    def add_routes(self, app: FastAPI) -> None:
        """Add OpenAI's route of images."""

        @app.post("/v1/images/generations", responses=ERRORS, response_model=None)
        async def generations(body: ImageRequest, request: HttpRequest) -> Response:
            """Draw images from a prompt."""
            sampling = self.sampling(body)
            record: RequestRecord = request.state.record
            record.answer_id = f"img-{uuid.uuid4().hex}"
            drawing = self.engine.generate(body.prompt, sampling)
            result = await until_client_leaves(request.receive, drawing)
            content = await asyncio.to_thread(_content, result)
            record.outcome = "stop"
            self.num_images += len(result.images)
            return JSONResponse(content)


def create_image_app(
    drawer: Drawer, settings: ServerSettings, limits: DrawingLimits = LIMITS
) -> FastAPI:
    """The application of a diffusion pipeline."""
    return make_app(ImageServer(drawer, settings, limits), PAGE_FILES, IMAGE_POLICY)


def _content(result: ImageResult) -> dict[str, Any]:
    """The answer as OpenAI writes it; `seed` of each image, and `seconds`, are ours."""
    from octavo.integrations.diffusers.image_files import png_bytes

    data = [
        {"b64_json": base64.b64encode(png_bytes(image)).decode(), "seed": seed}
        for image, seed in zip(result.images, result.seeds, strict=True)
    ]
    width, height = result.images[0].size
    return {
        "created": int(time.time()),
        "data": data,
        "output_format": "png",
        "size": f"{width}x{height}",
        "seconds": round(result.seconds, 6),
    }
