"""Images that cost a client nothing and a server much: refused before they are decoded, or few."""

import asyncio
import base64
import contextlib
import functools
import io
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("PIL")

import httpx
from PIL import Image, ImageFile

from octavo.serving.server.settings import ImageLimits, ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import CHAT, listening, serving

LARGE = (6200, 5000)  # 31 megapixels, one less than allowed
LONG = (15_744, 1968)  # as many; the chart reader makes 1024 x 128 of them
MIB = 2**20


@dataclass
class Growth:
    """What the peak of resident memory was above its beginning, in MiB."""

    mib: float = 0.0


def _peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def growth():
    """Filled in at the end; skips where the kernel keeps no peak that can be started anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"no peak of resident memory here: {error}")
    found, before = Growth(), _peak_bytes()
    yield found
    found.mib = (_peak_bytes() - before) / MIB


@functools.cache
def data_url(size=LARGE, mode="1", kind="PNG", cut=None):
    data = io.BytesIO()
    Image.new(mode, size).save(data, kind, compress_level=1 if mode == "RGB" else 9)
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()[:cut]).decode()}"


def body_of(urls, text="How many bars are there ?"):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0}


def ask(urls, engine=None, **limits):
    async def scenario():
        settings = ServerSettings(images=ImageLimits(**limits))
        async with serving(engine or FakeEngine(has_images=True), settings) as client:
            return await client.post(CHAT, json=body_of(urls))

    return asyncio.run(scenario())


@pytest.fixture
def decoded(monkeypatch):
    """The sizes of all images that are decoded."""
    sizes = []
    load = ImageFile.ImageFile.load

    def count(image):
        sizes.append(image.size)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", count)
    return sizes


def test_sixteen_large_images_in_a_small_request_are_refused_by_their_headers(decoded):
    urls = [data_url()] * 16
    assert sum(map(len, urls)) < 100_000
    ask([data_url((8, 8))])  # imports what the first image needs
    decoded.clear()
    before = time.process_time()
    with growth() as found:
        refused = ask(urls)
    assert found.mib < 60
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "invalid_image"
    assert "at most 64,000,000 pixels" in error["message"]
    assert "got 496,000,000" in error["message"]
    assert decoded == []
    assert time.process_time() - before < 1


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (data_url(cut=20), "expected an image"),
        (data_url((6200, 6200)), "at most 32000000 pixels, got 6200x6200"),
        (data_url((12_000, 12_000)), "at most 32000000 pixels, got 12000x12000"),
        (data_url((16_000, 16_000)), "at most 32000000 pixels, got far more"),
        ("data:image/png;base64,AAA=A", "expected base64"),
        ("file:///etc/passwd", "expected a data:"),
    ],
    ids=["damaged", "large", "warned of", "a bomb", "no base64", "a file"],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_one_bad_image_is_found_before_the_others_are_decoded(decoded, last, message):
    refused = ask([data_url(), last])
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
    assert decoded == []


def test_images_beyond_the_context_are_refused_before_they_are_decoded(decoded):
    # The fake engine's images are a token for 10,000 pixels.
    refused = ask([data_url()] * 2, FakeEngine(has_images=True, max_context=4096))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "6,200 tokens" in error["message"]
    assert "4,096 tokens" in error["message"]
    assert decoded == []


def test_the_bytes_of_all_images_have_a_limit(decoded):
    url = data_url((64, 64))
    num_bytes = len(base64.b64decode(url.partition(",")[2]))
    assert ask([url] * 2, max_request_bytes=2 * num_bytes).status_code == 200
    decoded.clear()
    refused = ask([url] * 3, max_request_bytes=2 * num_bytes)
    assert refused.status_code == 400
    assert f"at most {2 * num_bytes} bytes in all" in refused.json()["error"]["message"]
    assert decoded == []


@pytest.fixture(scope="module")
def reader():
    """The chart reader with room for one large image at a time."""
    pytest.importorskip("transformers")
    from octavo.serving.engine.engine import load_engine
    from octavo.serving.engine.settings import EngineSettings

    size = EngineSettings(num_pages=64, max_num_seqs=8)
    engine = load_engine("chart-reader", None, size, dtype="float32", device="cpu")
    limits = {"max_request_pixels": 32 * 10**6, "max_server_pixels": 32 * 10**6}
    # A server that knows no such limits takes these requests, too, and all at once.
    known = {name: value for name, value in limits.items() if hasattr(ImageLimits, name)}
    with listening(engine, ServerSettings(images=ImageLimits(**known))) as running:
        post(running, data_url((640, 480)))
        yield running


def post(running, url):
    return httpx.post(running[0] + CHAT, json=body_of([url]), timeout=120)


def test_a_large_image_alone_is_answered(reader):
    url = data_url(LONG)
    with growth() as found:
        answer = post(reader, url)
    assert answer.status_code == 200, answer.text
    small = post(reader, data_url((1024, 128)))
    assert answer.json()["usage"]["prompt_tokens"] == small.json()["usage"]["prompt_tokens"]
    # Pillow has a byte for each pixel of one bit; of the image in RGB there are only strips.
    assert found.mib < 31 + 40


def test_large_images_at_once_share_the_memory_of_one(reader):
    url = data_url(LONG, "RGB")
    with growth() as together, ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda _: post(reader, url), range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    # What the server has room for, at 4 bytes a pixel; two of them at once would be 236 MiB.
    assert together.mib < 4 * 32e6 / 2**20 + 50
