"""The images of requests: checked before any is decoded, decoded one at a time, within a budget."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from octavo.errors import OctavoError
from octavo.serving.server.api_error import bad_request, client_left
from octavo.serving.server.async_engine import Engine
from octavo.serving.server.images import PARAM, ImageFile, decode, read_file, refused
from octavo.serving.server.pixel_budget import Hold, PixelBudget
from octavo.serving.server.settings import ImageLimits
from octavo.serving.server.workers import yield_to_others

# Each may need the memory of a large image: 4 bytes a pixel to decode it (16 for WebP), as much
# again for its copy in RGB, and some 60 bytes for a pixel that the model sees, to prepare it.
NUM_THREADS = max(2, min(4, (os.cpu_count() or 1) // 2))
JPEG_REDUCTIONS = (8, 4, 2)  # that its decoder has
REDUCTIONS = range(2, 65)


class ImageReader:
    """Reads images for an engine.

    A request first has the sizes of all its images checked, by their headers; this is cheap and
    needs no budget. Then it holds the pixels of its images while they are decoded and prepared,
    and those that the model sees until it ends.
    """

    def __init__(self, engine: Engine, limits: ImageLimits) -> None:
        self._engine = engine  # only what any thread may call
        self._limits = limits
        self.budget = PixelBudget(limits.max_server_pixels)
        self._executor = ThreadPoolExecutor(
            NUM_THREADS, "octavo-images", initializer=yield_to_others
        )

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def check(self, urls: Sequence[str]) -> tuple[ImageFile, ...]:
        """The files of a request's images; ApiError if they are too many, too large or no images.

        The checks are in order of what they cost, and nothing is decoded.
        """
        limits = self._limits
        if urls and not self._engine.has_images:
            raise bad_request("this model reads no images", PARAM, "images_not_supported")
        if len(urls) > limits.max_images:
            message = f"expected at most {limits.max_images} images, got {len(urls)}"
            raise bad_request(message, PARAM)
        files: list[ImageFile] = []
        for url in urls:
            files.append(await asyncio.to_thread(read_file, url, limits))
            if sum(len(file.data) for file in files) > limits.max_request_bytes:
                raise refused(f"expected at most {limits.max_request_bytes} bytes in all, got more")
        num_pixels = sum(file.num_pixels for file in files)
        if num_pixels > limits.max_request_pixels:
            raise refused(
                f"expected at most {limits.max_request_pixels:,} pixels in all images of a "
                f"request, got {num_pixels:,}: send fewer or smaller ones"
            )
        self._check_context(files)
        return tuple(files)

    def _check_context(self, files: Sequence[ImageFile]) -> None:
        try:
            counts = [self._engine.count_image_tokens(file.width, file.height) for file in files]
        except OctavoError as error:
            raise refused(str(error)) from None
        num_tokens, max_context = sum(count or 0 for count in counts), self._engine.max_context
        if num_tokens >= max_context:
            raise bad_request(
                f"the images ({num_tokens:,} tokens) leave no room for an answer in the context of "
                f"{max_context:,} tokens: send fewer or smaller ones",
                PARAM,
                "context_length_exceeded",
            )

    async def prepare(
        self, prompt: Sequence[int], files: Sequence[ImageFile], at_end: ExitStack
    ) -> Any:
        """What `Engine.prepare_images` makes of a prompt and its images; waits for room.

        at_end: closed when the request has ended; gives back the pixels.
        """
        loop = asyncio.get_running_loop()
        num_pixels = sum(file.num_pixels_to_decode for file in files)
        hold = await self.budget.hold(min(num_pixels, self.budget.size))
        is_left = threading.Event()
        work = self._executor.submit(self._prepare, prompt, files, is_left)
        try:
            prepared = await asyncio.wrap_future(work)
        except BaseException:
            is_left.set()
            # A thread that decodes an image for nobody still has its pixels.
            work.add_done_callback(lambda _: _release_soon(hold, loop))
            raise
        hold.shrink(prepared.num_pixels)
        at_end.callback(hold.release)
        return prepared

    # Below: one of the threads.

    def _prepare(
        self, prompt: Sequence[int], files: Sequence[ImageFile], is_left: threading.Event
    ) -> Any:
        try:
            return self._engine.prepare_images(prompt, self._decoded(files, is_left))
        except OctavoError as error:
            raise refused(str(error)) from None

    def _decoded(self, files: Sequence[ImageFile], is_left: threading.Event) -> Iterator[Any]:
        for file in files:
            if is_left.is_set():
                raise client_left()
            factors = JPEG_REDUCTIONS if file.format in ("JPEG", "MPO") else REDUCTIONS
            reduction = self._engine.choose_image_reduction(file.width, file.height, factors)
            yield decode(file, self._limits, reduction)


def _release_soon(hold: Hold, loop: asyncio.AbstractEventLoop) -> None:
    # A loop that has been closed has nobody left who waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(hold.release)
