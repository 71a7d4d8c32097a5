"""The pixels that requests hold: while images are decoded, until the request ends, never longer."""

import asyncio
import base64
import io
import threading
from contextlib import ExitStack

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("PIL")

from PIL import Image

from octavo.serving.server import input_images
from octavo.serving.server.input_images import ImageReader
from octavo.serving.server.settings import ImageLimits, ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import CHAT, serving

LIMITS = ImageLimits(max_pixels=10_000, max_request_pixels=20_000, max_server_pixels=20_000)


def data_url(size, cut=None, kind="BMP"):
    data = io.BytesIO()
    Image.new("RGB", size).save(data, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()[:cut]).decode()}"


class SlowEngine(FakeEngine):
    """Prepares images when it is told to, and counts those that it has seen."""

    def __post_init__(self):
        super().__post_init__()
        self.has_images, self.may_go, self.seen = True, threading.Event(), []

    def prepare_images(self, prompt, images):
        def seen():
            for image in images:
                self.seen.append(image.size)
                assert self.may_go.wait(20)
                yield image

        return super().prepare_images(prompt, seen())


def held(budget):
    """The pixels of LIMITS that requests hold."""
    return LIMITS.max_server_pixels - budget.free[0]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def with_reader(scenario, engine=None):
    engine = engine or SlowEngine()

    async def run():
        reader = ImageReader(engine, LIMITS)
        try:
            with ExitStack() as at_end:
                await scenario(reader, engine, at_end)
            assert (held(reader.budget), reader.budget.num_waiting) == (0, 0)
        finally:
            engine.may_go.set()
            reader.close()

    asyncio.run(run())


def test_a_request_holds_its_files_pixels_and_then_those_that_the_model_sees():
    async def scenario(reader, engine, at_end):
        files = await reader.check([data_url((100, 80)), data_url((50, 40))])
        assert held(reader.budget) == 0
        engine.choose_image_reduction = lambda *_: 2
        task = asyncio.create_task(reader.prepare((1, 2), files, at_end))
        await until(lambda: engine.seen)
        assert (engine.seen, held(reader.budget)) == ([(50, 40)], 100 * 80 + 50 * 40)
        engine.may_go.set()
        prepared = await task
        assert [image.size for image in prepared] == [(50, 40), (25, 20)]
        assert held(reader.budget) == 50 * 40 + 25 * 20

    with_reader(scenario)


def test_webp_counts_as_what_its_decoder_needs_but_never_more_than_there_is():
    async def scenario(reader, engine, at_end):
        for side, num_held in ((50, 4 * 50 * 50), (100, LIMITS.max_server_pixels)):
            engine.may_go.clear()
            engine.seen.clear()
            files = await reader.check([data_url((side, side), kind="WEBP")])
            task = asyncio.create_task(reader.prepare((), files, at_end))
            await until(lambda: engine.seen)
            assert held(reader.budget) == num_held
            engine.may_go.set()
            await task
            at_end.close()

    with_reader(scenario)


def test_the_event_loop_goes_on_while_a_request_waits_for_room():
    async def scenario(reader, engine, at_end):
        files = await reader.check([data_url((100, 100)), data_url((100, 100))])
        tasks = [asyncio.create_task(reader.prepare((), files, at_end)) for _ in range(3)]
        await until(lambda: engine.seen)
        assert (held(reader.budget), reader.budget.num_waiting) == (20_000, 2)
        assert len(await reader.check([data_url((10, 10))])) == 1  # needs no room
        for task in tasks[1:]:  # their clients leave
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        assert reader.budget.num_waiting == 0
        engine.may_go.set()
        await tasks[0]
        assert len(engine.seen) == 2

    with_reader(scenario)


def test_a_client_that_leaves_stops_the_work_after_the_image_at_hand():
    async def scenario(reader, engine, at_end):
        files = await reader.check([data_url((50, 50))] * 8)
        task = asyncio.create_task(reader.prepare((), files, at_end))
        await until(lambda: engine.seen)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The thread still has the image: nobody else may have its room.
        assert held(reader.budget) == 20_000
        engine.may_go.set()
        await until(lambda: held(reader.budget) == 0)
        assert len(engine.seen) == 1

    with_reader(scenario)


def test_work_that_has_not_begun_is_dropped(monkeypatch):
    monkeypatch.setattr(input_images, "NUM_THREADS", 1)

    async def scenario(reader, engine, at_end):
        files = await reader.check([data_url((10, 10))])
        first, second = (asyncio.create_task(reader.prepare((), files, at_end)) for _ in range(2))
        await until(lambda: engine.seen)
        second.cancel()
        await until(lambda: held(reader.budget) == 100)
        engine.may_go.set()
        await first
        assert len(engine.seen) == 1

    with_reader(scenario)


def ask_in_turn(*bodies):
    """The statuses of requests one after another; each must leave nothing behind."""

    async def scenario():
        engine, settings = FakeEngine(has_images=True), ServerSettings(images=LIMITS)
        async with serving(engine, settings) as client:
            budget = client.server.jobs.images.budget
            statuses = []
            for body in bodies:
                statuses.append((await client.post(CHAT, json=body)).status_code)
                await until(lambda: held(budget) == 0)
            return statuses

    return asyncio.run(scenario())


def body_of(*urls, text="say:hello", **fields):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], **fields}


def test_every_end_of_a_request_gives_back_its_pixels():
    good = data_url((100, 100))
    statuses = ask_in_turn(
        body_of(good, good),
        body_of(good, good, stream=True),
        body_of(good, data_url((100, 100), cut=-50)),  # damaged
        body_of(good, data_url((13, 13))),  # refused by the engine
        body_of(good, top_logprobs=3),  # wrong in another way, which is found later
        body_of(good, max_tokens=10**6),
        body_of(good, text="fail:"),
        body_of(good, text="explode:"),
        body_of(good, good),
    )
    assert statuses == [200, 200, 400, 400, 400, 400, 500, 500, 200]


def test_the_engine_s_images_are_counted_until_their_answer_ends():
    async def scenario():
        engine = FakeEngine(has_images=True, step_s=0.01)
        async with serving(engine, ServerSettings(images=LIMITS)) as client:
            budget = client.server.jobs.images.budget
            body = body_of(data_url((100, 100)), text="long:", max_tokens=2000)
            tasks = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(3)]
            await until(lambda: engine.num_open == 2 and budget.num_waiting == 1)
            assert held(budget) == 20_000
            tasks[0].cancel()
            await until(lambda: len(engine.added) == 3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: held(budget) == budget.num_waiting == 0)

    asyncio.run(scenario())
