"""Pictures over HTTP: what the routes answer and refuse; queue, time, disconnects, the end."""

import asyncio
import base64
import contextlib
import io
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("PIL")
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

import httpx
import openai
import uvicorn
from PIL import Image
from prometheus_client import generate_latest

from octavo.errors import ConfigError
from octavo.serving.engine.omni import Omni
from octavo.serving.server.admission import limited_protocol
from octavo.serving.server.drawing_app import create_image_app
from octavo.serving.server.run import DrainingServer
from octavo.serving.server.settings import ServerSettings
from octavo.version import __version__
from octavo_testkit.models.tiny_small_image import write_small_image
from octavo_testkit.serving.fake_drawer import FakeDrawer
from octavo_testkit.serving.metrics_text import samples, series

PATH = "/v1/images/generations"


@contextlib.asynccontextmanager
async def serving(drawer, **settings):
    app = create_image_app(drawer, ServerSettings(**settings))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            client.server = app.state.server
            yield client


def with_client(scenario, drawer=None, **settings):
    async def run():
        async with serving(drawer or FakeDrawer(), **settings) as client:
            return await asyncio.wait_for(scenario(client), 20)

    return asyncio.run(run())


def post(body, drawer=None, headers=None, **settings):
    async def scenario(client):
        return await client.post(PATH, json=body, headers=headers)

    return with_client(scenario, drawer, **settings)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def decoded(item):
    return Image.open(io.BytesIO(base64.b64decode(item["b64_json"])))


