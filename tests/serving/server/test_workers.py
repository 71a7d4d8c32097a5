"""Child processes that do the slow work of requests, and end with them."""

import asyncio
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from octavo.serving.server.api_error import ApiError
from octavo.serving.server.workers import LARGE, WorkerError, Workers
from octavo_testkit.serving import worker_tasks as tasks

LONG_S = 300.0


def with_workers(scenario, num_workers=2):
    async def run():
        workers = Workers(num_workers, tasks.set_up)
        try:
            return await asyncio.wait_for(scenario(workers), 100)
        finally:
            workers.close()

    return asyncio.run(run())


def is_alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


async def until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def pid_in(path):
    await until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_tasks_return_and_raise_as_functions_do():
    async def scenario(workers):
        assert await workers.run(tasks.add, 20, 22, limit_s=LONG_S) == 42
        first = await workers.run(tasks.pid, limit_s=LONG_S)
        with pytest.raises(ApiError, match="no coffee") as caught:
            await workers.run(tasks.refuse, limit_s=LONG_S)
        error = caught.value
        assert (error.status, error.param, error.code) == (418, "pot", "teapot")
        assert error.headers == {"X-Pot": "full"}
        assert await workers.run(tasks.pid, limit_s=LONG_S) == first, "a process is used again"

    with_workers(scenario)


def test_what_takes_too_long_or_too_much_ends_alone(tmp_path):
    async def scenario(workers):
        with pytest.raises(WorkerError, match="longer than 0.5 s"):
            await workers.run(tasks.spin, tmp_path / "pid", limit_s=0.5)
        await until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
        with pytest.raises(WorkerError, match="ended its process"):
            await workers.run(tasks.die, limit_s=LONG_S)
        with pytest.raises(WorkerError, match="memory"):
            await workers.run(tasks.eat, 3 * 2**30, limit_s=LONG_S)
        with pytest.raises(WorkerError, match="Panic: index out of bounds"):
            await workers.run(tasks.panic, limit_s=LONG_S)
        assert await workers.run(tasks.add, 1, 1, limit_s=LONG_S) == 2

    with_workers(scenario, num_workers=1)


def test_the_wait_for_a_busy_machine_is_not_the_clients_mistake(tmp_path):
    """A process that gets no CPU time may take longer than its limit, but not for ever."""

    async def scenario(workers):
        path = tmp_path / "pid"
        await workers.run(tasks.sleep, path, 0.5, limit_s=0.2)
        with pytest.raises(ApiError, match="too busy") as caught:
            await workers.run(tasks.sleep, path, LONG_S, limit_s=0.05)
        assert (caught.value.status, caught.value.code) == (503, "worker_busy")
        await until(lambda: not is_alive(int(path.read_text())))

    with_workers(scenario)


def test_a_cancelled_task_ends_with_its_process(tmp_path):
    async def scenario(workers):
        path = tmp_path / "pid"
        task = asyncio.ensure_future(workers.run(tasks.sleep, path, LONG_S, limit_s=LONG_S))
        pid = await pid_in(path)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not is_alive(pid))
        assert await workers.run(tasks.pid, limit_s=LONG_S) != pid

    with_workers(scenario, num_workers=1)


def test_large_tasks_leave_room_for_small_ones(tmp_path):
    async def scenario(workers):
        large = [
            asyncio.ensure_future(
                workers.run(tasks.sleep, tmp_path / name, LONG_S, limit_s=LONG_S, size=LARGE + 1)
            )
            for name in ("one", "two")
        ]
        await pid_in(tmp_path / "one")
        assert await workers.run(tasks.add, 1, 2, limit_s=LONG_S) == 3
        assert not (tmp_path / "two").exists(), "the second one waits for the first"
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)

    with_workers(scenario)


def test_the_smallest_of_the_tasks_that_wait_is_next(tmp_path):
    async def scenario(workers):
        path, order = tmp_path / "pid", []
        first = asyncio.ensure_future(workers.run(tasks.sleep, path, LONG_S, limit_s=LONG_S))
        await pid_in(path)

        async def run(size):
            await workers.run(tasks.add, 0, 0, limit_s=LONG_S, size=size)
            order.append(size)

        waiting = [asyncio.ensure_future(run(size)) for size in (50_000, 300, 9_000, 20)]
        left = asyncio.ensure_future(run(1))
        await asyncio.sleep(0.05)
        left.cancel()
        first.cancel()
        await asyncio.gather(*waiting)
        assert order == [20, 300, 9_000, 50_000]
        await asyncio.gather(first, left, return_exceptions=True)

    with_workers(scenario, num_workers=1)


def test_a_worker_that_somebody_else_killed_is_replaced():
    async def scenario(workers):
        pid = await workers.run(tasks.pid, limit_s=LONG_S)
        os.kill(pid, 9)
        await until(lambda: not is_alive(pid))
        assert await workers.run(tasks.pid, limit_s=LONG_S) != pid

    with_workers(scenario)


def test_a_task_waits_for_a_worker_that_is_starting():
    async def scenario(workers):
        workers.start()
        workers._idle[0]._starting.result()  # the start itself succeeds, and is waited for
        pids = [await workers.run(tasks.pid, limit_s=LONG_S) for _ in range(3)]
        assert len(set(pids)) == 1

    with_workers(scenario)


def test_closing_ends_what_runs(tmp_path):
    async def scenario(workers):
        path = tmp_path / "pid"
        task = asyncio.ensure_future(workers.run(tasks.sleep, path, LONG_S, limit_s=LONG_S))
        pid = await pid_in(path)
        workers.close()
        with pytest.raises(WorkerError):
            await task
        await until(lambda: not is_alive(pid))

    with_workers(scenario)
