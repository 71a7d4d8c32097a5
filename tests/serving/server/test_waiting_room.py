"""Room that many wait for: order, cancellation, and nothing lost."""

import asyncio
import random
from functools import partial

import pytest

from octavo.serving.server.workers import WaitingRoom


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def held(room):
    """How much of a room of 10 is taken."""
    return 10 - room.free[0]


def test_room_is_taken_and_given_back():
    async def scenario():
        room = WaitingRoom(10)
        await room.enter(7)
        assert held(room) == 7
        room.leave(4)
        assert held(room) == 3
        room.leave(3)
        await room.enter(10)
        assert held(room) == 10

    asyncio.run(scenario())


def test_a_small_one_does_not_overtake_a_large_one():
    async def scenario():
        room, order = WaitingRoom(10), []
        await room.enter(6)

        async def wait(name, size):
            await room.enter(size)
            order.append(name)

        tasks = [asyncio.create_task(wait(*one)) for one in (("large", 9), ("small", 1))]
        await settle()
        assert (order, room.num_waiting) == ([], 2)
        room.leave(5)
        await settle()
        assert (order, room.num_waiting) == (["large"], 1)
        room.leave(1)
        await settle()
        assert order == ["large", "small"]
        assert held(room) == 10
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_one_that_leaves_lets_those_behind_it_pass():
    async def scenario():
        room = WaitingRoom(10)
        await room.enter(6)
        large = asyncio.create_task(room.enter(9))
        small = asyncio.create_task(room.enter(4))
        await settle()
        assert not small.done()
        large.cancel()
        await settle()
        await small
        assert (held(room), room.num_waiting) == (10, 0)
        room.leave(6)
        with pytest.raises(asyncio.CancelledError):
            await large
        assert held(room) == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("cancels_first", [False, True])
def test_a_turn_that_comes_while_its_owner_leaves_is_passed_on(cancels_first):
    async def scenario():
        room = WaitingRoom(10)
        await room.enter(10)
        leaving = asyncio.create_task(room.enter(10))
        staying = asyncio.create_task(room.enter(10))
        await settle()
        for action in (leaving.cancel, partial(room.leave, 10))[:: 1 if cancels_first else -1]:
            action()  # both before any task runs again
        await settle()
        assert leaving.cancelled()
        await staying
        assert (held(room), room.num_waiting) == (10, 0)

    asyncio.run(scenario())


def test_waiting_ends_when_the_time_is_up():
    async def scenario():
        room = WaitingRoom(10)
        await room.enter(10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await room.enter(1)
        assert (held(room), room.num_waiting) == (10, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_and_nobody_forgotten(seed):
    async def scenario():
        chance, room, ended = random.Random(seed), WaitingRoom(100), []

        async def use(number):
            size = chance.randint(1, 100)
            await room.enter(size)
            try:
                assert room.free[0] >= 0
                await asyncio.sleep(chance.random() * 0.002)
                kept = chance.randint(0, size)
                room.leave(size - kept)
                size = kept
                await asyncio.sleep(chance.random() * 0.002)
                ended.append(number)
            finally:
                room.leave(size)

        tasks = [asyncio.create_task(use(number)) for number in range(200)]
        leaving = set(chance.sample(range(200), 80))
        for number in sorted(leaving):
            await asyncio.sleep(0)
            tasks[number].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert set(range(200)) - leaving <= set(ended)
        assert (room.free, room.num_waiting) == ([100], 0)

    asyncio.run(scenario())
