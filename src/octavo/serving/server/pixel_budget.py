"""Pixels that all requests share."""

import asyncio
from collections import deque


class PixelBudget:
    """A number of pixels to hold and give back; who finds too few waits, in order of arrival.

    For one event loop: nothing here is for threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_held(self) -> int:
        """Pixels that somebody holds."""
        return self.size - self._free

    @property
    def num_waiting(self) -> int:
        """Callers of `hold` that have not found room yet."""
        return len(self._waiting)

    async def hold(self, num_pixels: int) -> "Hold":
        """Wait until there is room for these pixels and everybody before has found theirs.

        A caller that is cancelled while it waits leaves nothing behind.
        """
        if num_pixels > self.size:
            raise ValueError(f"expected at most {self.size} pixels to hold, got {num_pixels}")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_pixels, turn))
        self._admit()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # cancelled when its turn had just come
                self._give_back(num_pixels)
            else:
                turn.cancel()
                self._admit()
            raise
        return Hold(self, num_pixels)

    def _give_back(self, num_pixels: int) -> None:
        self._free += num_pixels
        self._admit()

    def _admit(self) -> None:
        """Let in those in front that fit; those that have left make way."""
        self._waiting = deque(entry for entry in self._waiting if not entry[1].cancelled())
        while self._waiting and self._waiting[0][0] <= self._free:
            num_pixels, turn = self._waiting.popleft()
            self._free -= num_pixels
            turn.set_result(None)


class Hold:
    """Pixels of a budget in somebody's hands."""

    def __init__(self, budget: PixelBudget, num_pixels: int) -> None:
        self._budget = budget
        self.num_pixels = num_pixels

    def shrink(self, num_pixels: int) -> None:
        """Keep at most so many of them and give back the rest."""
        surplus = max(0, self.num_pixels - num_pixels)
        self.num_pixels -= surplus
        self._budget._give_back(surplus)

    def release(self) -> None:
        """Give back what is left; a second call gives back nothing."""
        self.shrink(0)
