"""image_url parts: what is decoded, and what is refused."""

import asyncio
import base64
import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("PIL")

from PIL import Image

from octavo.errors import ConfigError
from octavo.serving.server import input_images
from octavo.serving.server.api_error import ApiError
from octavo.serving.server.input_images import decode, read_file
from octavo.serving.server.settings import ImageLimits, ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import serving


def encoded(size=(4, 3), kind="PNG", color=(255, 0, 0)):
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, kind)
    return data.getvalue()


def data_url(data, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def read_image(url, limits):
    return decode(read_file(url, limits), limits)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_data_urls(kind):
    image = read_image(data_url(encoded(kind=kind)), ImageLimits())
    assert (image.size, image.mode) == ((4, 3), "RGB")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "expected data:image/…;base64"),
        ("data:,%89PNG", "expected data:image/…;base64"),
        ("data:image/png;base64,!!!!", "expected base64"),
        (data_url(b"no image"), "expected an image"),
        (data_url(encoded()[:40]), "expected an image"),
        (data_url(b""), "expected an image"),
        (data_url(encoded((100, 101))), "at most 10000 pixels, got 100x101"),
        (data_url(b"x" * 2001), "at most 2000 bytes"),
        (data_url(b"x" * 9000), "at most 2000 bytes"),
        ("file:///etc/passwd", "expected a data:"),
        ("ftp://host/x.png", "expected a data:"),
        ("", "expected a data:"),
        ("http://example.com/x.png", "does not fetch from 'example.com'"),
        ("https://allowed.example@evil.example/x", "does not fetch from 'evil.example'"),
        ("http://[::1", "expected a URL"),
        ("http:///x", "does not fetch from None"),
    ],
    ids=lambda part: part[:40],
)
def test_refusals(url, message):
    limits = ImageLimits(max_bytes=2000, max_pixels=10000, allowed_hosts=("allowed.example",))
    with pytest.raises(ApiError) as caught:
        read_image(url, limits)
    assert caught.value.status == 400
    assert message in caught.value.message


def noise(size, mode):
    random = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(random[..., :3] if mode == "RGB" else random)
    return image if mode in ("RGB", "RGBA") else image.convert("RGB").convert(mode)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")]
    + [("GIF", "P"), ("BMP", "RGB"), ("WEBP", "RGB"), ("WEBP", "RGBA")],
)
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_a_reduced_image_is_that_of_the_whole_one(kind, mode, factor, monkeypatch):
    monkeypatch.setattr(input_images, "STRIP_PIXELS", 1000)  # several strips, the last one shorter
    data = io.BytesIO()
    noise((103, 61), mode).save(data, kind, **({"lossless": True} if kind == "WEBP" else {}))
    file = read_file(data_url(data.getvalue()), ImageLimits())
    assert (file.format, file.width, file.height, file.num_pixels) == (kind, 103, 61, 103 * 61)
    whole = Image.open(data).convert("RGB")
    found = decode(file, ImageLimits(), factor)
    assert (found.mode, found.size) == ("RGB", (-(-103 // factor), -(-61 // factor)))
    assert found.tobytes() == whole.reduce(factor).tobytes()
    assert not hasattr(found, "fp")  # nothing of the file is kept


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_jpeg_is_decoded_at_the_smaller_size(mode, factor, monkeypatch):
    data = io.BytesIO()
    Image.linear_gradient("L").resize((333, 170)).convert(mode).save(data, "JPEG", quality=95)
    file = read_file(data_url(data.getvalue()), ImageLimits())
    monkeypatch.delattr(input_images, "_reduced")  # of a whole one
    found = decode(file, ImageLimits(), factor)
    expected = Image.open(data).convert("RGB").reduce(factor)
    assert found.size == expected.size == (-(-333 // factor), -(-170 // factor))
    # The decoder takes the mean of frequencies, not of rounded pixels.
    assert np.abs(np.asarray(found, int) - np.asarray(expected, int)).mean() < 2


def test_a_file_that_is_cut_off_is_found_when_it_is_decoded():
    file = read_file(data_url(encoded((200, 200), "BMP")[:-100]), ImageLimits())
    for factor in (1, 2):
        with pytest.raises(ApiError, match="expected an image"):
            decode(file, ImageLimits(), factor)


def test_line_breaks_in_base64_are_left_out():
    payload = base64.encodebytes(encoded((64, 64))).decode().replace("\n", " \r\n\t")
    assert read_image(f"data:image/png;base64,{payload}", ImageLimits()).size == (64, 64)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_images": 0},
        {"max_bytes": -1},
        {"max_request_bytes": 0},
        {"max_pixels": 0},
        {"fetch_timeout_s": 0},
        {"max_pixels": 65 * 10**6},
        {"max_request_pixels": 31 * 10**6},
        {"max_request_pixels": 257 * 10**6},
        {"max_server_pixels": 63 * 10**6},
    ],
    ids=str,
)
def test_limits_that_cannot_be_kept_are_refused(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        ImageLimits(**limits)


class Host(BaseHTTPRequestHandler):
    def do_GET(self):
        match self.path:
            case "/redirect":
                self.send_response(302)
                self.send_header("Location", "/image")
                self.end_headers()
            case "/image":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(encoded())
            case "/large":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"x" * 100_000)
            case "/slow":
                self.send_response(200)
                self.end_headers()
                try:
                    for _ in range(50):
                        self.wfile.write(b"x")
                        self.wfile.flush()
                        threading.Event().wait(0.05)
                except OSError:
                    pass
            case _:
                self.send_error(404)

    def log_message(self, *_):
        pass


def test_fetching_from_an_allowed_host():
    host = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    base = f"http://127.0.0.1:{host.server_port}"
    limits = ImageLimits(allowed_hosts=("127.0.0.1",), max_bytes=50_000, fetch_timeout_s=0.3)
    try:
        assert read_image(f"{base}/image", limits).size == (4, 3)
        for path, message in (
            ("/redirect", "302"),
            ("/large", "at most 50000 bytes"),
            ("/slow", "too slow"),
            ("/missing", "404"),
        ):
            with pytest.raises(ApiError, match=message):
                read_image(base + path, limits)
    finally:
        host.shutdown()
        thread.join()
        host.server_close()


def ask(urls, engine, **limits):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "what is it?"}, *parts]

    async def scenario():
        async with serving(engine, ServerSettings(images=ImageLimits(**limits))) as client:
            body = {"messages": [{"role": "user", "content": content}]}
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(scenario())


def test_images_reach_an_engine_that_takes_them():
    engine = FakeEngine(has_images=True)
    answer = ask([data_url(encoded()), data_url(encoded((8, 8)))], engine)
    assert answer.json()["choices"][0]["message"]["content"] == "2 images"
    (request,) = engine.added
    assert [image.size for image in request.images] == [(4, 3), (8, 8)]
    assert "".join(map(chr, request.prompt)).count("<image>") == 2


def test_images_are_refused_by_an_engine_without_and_beyond_the_limit():
    refused = ask([data_url(encoded())], FakeEngine())
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "images_not_supported")
    many = ask([data_url(encoded())] * 3, FakeEngine(has_images=True), max_images=2)
    assert "at most 2 images, got 3" in many.json()["error"]["message"]


def test_what_the_engine_refuses_of_an_image_is_a_bad_request():
    refused = ask([data_url(encoded((13, 13)))], FakeEngine(has_images=True))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "invalid_image")
    assert "bad luck" in error["message"]
