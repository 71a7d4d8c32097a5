"""image_url parts to pillow images, within limits."""

import base64
import binascii
import http.client
import io
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from octavo.brief import brief
from octavo.serving.server.api_error import ApiError, bad_request
from octavo.serving.server.settings import ImageLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PARAM = "messages"
CHUNK_BYTES = 64 * 1024


def read_image(url: str, limits: ImageLimits) -> Any:
    """The RGB image that a URL means; ApiError if it is not allowed, too large or no image."""
    scheme = url[:10].partition(":")[0].lower()
    match scheme:
        case "data":
            data = _from_data_url(url, limits)
        case "http" | "https":
            data = _fetch(url, limits)
        case _:
            raise _refused(f"expected a data:, http: or https: URL, got {brief(url)}")
    return _decode(data, limits)


def _refused(message: str) -> ApiError:
    return bad_request(f"image_url: {message}", PARAM, "invalid_image")


def _too_large(limits: ImageLimits) -> ApiError:
    return _refused(f"expected at most {limits.max_bytes} bytes, got more")


def _from_data_url(url: str, limits: ImageLimits) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise _refused("expected data:image/…;base64,…, got no comma")
    if not header.lower().endswith(";base64"):
        data = unquote_to_bytes(payload)
    elif len(payload) > limits.max_bytes * 2:  # base64 takes 4/3, line breaks some more
        raise _too_large(limits)
    else:
        try:
            data = base64.b64decode("".join(payload.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise _refused(f"expected base64, got something else: {error}") from None
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
        raise _refused(f"expected a URL, got {brief(url)}: {error}") from None
    if host is None or host not in limits.allowed_hosts:
        raise _refused(
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
        raise _refused(f"fetching from {host} failed: {brief(str(error))}") from None
    return bytes(data)


def _decode(data: bytes, limits: ImageLimits) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise _refused("this server cannot read images: it has no pillow") from None

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > limits.max_pixels:
            raise _refused(f"expected at most {limits.max_pixels} pixels, got {width}x{height}")
        return image.convert("RGB")
    except ApiError:
        raise
    # Decoders raise whatever a damaged file leads them to.
    except Exception as error:
        formats = ", ".join(FORMATS)
        reason = f"{type(error).__name__}: {brief(str(error))}"
        raise _refused(f"expected an image ({formats}), got {reason}") from None
