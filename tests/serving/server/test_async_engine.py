"""The engine's thread: every request that is submitted ends exactly once."""

import asyncio
import threading

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from octavo.serving.engine.request import Request, Sampling, gather
from octavo.serving.server.api_error import ApiError
from octavo.serving.server.async_engine import AsyncEngine
from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine


def ask(text, request_id="r", **sampling):
    prompt = tuple(map(ord, text))
    sampling = Sampling(**{"max_tokens": 50, **sampling})
    return Request(request_id=request_id, prompt=prompt, sampling=sampling)


def with_engine(scenario, engine=None, **settings):
    """Run a scenario on a started AsyncEngine, and check that nothing of it is left."""

    async def run():
        asynchronous = AsyncEngine(engine or FakeEngine(), ServerSettings(**settings))
        asynchronous.start()
        try:
            await asyncio.wait_for(scenario(asynchronous), 20)
        finally:
            await asynchronous.close()
        assert asynchronous.num_open == 0
        assert not asynchronous._thread.is_alive()

    asyncio.run(run())


async def read(asynchronous, request):
    async with asynchronous.submit(request) as answer:
        return gather([delta async for delta in answer])


async def wait_for(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_deltas_come_in_order_and_end():
    async def scenario(engine):
        answers = await asyncio.gather(
            *(read(engine, ask(f"say:number {i}", f"r{i}")) for i in range(20))
        )
        assert [answer.text for answer in answers] == [f"number {i}" for i in range(20)]
        assert {answer.finish_reason for answer in answers} == {"stop"}
        assert engine.last_stats.num_finished == 20

    with_engine(scenario)


def test_leaving_an_answer_aborts_it_whether_it_runs_or_waits():
    fake = FakeEngine(max_num_seqs=1, step_s=0.005)

    async def scenario(engine):
        async with engine.submit(ask("long:", "runs", max_tokens=4000)) as answer:
            await anext(answer)
            async with engine.submit(ask("long:", "waits")):
                assert engine.num_open == 2
            await wait_for(lambda: "waits" in fake.ended)
            assert "runs" not in fake.ended
        await wait_for(lambda: fake.ended == {"waits": "abort", "runs": "abort"})
        assert engine.num_open == 0

    with_engine(scenario, fake)


def test_a_caller_cancelled_while_it_is_admitted_leaves_nothing():
    is_inside, may_go_on = threading.Event(), threading.Event()

    class Held(FakeEngine):
        def step(self):
            is_inside.set()
            may_go_on.wait(20)
            return super().step()

    fake = Held()

    async def scenario(engine):
        async with engine.submit(ask("long:", "other")):
            await asyncio.to_thread(is_inside.wait, 20)
            task = asyncio.ensure_future(engine.submit(ask("long:", "gone")).__aenter__())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.num_open == 1
            may_go_on.set()
            await wait_for(lambda: "gone" in fake.ended)

    with_engine(scenario, fake)


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("x" * 5000, 400, None),
        ("explode:", 500, "engine_error"),
    ],
)
def test_a_request_that_the_engine_refuses(text, status, code):
    async def scenario(engine):
        with pytest.raises(ApiError) as caught:
            await engine.submit(ask(text)).__aenter__()
        assert (caught.value.status, caught.value.code) == (status, code)
        assert (await read(engine, ask("say:still here"))).text == "still here"
        assert engine.problem is None

    with_engine(scenario)


@pytest.mark.parametrize("limit", ["engine", "server"])
def test_a_full_queue_is_429(limit):
    fake = FakeEngine(max_num_seqs=1, max_queue=1 if limit == "engine" else 100, step_s=0.01)

    async def scenario(engine):
        async with engine.submit(ask("long:", "runs", max_tokens=1000)) as first:
            await anext(first)
            async with engine.submit(ask("long:", "waits")):
                with pytest.raises(ApiError) as caught:
                    await engine.submit(ask("long:", "too many")).__aenter__()
                assert caught.value.status == 429
                assert caught.value.headers == {"Retry-After": "1"}
                assert engine.num_open == 2

    with_engine(scenario, fake, max_open=100 if limit == "engine" else 2)


