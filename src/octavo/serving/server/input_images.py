"""Images that requests bring: read and checked by their headers, then decoded within a budget."""

import asyncio
import base64
import binascii
import contextlib
import http.client
import io
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from octavo.brief import brief
from octavo.errors import OctavoError
from octavo.serving.server.api_error import ApiError, bad_request, client_left
from octavo.serving.server.settings import ImageLimits
from octavo.serving.server.workers import WaitingRoom, yield_to_others

if TYPE_CHECKING:
    from octavo.serving.engine.engine import Engine

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PARAM = "messages"
CHUNK_BYTES = 64 * 1024
STRIP_PIXELS = 2**20
# An image in one block goes back to the system when it is freed. In pillow's own blocks of 16 MiB
# the C library keeps it, for each thread that has decoded one.
BLOCK_BYTES = 2**30
BLANKS = b" \t\r\n"
# Each may need the memory of a large image: 4 bytes a pixel to decode it (16 for WebP), as much
# again for its copy in RGB, and some 60 bytes for a pixel that the model sees, to prepare it.
NUM_THREADS = max(2, min(4, (os.cpu_count() or 1) // 2))
JPEG_REDUCTIONS = (8, 4, 2)  # that its decoder has
REDUCTIONS = range(2, 65)


@dataclass(frozen=True)
class ImageFile:
    """An image that is not decoded yet, and what its header says."""

    data: bytes = field(repr=False)
    format: str
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        """Of the whole image."""
        return self.width * self.height


def read_file(url: str, limits: ImageLimits) -> ImageFile:
    """The file that a URL means; ApiError if it is not allowed, too large or no image."""
    scheme = url[:10].partition(":")[0].lower()
    if scheme not in ("data", "http", "https"):
        raise refused(f"expected a data:, http: or https: URL, got {brief(url)}")
    data = _from_data_url(url, limits) if scheme == "data" else _fetch(url, limits)
    with _opened(data, limits) as image:
        return ImageFile(data, image.format, *image.size)


def decode(file: ImageFile, limits: ImageLimits, reduction: int = 1) -> Any:
    """The RGB image of a file, as it is or smaller by a whole factor; ApiError if it is damaged.

    A side that the factor does not divide is rounded up. JPEG files are read at the smaller size;
    of others, each pixel is the mean of the block that it stands for.
    """
    with _opened(file.data, limits) as image:
        if reduction > 1:
            image.draft("RGB", (file.width // reduction, file.height // reduction))
        if image.size != (file.width, file.height):
            reduction = 1  # by the decoder
        image.load()
        if reduction > 1:
            return _reduced(image, reduction)
        # A copy even of RGB: the file's own image keeps its decoder, which may be larger.
        return image.convert("RGB")


def _reduced(image: Any, factor: int) -> Any:
    """What `image.convert("RGB").reduce(factor)` is, without the whole image in RGB."""
    from PIL import Image

    width, height = image.size
    made = Image.new("RGB", (-(-width // factor), -(-height // factor)))
    step = factor * max(1, STRIP_PIXELS // (factor * width))
    for top in range(0, height, step):
        strip = image.crop((0, top, width, min(top + step, height)))
        made.paste(strip.convert("RGB").reduce(factor), (0, top // factor))
    return made


def refused(message: str) -> ApiError:
    """An image that this server does not take."""
    return bad_request(f"image_url: {message}", PARAM, "invalid_image")


def _check_bytes(num_bytes: int, limits: ImageLimits) -> None:
    if num_bytes > limits.max_bytes:
        raise refused(f"expected at most {limits.max_bytes} bytes, got more")


def _from_data_url(url: str, limits: ImageLimits) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise refused(f"expected data:image/…;base64,…, got {brief(url)}")
    _check_bytes(len(payload) // 2, limits)  # base64 takes 4/3, line breaks some more
    try:
        data = base64.b64decode(payload.encode().translate(None, BLANKS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(f"expected base64, got something else: {error}") from None
    _check_bytes(len(data), limits)
    return data


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect could lead away from the hosts that are allowed."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _fetch(url: str, limits: ImageLimits) -> bytes:
    try:
        host = urlsplit(url).hostname
    except ValueError as error:
        raise refused(f"expected a URL, got {brief(url)}: {error}") from None
    if host is None or host not in limits.allowed_hosts:
        raise refused(
            f"this server does not fetch from {brief(host)}: send a data: URL, or start the server "
            "with --allowed-image-hosts"
        )
    # No proxy of the environment: what is fetched comes from the host that was allowed.
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + limits.fetch_timeout_s
    data = bytearray()
    try:
        with opener.open(url, timeout=limits.fetch_timeout_s) as response:
            # One read of the socket at a time: a host that drips cannot pass the deadline.
            while chunk := response.read1(CHUNK_BYTES):
                data += chunk
                _check_bytes(len(data), limits)
                if time.monotonic() > deadline:
                    raise TimeoutError("too slow")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise refused(f"fetching from {host} failed: {brief(str(error))}") from None
    return bytes(data)


@contextmanager
def _opened(data: bytes, limits: ImageLimits) -> Iterator[Any]:
    """A file as pillow opens it: its header is read, and it is not too large."""
    try:
        from PIL import Image
    except ImportError:
        raise refused("this server cannot read images: it has no pillow") from None

    expected = f"expected at most {limits.max_pixels} pixels"
    untyped: Any = Image
    untyped.core.set_block_size(BLOCK_BYTES)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels:
                raise refused(f"{expected}, got {width}x{height}")
            yield image
    except ApiError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise refused(f"{expected}, got far more") from None
    # Decoders raise whatever a damaged file leads them to.
    except Exception as error:
        formats = ", ".join(FORMATS)
        reason = f"{type(error).__name__}: {brief(str(error))}"
        raise refused(f"expected an image ({formats}), got {reason}") from None


class ImageReader:
    """Reads images for an engine.

    A request first has the sizes of all its images checked, by their headers; this is cheap and
    needs no budget. Then it holds the pixels of its images while they are decoded and prepared,
    and those that the model sees until it ends.
    """

    def __init__(self, engine: "Engine", limits: ImageLimits) -> None:
        self._engine = engine  # only what any thread may call
        self._limits = limits
        self.budget = WaitingRoom(limits.max_server_pixels)  # of pixels, in order of arrival
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
        return tuple(files)

    async def prepare(
        self, prompt: Sequence[int], files: Sequence[ImageFile], at_end: ExitStack
    ) -> Any:
        """What `Engine.prepare_images` makes of a prompt and its images; waits for room.

        at_end: closed when the request has ended; gives back the pixels.
        """
        # WebP's decoder has four of each. A pixel is 4 bytes, or 1 without colour.
        num_pixels = sum(file.num_pixels * (4 if file.format == "WEBP" else 1) for file in files)
        num_pixels = min(num_pixels, self._limits.max_server_pixels)
        await self.budget.enter(num_pixels)
        is_left, loop = threading.Event(), asyncio.get_running_loop()
        work = self._executor.submit(self._prepare, prompt, files, is_left)

        def give_back(_: object) -> None:
            # A loop that has been closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.budget.leave, num_pixels)

        try:
            prepared = await asyncio.wrap_future(work)
        except BaseException:
            is_left.set()
            # A thread that decodes an image for nobody still has its pixels.
            work.add_done_callback(give_back)
            raise
        num_kept = min(num_pixels, prepared.num_pixels)
        self.budget.leave(num_pixels - num_kept)
        at_end.callback(self.budget.leave, num_kept)
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