def test_pictures():
    drawer = FakeDrawer()
    asked = {"prompt": "a cat", "model": "fake", "n": 2, "size": "32x48", "seed": 5, "user": "me"}
    asked |= {"num_inference_steps": 3, "guidance_scale": 2, "response_format": "b64_json"}
    asked |= {"quality": "auto", "stream": False, "output_format": "png", "background": None}
    response = post(asked, drawer)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [item["seed"] for item in answer["data"]] == [5, 6]
    pictures = [decoded(item) for item in answer["data"]]
    assert [(picture.format, picture.size) for picture in pictures] == [("PNG", (32, 48))] * 2
    assert pictures[1].getpixel((0, 0)) == (1, 0, 0)
    assert answer["size"] == "32x48" and answer["created"] > 1.7e9
    ((prompt, sampling),) = drawer.drawn
    assert prompt == "a cat" and sampling.num_images_per_prompt == 2
    assert (sampling.width, sampling.height, sampling.seed) == (32, 48, 5)
    assert (sampling.num_inference_steps, sampling.guidance_scale) == (3, 2.0)
    assert post({"prompt": "x", "size": "auto"}).json()["size"] == "16x16"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt: expected, got none"),
        ({"prompt": ""}, "prompt", "prompt"),
        ({"prompt": ["a"]}, "prompt", "prompt"),
        ({"prompt": "a", "n": 0}, "n", "n: expected"),
        ({"prompt": "a", "n": 11}, "n", "n: expected at most 10, got 11"),
        ({"prompt": "a", "n": "2"}, "n", "n: expected"),
        ({"prompt": "a", "size": "big"}, "size", "expected auto or WIDTHxHEIGHT"),
        ({"prompt": "a", "size": "0x16"}, "size", "expected auto or WIDTHxHEIGHT"),
        ({"prompt": "a", "size": "9999x9999"}, "size", "size: expected at most"),
        ({"prompt": "a", "size": "99999x1"}, "size", "sides of at most 65536"),
        ({"prompt": "a", "size": "16x17"}, "size", "multiple of 16, got 17"),
        ({"prompt": "a", "num_inference_steps": 201}, "num_inference_steps", "at most 200"),
        ({"prompt": "a", "response_format": "url"}, "response_format", "not supported here"),
        ({"prompt": "a", "quality": "hd"}, "quality", "not supported here"),
        ({"prompt": "a", "style": "vivid"}, "style", "not supported here"),
        ({"prompt": "a", "stream": True}, "stream", "not supported here"),
        ({"prompt": "a", "negative_prompt": "b"}, "negative_prompt", "an option of Fake"),
        ({"prompt": "a", "steps": 3}, "steps", "does not know this field"),
        ({"prompt": "a", "seed": 2**63}, "seed", "seed"),
        ({"prompt": "please refuse"}, None, "expected words"),
        ({"prompt": "much memory"}, None, "expected memory"),
        ([], None, "body: expected"),
    ],
)
def test_what_is_refused(body, param, message):
    response = post(body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param and message in error["message"]


def test_bodies_that_are_no_json_and_too_large():
    async def scenario(client):
        headers = {"Content-Type": "application/json"}
        broken = await client.post(PATH, content=b'{"prompt": ', headers=headers)
        large = await client.post(PATH, json={"prompt": "a" * 2000})
        return broken, large

    broken, large = with_client(scenario, max_body_bytes=1000)
    assert broken.status_code == 400 and "expected a JSON body" in broken.text
    assert large.status_code == 413


def test_models_health_metrics_and_the_page():
    async def scenario(client):
        assert (await client.post(PATH, json={"prompt": "a", "n": 3})).status_code == 200
        assert (await client.post(PATH, json={"prompt": "a", "n": 99})).status_code == 400
        paths = ("/v1/models", "/v1/models/other", "/health", "/metrics", "/", "/page.js", "/stats")
        return [await client.get(path) for path in paths]

    found = with_client(scenario, model_names=("first", "second"))
    models, other, health, metrics, page, script, stats = found
    assert [model["id"] for model in models.json()["data"]] == ["first", "second"]
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"
    assert health.json() == {"status": "ok"}
    found = samples(metrics.text)
    for name, labels, value in (
        ("octavo_images_total", {}, 3),
        ("octavo_steps_total", {}, 2),
        ("octavo_requests_total", {"route": PATH, "outcome": "stop"}, 1),
        ("octavo_requests_total", {"route": PATH, "outcome": "refused"}, 1),
        ("octavo_request_seconds_count", {}, 1),
        ("octavo_queue_seconds_count", {}, 1),
        ("octavo_requests_open", {}, 0),
        ("octavo_layers", {"kind": "linear"}, 4),
        ("octavo_fp8_layers", {"kind": "linear"}, 3),
    ):
        assert found[name, frozenset(labels.items())] == value
    assert "img-src data:" in page.headers["content-security-policy"]
    assert "<textarea" in page.text and "http" not in page.text.replace("https", "http")
    assert "v1/images/generations" in script.text
    assert stats.json()["num_images"] == 3 and stats.json()["model"] == "first"
    assert stats.json()["precision"] == {"linear layers": "FP8 in 3 of 4 (norm_out in BF16)"}
    assert stats.json()["saved_bytes"] == {"linear layers": 2**20 - 4 * 2**10}


def test_keys():
    headers = {"Authorization": "Bearer k"}
    assert post({"prompt": "a"}, headers=headers, api_keys=("k",)).status_code == 200
    refused = post({"prompt": "a"}, api_keys=("k",))
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"


def test_other_hosts_and_other_routes():
    refused = post({"prompt": "a"}, headers={"Host": "evil.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")

    async def scenario(client):
        assert (await client.get("/version")).json() == {"version": __version__}
        return (await client.post("/v1/embeddings", json={"input": "a"})).json()["error"]

    error = with_client(scenario)
    assert error["code"] == "not_supported"
    assert "POST /v1/images/generations" in error["message"]


def test_a_full_queue_is_429():
    drawer = FakeDrawer()
    drawer.can_go_on.clear()

    async def scenario(client):
        tasks = [asyncio.ensure_future(client.post(PATH, json={"prompt": "a"})) for _ in range(2)]
        engine = client.server.engine
        await until(lambda: (engine.num_open, engine.num_waiting) == (2, 1))
        third = await client.post(PATH, json={"prompt": "a"})
        drawer.can_go_on.set()
        return third, [response.status_code for response in await asyncio.gather(*tasks)]

    refused, others = with_client(scenario, drawer, max_open=2, retry_after_s=3)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "3"
    assert refused.json()["error"]["code"] == "queue_full"
    assert others == [200, 200]


def test_time_runs_out_between_steps():
    drawer = FakeDrawer(step_s=0.05)

    async def scenario(client):
        response = await client.post(PATH, json={"prompt": "a", "num_inference_steps": 100})
        await until(lambda: client.server.engine.num_open == 0)
        after = await client.post(PATH, json={"prompt": "b", "num_inference_steps": 1})
        return response, after

    late, after = with_client(scenario, drawer, timeout_s=0.2)
    assert late.status_code == 504 and after.status_code == 200
    assert drawer.num_steps < 20 and [prompt for prompt, _ in drawer.drawn] == ["b"]


@pytest.mark.parametrize("prompt", ["please fail", "please break"])
def test_failures(prompt):
    async def scenario(client):
        failed = await client.post(PATH, json={"prompt": prompt})
        after = await client.post(PATH, json={"prompt": "a"})
        return failed, after, await client.get("/health")

    failed, after, health = with_client(scenario)
    assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
    is_final = "break" in prompt
    assert after.status_code == (503 if is_final else 200)
    assert health.status_code == (503 if is_final else 200)


def test_videos_are_not_served():
    drawer = FakeDrawer()
    drawer.makes_video = True
    with pytest.raises(ConfigError, match="expected a pipeline of pictures"):
        create_image_app(drawer, ServerSettings())


@contextlib.contextmanager
def listening(drawer, **settings):
    """(base URL, server, what ends it) on a free port, in a thread."""
    app = create_image_app(drawer, ServerSettings(**settings))
    http = limited_protocol(app.state.server.settings)
    config = uvicorn.Config(app, http=http, port=0, log_config=None, access_log=False, ws="none")
    server = DrainingServer(config, app.state.server)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", app.state.server, server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_client_that_leaves_ends_its_picture():
    drawer = FakeDrawer(step_s=0.02)
    with listening(drawer) as (url, server, _):
        asked = {"prompt": "a", "num_inference_steps": 200}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + PATH, json=asked, timeout=0.2)
        wait_for(lambda: server.engine.num_open == 0)
        assert 0 < drawer.num_steps < 100 and drawer.drawn == []
        # One that waits behind another is not begun at all.
        drawer.can_go_on.clear()
        drawer.num_steps = 0
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(httpx.Client(timeout=20))
            first = threading.Thread(target=pool.post, args=(url + PATH,), kwargs={"json": asked})
            asked["num_inference_steps"] = 1
            first.start()
            wait_for(lambda: server.engine.num_open == 1)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + PATH, json={"prompt": "left"}, timeout=0.2)
            wait_for(lambda: server.engine.num_open == 1)
            drawer.can_go_on.set()
            first.join()
        assert httpx.post(url + PATH, json=asked, timeout=20).status_code == 200
        assert drawer.num_steps == 2
        assert [prompt for prompt, _ in drawer.drawn] == ["a", "a"]
        found = series(generate_latest(server.metrics).decode(), "octavo_requests_total")
        assert {outcome for outcome, _ in found} == {"cancelled", "stop"}