def test_one_failing_request_does_not_touch_the_others():
    async def scenario(engine):
        failing = asyncio.ensure_future(read(engine, ask("fail:" + "x" * 20, "bad")))
        good = asyncio.ensure_future(read(engine, ask("say:all is well", "good")))
        with pytest.raises(ApiError, match="cannot go on") as caught:
            await failing
        assert caught.value.status == 500
        assert (await good).text == "all is well"
        assert engine.problem is None

    with_engine(scenario)


def test_a_failing_step_ends_everyone_and_the_engine():
    async def scenario(engine):
        asked = [ask("crash:" + "x" * 20, "bad"), *(ask("long:", f"r{i}") for i in range(3))]
        results = await asyncio.gather(
            *(read(engine, request) for request in asked), return_exceptions=True
        )
        assert [getattr(result, "code", None) for result in results] == ["engine_failed"] * 4
        assert "the GPU is gone" in engine.problem
        with pytest.raises(ApiError) as caught:
            await engine.submit(ask("say:hello")).__aenter__()
        assert caught.value.status == 503

    with_engine(scenario)


def test_a_request_that_takes_too_long_is_aborted():
    fake = FakeEngine(step_s=0.02)

    async def scenario(engine):
        with pytest.raises(ApiError) as caught:
            async with engine.slot():
                await read(engine, ask("long:", max_tokens=4000))
        assert (caught.value.status, caught.value.code) == (504, "request_timeout")
        await wait_for(lambda: fake.ended == {"r": "abort"})

    with_engine(scenario, fake, timeout_s=0.1)


@pytest.mark.parametrize("grace_s", [0.0, 10.0])
def test_draining_lets_requests_finish_or_aborts_them(grace_s):
    fake = FakeEngine(step_s=0.002)

    async def scenario(engine):
        running = asyncio.ensure_future(read(engine, ask("long:", max_tokens=100)))
        await wait_for(lambda: fake.running)
        assert await engine.drain(grace_s) is (grace_s > 0)
        with pytest.raises(ApiError, match="no new requests"):
            await engine.slot().__aenter__()
        await engine.close()
        with pytest.raises(ApiError, match="has ended"):
            await engine.submit(ask("say:late", "late")).__aenter__()
        if grace_s:
            assert (await running).finish_reason == "length"
        else:
            with pytest.raises(ApiError) as caught:
                await running
            assert (caught.value.status, caught.value.code) == (503, "aborted")
        assert len(fake.ended) == 1

    with_engine(scenario, fake)


def test_a_request_that_came_in_before_the_end_is_waited_for_and_taken():
    async def scenario(engine):
        async with engine.slot():
            draining = asyncio.ensure_future(engine.drain(10.0))
            await asyncio.sleep(0.01)
            assert not draining.done()
            answer = await read(engine, ask("say:in time"))
            assert answer.finish_reason == "stop"
            assert not draining.done()
        assert await draining

    with_engine(scenario, FakeEngine())


def test_slots_are_as_many_as_may_be_open():
    async def scenario(engine):
        async with engine.slot(), engine.slot():
            assert engine.num_open == 2
            with pytest.raises(ApiError) as caught:
                await engine.slot().__aenter__()
            assert caught.value.status == 429
        assert engine.num_open == 0

    with_engine(scenario, FakeEngine(), max_open=2)


def test_what_is_complete_may_take_longer_to_read():
    """The deadline is the last token's: a slow client still gets all of it."""

    async def scenario(engine):
        async with (
            engine.slot() as slot,
            engine.submit(ask("long:", max_tokens=20), slot=slot) as answer,
        ):
            deltas = []
            async for delta in answer:
                await asyncio.sleep(0.05)
                deltas.append(delta)
        assert gather(deltas).finish_reason == "length"

    with_engine(scenario, FakeEngine(), timeout_s=0.4)
