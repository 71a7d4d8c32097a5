"""The routes of a server that draws: OpenAI's for images, and the server's own."""

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import Metric

from octavo.errors import ConfigError, OctavoError
from octavo.serving.engine.image_request import ImageResult, ImageSampling
from octavo.serving.server.api_error import bad_request
from octavo.serving.server.bare_app import (
    ERRORS,
    PAGE_POLICY,
    add_page,
    add_status_routes,
    bare_app,
)
from octavo.serving.server.image_queue import Drawer, ImageQueue, param_of
from octavo.serving.server.image_schema import ImageRequest
from octavo.serving.server.metrics import (
    Metrics,
    counter,
    gauge,
    precision_families,
    sum_and_count,
)
from octavo.serving.server.request_log import RequestRecord
from octavo.serving.server.served_models import ServedModels
from octavo.serving.server.settings import ServerSettings
from octavo.serving.server.stream import until_client_leaves

PAGE_FILES = {"/": "image_page.html", "/page.js": "image_page.js", "/page.css": "page.css"}
# Pictures come inside the answers.
IMAGE_POLICY = f"{PAGE_POLICY}; img-src data:"


@dataclass(frozen=True, kw_only=True)
class DrawingLimits:
    """What one request may ask for; max_pixels are those of all its pictures."""

    max_images: int = 10
    max_pixels: int = 10 * 2048 * 2048
    max_steps: int = 200


LIMITS = DrawingLimits()


def _families(server: "ImageServer") -> Iterator[Metric]:
    """The numbers of a server that draws."""
    queue = server.engine
    yield gauge("octavo_requests_open", "Requests inside the server.", queue.num_open)
    yield gauge("octavo_requests_waiting", "Requests that have not begun.", queue.num_waiting)
    yield counter("octavo_images", "Pictures in answers.", server.num_images)
    yield counter("octavo_steps", "Denoising steps.", queue.num_steps)
    yield from precision_families(queue.drawer.precision)


class ImageServer:
    """What the routes share."""

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
        try:
            sampling = ImageSampling(
                num_inference_steps=body.num_inference_steps,
                guidance_scale=body.guidance_scale,
                true_cfg_scale=body.true_cfg_scale,
                negative_prompt=body.negative_prompt,
                width=width,
                height=height,
                num_images_per_prompt=num_images,
                seed=body.seed,
            )
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

    def status(self) -> tuple[int, str]:
        """(HTTP status, word) of /health."""
        if self.engine.problem is not None:
            return 503, f"the pipeline failed: {self.engine.problem}"
        return (503, "shutting down") if self.engine.is_closing else (200, "ok")

    def numbers(self) -> dict[str, Any]:
        """What the page shows."""
        sum_s, count = sum_and_count(self.metrics.request_time)
        return {
            "model": self.models.names[0],
            "status": self.status()[1],
            "num_open": self.engine.num_open,
            "num_waiting": self.engine.num_waiting,
            "num_images": self.num_images,
            "mean_s": sum_s / count if count else None,
            "precision": self.engine.drawer.precision.words(),
        }


def create_image_app(
    drawer: Drawer, settings: ServerSettings, limits: DrawingLimits = LIMITS
) -> FastAPI:
    """The application; its lifespan starts and ends the pipeline's thread."""
    server = ImageServer(drawer, settings, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await server.engine.close()

    app = bare_app(server, lifespan)
    _add_openai_routes(app, server)
    server.models.add_routes(app)
    add_status_routes(app, server)
    add_page(app, PAGE_FILES, IMAGE_POLICY)
    return app


def _add_openai_routes(app: FastAPI, server: ImageServer) -> None:
    @app.post("/v1/images/generations", responses=ERRORS, response_model=None)
    async def generations(body: ImageRequest, request: Request) -> Response:
        """Draw pictures from a prompt."""
        sampling = server.sampling(body)
        record: RequestRecord = request.state.record
        record.answer_id = f"img-{uuid.uuid4().hex}"
        drawing = server.engine.generate(body.prompt, sampling)
        result = await until_client_leaves(request.receive, drawing)
        content = await asyncio.to_thread(_content, result)
        record.outcome = "stop"
        server.num_images += len(result.images)
        return JSONResponse(content)


def _content(result: ImageResult) -> dict[str, Any]:
    """The answer as OpenAI writes it; `seed` of each picture, and `seconds`, are ours."""
    from octavo.integrations.diffusers.picture_files import png_bytes

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
