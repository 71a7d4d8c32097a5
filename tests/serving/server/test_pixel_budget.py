"""A budget that many wait for: order, cancellation, and nothing lost."""

import asyncio
import random

import pytest

from octavo.serving.server.input_images import PixelBudget


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_pixels_are_held_and_given_back_once():
    async def scenario():
        budget = PixelBudget(10)
        hold = await budget.hold(7)
        assert budget.num_held == hold.num_pixels == 7
        hold.shrink(9)  # more than there are: nothing to give back
        assert budget.num_held == 7
        hold.shrink(3)
        assert budget.num_held == 3
        hold.release()
        hold.release()
        hold.shrink(2)
        assert (budget.num_held, hold.num_pixels) == (0, 0)
        with pytest.raises(ValueError, match="at most 10 pixels to hold, got 11"):
            await budget.hold(11)
        assert (await budget.hold(10)).num_pixels == 10

    asyncio.run(scenario())


def test_a_small_one_does_not_overtake_a_large_one():
    async def scenario():
        budget, order = PixelBudget(10), []
        first = await budget.hold(6)

        async def wait(name, num_pixels):
            hold = await budget.hold(num_pixels)
            order.append(name)
            return hold

        tasks = [asyncio.create_task(wait(*one)) for one in (("large", 9), ("small", 1))]
        await settle()
        assert (order, budget.num_waiting) == ([], 2)
        first.shrink(1)
        await settle()
        assert (order, budget.num_waiting) == (["large"], 1)
        first.release()
        await settle()
        assert order == ["large", "small"]
        assert budget.num_held == 10
        for task in tasks:
            (await task).release()
        assert budget.num_held == 0

    asyncio.run(scenario())


def test_one_that_leaves_lets_those_behind_it_pass():
    async def scenario():
        budget = PixelBudget(10)
        first = await budget.hold(6)
        large = asyncio.create_task(budget.hold(9))
        small = asyncio.create_task(budget.hold(4))
        await settle()
        assert not small.done()
        large.cancel()
        await settle()
        assert (await small).num_pixels == 4
        assert (budget.num_held, budget.num_waiting) == (10, 0)
        first.release()
        with pytest.raises(asyncio.CancelledError):
            await large
        assert budget.num_held == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("cancels_first", [False, True])
def test_a_turn_that_comes_while_its_owner_leaves_is_passed_on(cancels_first):
    async def scenario():
        budget = PixelBudget(10)
        first = await budget.hold(10)
        leaving = asyncio.create_task(budget.hold(10))
        staying = asyncio.create_task(budget.hold(10))
        await settle()
        for action in (leaving.cancel, first.release)[:: 1 if cancels_first else -1]:
            action()  # both before any task runs again
        await settle()
        assert leaving.cancelled()
        assert (await staying).num_pixels == 10
        assert (budget.num_held, budget.num_waiting) == (10, 0)

    asyncio.run(scenario())


def test_waiting_ends_when_the_time_is_up():
    async def scenario():
        budget = PixelBudget(10)
        await budget.hold(10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await budget.hold(1)
        assert (budget.num_held, budget.num_waiting) == (10, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_and_nobody_forgotten(seed):
    async def scenario():
        chance, budget, ended = random.Random(seed), PixelBudget(100), []

        async def use(number):
            hold = await budget.hold(chance.randint(1, 100))
            try:
                assert budget.num_held <= 100
                await asyncio.sleep(chance.random() * 0.002)
                hold.shrink(chance.randint(0, 100))
                await asyncio.sleep(chance.random() * 0.002)
                ended.append(number)
            finally:
                hold.release()

        tasks = [asyncio.create_task(use(number)) for number in range(200)]
        leaving = set(chance.sample(range(200), 80))
        for number in sorted(leaving):
            await asyncio.sleep(0)
            tasks[number].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert set(range(200)) - leaving <= set(ended)
        assert (budget.num_held, budget.num_waiting) == (0, 0)

    asyncio.run(scenario())