@pytest.mark.parametrize(("grace_s", "status"), [(10.0, 200), (0.1, 503)])
def test_a_signal_lets_open_requests_finish(grace_s, status):
    drawer = FakeDrawer(step_s=0.05)
    found = []
    with listening(drawer, grace_s=grace_s) as (url, server, process):
        asked = {"prompt": "a", "num_inference_steps": 12}
        one = threading.Thread(
            target=lambda: found.append(httpx.post(url + PATH, json=asked, timeout=20))
        )
        one.start()
        wait_for(lambda: drawer.num_steps > 0)
        process.handle_exit(15, None)
        if status == 200:  # else it may be gone by now
            late = httpx.post(url + PATH, json=asked)
            assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
        one.join()
    assert found[0].status_code == status
    if status == 503:
        assert found[0].json()["error"]["code"] == "aborted" and drawer.num_steps < 12


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    folder = write_small_image(tmp_path_factory.mktemp("small"))
    return Omni(folder, quantization="fp8", device="cpu")


def test_the_official_client_and_a_real_pipeline(omni):
    settings = {"api_keys": ("secret",), "model_names": ("small",)}
    with (
        listening(omni, **settings) as (url, _, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["small"]
        extra = {"seed": 3, "num_inference_steps": 2}
        answers = [
            client.images.generate(
                model="small", prompt="cat on blue", n=2, size="48x48", extra_body=extra
            )
            for _ in range(2)
        ]
        first, second = answers[0].data
        assert decoded({"b64_json": first.b64_json}).size == (48, 48)
        assert first.b64_json != second.b64_json
        assert first.b64_json == answers[1].data[0].b64_json
        for wrong in (
            {"prompt": "horse"},
            {"prompt": "cat", "size": "64x64"},
            {"prompt": "cat", "response_format": "url"},
            {"prompt": "cat", "extra_body": {"negative_prompt": "dog"}},
        ):
            with pytest.raises(openai.BadRequestError):
                client.images.generate(model="small", **wrong)
        with pytest.raises(openai.NotFoundError):
            client.images.generate(model="dall-e-3", prompt="cat")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_input_leads_to_a_server_error():
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from hypothesis.errors import Unsatisfiable

    drawer = FakeDrawer()
    with listening(drawer) as (url, server, _):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        num_operations = 0
        for found in schema.get_all_operations():
            operation = found.ok()
            num_operations += 1
            for mode in schemathesis.GenerationMode:

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
                def check(case):
                    response = case.call(base_url=url)
                    assert response.status_code < 500, (case, response.text)

                try:
                    check()
                except Unsatisfiable:
                    # Without a body there is nothing that can be wrong.
                    assert operation.method == "get" and mode.is_negative
        assert num_operations >= 5 and drawer.drawn
        assert server.engine.num_open == 0 and server.status() == (200, "ok")
