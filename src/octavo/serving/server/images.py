"""image_url parts to files of images, and files to pillow images, within limits."""

import base64
import binascii
import http.client
import io
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from octavo.brief import brief
from octavo.serving.server.api_error import ApiError, bad_request
from octavo.serving.server.settings import ImageLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PARAM = "messages"
CHUNK_BYTES = 64 * 1024
STRIP_PIXELS = 2**20
# An image in one block goes back to the system when it is freed. In pillow's own blocks of 16 MiB
# the C library keeps it, for each thread that has decoded one.
BLOCK_BYTES = 2**30
BLANKS = b" \t\r\n"


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

    @property
    def num_pixels_to_decode(self) -> int:
        """How many pixels there are in memory while it is decoded: WebP's decoder has four of each.

        A pixel is 4 bytes, or 1 without colour.
        """
        return self.num_pixels * (4 if self.format == "WEBP" else 1)


def read_file(url: str, limits: ImageLimits) -> ImageFile:
    """The file that a URL means; ApiError if it is not allowed, too large or no image."""
    scheme = url[:10].partition(":")[0].lower()
    match scheme:
        case "data":
            data = _from_data_url(url, limits)
        case "http" | "https":
            data = _fetch(url, limits)
        case _:
            raise refused(f"expected a data:, http: or https: URL, got {brief(url)}")
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


def _too_many_pixels(limits: ImageLimits, found: str) -> ApiError:
    return refused(f"expected at most {limits.max_pixels} pixels, got {found}")


def _too_large(limits: ImageLimits) -> ApiError:
    return refused(f"expected at most {limits.max_bytes} bytes, got more")


def _from_data_url(url: str, limits: ImageLimits) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise refused(f"expected data:image/…;base64,…, got {brief(url)}")
    if len(payload) > limits.max_bytes * 2:  # base64 takes 4/3, line breaks some more
        raise _too_large(limits)
    try:
        data = base64.b64decode(payload.encode().translate(None, BLANKS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(f"expected base64, got something else: {error}") from None
    if len(data) > limits.max_bytes:
        raise _too_large(limits)
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
                if len(data) > limits.max_bytes:
                    raise _too_large(limits)
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

    untyped: Any = Image
    untyped.core.set_block_size(BLOCK_BYTES)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels:
                raise _too_many_pixels(limits, f"{width}x{height}")
            yield image
    except ApiError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(limits, "far more") from None
    # Decoders raise whatever a damaged file leads them to.
    except Exception as error:
        formats = ", ".join(FORMATS)
        reason = f"{type(error).__name__}: {brief(str(error))}"
        raise refused(f"expected an image ({formats}), got {reason}") from None
