"""A server that draws: OpenAI's route for images, and a pipeline in a thread of its own.

The thread owns the pipeline and draws one request after the other. Everything else here belongs to
the event loop. A request that nobody waits for any more ends after the step that runs, and one that
has not begun is not begun.
"""

import asyncio
import base64
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily as Total
from prometheus_client.core import GaugeMetricFamily as Gauge
from pydantic import AfterValidator, Field

from octavo.brief import brief
from octavo.errors import CapacityError, ConfigError, OctavoError
from octavo.integrations.diffusers.pipeline import find_components
from octavo.serving.engine.image_request import MAX_SIDE, ImageResult, ImageSampling
from octavo.serving.server.api_error import ApiError, bad_request, client_left, failure
from octavo.serving.server.async_engine import RequestThread
from octavo.serving.server.bare_app import ERRORS, BaseServer, make_app, until_client_leaves
from octavo.serving.server.metrics import REQUEST_TIMES, Metrics, RequestRecord, precision_families
from octavo.serving.server.saved import saved_bytes
from octavo.serving.server.schema import MAX_INT, Body, ModelName, Seed, Unserved, only
from octavo.serving.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.serving.engine.omni import Omni

logger = logging.getLogger(__name__)
AUTO = "auto"
SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
MAX_PROMPT = 32_000  # characters, OpenAI's
# What one request may ask for; the pixels are those of all its images.
MAX_IMAGES, MAX_PIXELS, MAX_STEPS = 10, 10 * 2048 * 2048, 200


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
    model: ModelName | None = None
    n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    size: Annotated[str, AfterValidator(_check_size)] | None = None
    user: str | None = None
    # of diffusers
    seed: Seed | None = None
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
    style: Unserved = None


class ImageQueue(RequestThread):
    """Requests of many coroutines for one pipeline.

    on_begin: called in the thread with the seconds that a request has waited.
    """

    def __init__(
        self, drawer: "Omni", settings: ServerSettings, on_begin: Callable[[float], None]
    ) -> None:
        super().__init__(settings, "pipeline")
        self.drawer, self._on_begin = drawer, on_begin
        self.num_steps = 0
        self._open: set[Future[ImageResult]] = set()  # those that run are being drawn

    @property
    def num_waiting(self) -> int:
        """Those of them that have not begun."""
        return sum(not answer.running() for answer in self._open)

    async def generate(self, prompt: str, sampling: ImageSampling) -> ImageResult:
        """What a prompt became; ApiError if it did not."""
        self.check_works()
        self.check_room(len(self._open))
        answer, is_left, arrival_s = Future[ImageResult](), threading.Event(), time.perf_counter()
        self._open.add(answer)

        def on_step(num_done: int, total: int) -> None:
            self.num_steps += 1
            if is_left.is_set():
                raise client_left()

        draw = partial(self.drawer.generate, [prompt], sampling, on_step=on_step)
        self._commands.put(partial(self._draw, draw, answer, arrival_s))
        try:
            return await asyncio.wrap_future(answer)
        finally:
            is_left.set()
            if not answer.running():
                self._open.discard(answer)

    # Below: the pipeline's thread.

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            command()

    def _draw(
        self, draw: Callable[[], list[ImageResult]], answer: Future[ImageResult], arrival_s: float
    ) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        self._on_begin(time.perf_counter() - arrival_s)
        try:
            (result,) = draw()
            answer.set_result(result)
        except ApiError as error:
            answer.set_exception(error)
        except CapacityError as error:
            answer.set_exception(bad_request(str(error), code="out_of_memory"))
        except OctavoError as error:
            answer.set_exception(bad_request(str(error), param_of(str(error))))
        except Exception as error:
            logger.exception("an image could not be drawn")
            found = failure(error)
            # A GPU has failed: every call after this one would fail as well.
            if type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error):
                self.problem = found.message
            answer.set_exception(found)
        self._post(self._open.discard, answer)


def param_of(message: str) -> str | None:
    """The field that an error of ours is about: messages begin with it."""
    name = message.partition(":")[0]
    return name if name in ImageSampling.__dataclass_fields__ else None


class ImageServer(BaseServer):
    """Draws images, one request after the other."""

    engine: ImageQueue
    page = "image_page"
    page_policy = f"{BaseServer.page_policy}; img-src data:"  # images come inside the answers
    failed = "the pipeline failed"

    def __init__(self, drawer: "Omni", settings: ServerSettings) -> None:
        if drawer.makes_video:
            got = f"{drawer.model_name}, which makes videos: use octavo image"
            raise ConfigError(f"expected a pipeline of pictures to serve, got {got}")
        super().__init__(settings, drawer.model_name)
        self.metrics = Metrics(REQUEST_TIMES, self._families)
        self.num_images = 0
        self.saved = saved_bytes(find_components(drawer.pipe).values())
        self.engine = ImageQueue(drawer, settings, self.metrics.times["queue"].observe)

    def _families(self) -> Iterator[Metric]:
        queue = self.engine
        yield Gauge("octavo_requests_open", "Requests inside the server.", queue.num_open)
        yield Gauge("octavo_requests_waiting", "Requests that have not begun.", queue.num_waiting)
        yield Total("octavo_images", "Pictures in answers.", self.num_images)
        yield Total("octavo_steps", "Denoising steps.", queue.num_steps)
        yield from precision_families(queue.drawer.precision)

    def sampling(self, body: ImageRequest) -> ImageSampling:
        """What a body asks for; ApiError if it is too much, or if the pipeline cannot do it."""
        self.check_model(body.model)
        found = SIZE.fullmatch(body.size or "")
        width, height = map(int, found.groups()) if found else (None, None)  # as the pipeline likes
        num_images = body.n or 1
        num_pixels = num_images * (width or 0) * (height or 0)
        for name, what, number, most in (
            ("n", "", num_images, MAX_IMAGES),
            ("size", " pixels in all pictures", num_pixels, MAX_PIXELS),
            ("num_inference_steps", "", body.num_inference_steps or 0, MAX_STEPS),
        ):
            if number > most:
                raise bad_request(f"{name}: expected at most {most}{what}, got {number}", name)
        own = body.model_dump(include=set(ImageSampling.__dataclass_fields__))
        try:
            sampling = ImageSampling(
                num_images_per_prompt=num_images, width=width, height=height, **own
            )
            self.engine.drawer.check(sampling)
        except OctavoError as error:
            param = param_of(str(error))
            is_side = param in ("height", "width")
            raise bad_request(str(error), "size" if is_side else param) from None
        return sampling

    def numbers(self) -> dict[str, Any]:
        """What the page shows."""
        time_s = self.metrics.sum_and_count("request")
        return {
            "model": self.model_names[0],
            "status": self.status()[1],
            "num_open": self.engine.num_open,
            "num_waiting": self.engine.num_waiting,
            "num_images": self.num_images,
            "mean_s": time_s["sum_s"] / time_s["count"] if time_s["count"] else None,
            "precision": self.engine.drawer.precision.words(),
            "saved_bytes": self.saved,
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


def create_image_app(drawer: "Omni", settings: ServerSettings) -> FastAPI:
    """The application of a diffusion pipeline."""
    return make_app(ImageServer(drawer, settings))


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
