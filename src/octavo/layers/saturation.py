"""Inputs of linear layers beyond the range of their static scales: counted, and warned of.

To count takes a pass over the input, so layers do it in some of their calls alone, and never in
compiled or captured ones, which replay the same work every time.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics.formats import E4M3


class HostCopy:
    """A copy on the host of what a tensor holds now; numbers of a GPU arrive later."""

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = x
        if x.is_cuda:
            self._copy = x.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether `tolist` has nothing to wait for."""
        return self._event is None or self._event.query()

    def tolist(self) -> Any:
        """The numbers, in lists."""
        return self._copy.tolist()


def is_capturing() -> bool:
    """Whether what runs now is recorded in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# Calls of a layer that are counted: so many at first, then one in so many.
FIRST, EVERY = 16, 64
# Values that are looked at together: what that takes of a GPU's memory is 4 bytes for each.
CHUNK = 2**24
LIMIT = E4M3.max + 16  # half a step above the largest number still rounds to it
NUM_SHOWN = 5  # layers in a warning, the worst first


class Saturation(NamedTuple):
    """What was counted of a layer's inputs; reach: the largest of them over 448 · scale."""

    num_saturated: int
    num_values: int
    reach: float

    def __str__(self) -> str:
        percent = 100 * self.num_saturated / max(1, self.num_values)
        return f"{percent:.3g} % of its inputs, up to {self.reach:.3g} times the range"


class SaturationCounter:
    """How many inputs of one layer lay beyond the range of its scale, in the calls it counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self, every: int = EVERY) -> None:
        """Forget what was counted; every: after the first calls, one in so many counts."""
        self.every = every
        self.num_calls = self.num_values = 0
        self.is_told = False
        # float64 [2] on the device: how many saturated, and the largest over the range.
        self.counts: Tensor | None = None

    def see(self, x: Tensor, scale: Tensor) -> None:
        """Take note of one call, and of its input x if it is one that counts."""
        if WATCH.is_paused:
            return
        call = self.num_calls
        self.num_calls += 1
        if call < FIRST or call % self.every == 0:
            self._count(x, scale)

    @torch.no_grad()
    def _count(self, x: Tensor, scale: Tensor) -> None:
        # Tensors of other kinds stand for no values, as while a model is traced.
        if type(x) is not Tensor or x.is_meta or x.numel() == 0 or is_capturing():
            return
        WATCH.note(self)  # first: a look is at whole passes
        counts = x.new_zeros(2, dtype=torch.float64) if self.counts is None else self.counts
        num_saturated, reach = counts.to(x.device)
        for part in x.detach().flatten().split(CHUNK):
            size = part.to(torch.float32).abs().nan_to_num(0.0, posinf=torch.inf)
            num_saturated = num_saturated + (size > scale * LIMIT).sum()
            reach = torch.maximum(reach, (size.amax() / (scale * E4M3.max)).double())
        self.counts = torch.stack((num_saturated, reach))
        self.num_values += x.numel()

    def read(self) -> Saturation:
        """What was counted so far; waits for the device."""
        num_saturated, reach = (0, 0.0) if self.counts is None else self.counts.tolist()
        return Saturation(int(num_saturated), self.num_values, reach)


class SaturationWatch:
    """Reads counters after each pass of a model, and warns once of each layer that saturates."""

    def __init__(self) -> None:
        self.is_paused = False
        self.forget()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no layer counts: for passes over made-up inputs."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def forget(self) -> None:
        """Drop what has not been told yet."""
        self._counted: dict[int, SaturationCounter] = {}
        self._pending: list[tuple[list[SaturationCounter], list[int], HostCopy]] = []

    def note(self, counter: SaturationCounter) -> None:
        """A layer is about to count; one that has already begins another pass of its model."""
        if id(counter) in self._counted:
            self.look()
        self._counted[id(counter)] = counter

    def look(self) -> None:
        """Warn of what the last look has found, and begin another; waits for no device."""
        if torch.compiler.is_compiling() or is_capturing():
            return
        self._tell()
        if not self._pending and self._counted:
            self._begin(self._counted.values())
            self._counted = {}
            self._tell()  # what lies on a CPU is there

    def _begin(self, counters: Iterable[SaturationCounter]) -> None:
        by_device: dict[torch.device, list[SaturationCounter]] = {}
        for counter in counters:
            if counter.counts is not None and not counter.is_told:
                by_device.setdefault(counter.counts.device, []).append(counter)
        for group in by_device.values():
            counts = [counter.counts for counter in group if counter.counts is not None]
            seen = [counter.num_values for counter in group]
            self._pending.append((group, seen, HostCopy(torch.stack(counts))))

    def _tell(self) -> None:
        if not self._pending or not all(copy.is_ready for _, _, copy in self._pending):
            return
        found: dict[str, Saturation] = {}
        for counters, seen, copy in self._pending:
            for counter, num_values, row in zip(counters, seen, copy.tolist(), strict=True):
                if row[0] and not counter.is_told:
                    counter.is_told = True
                    found[counter.name or "(unnamed)"] = Saturation(int(row[0]), num_values, row[1])
        self._pending = []
        if found:
            warnings.warn(_message(found), stacklevel=2)


def _message(found: dict[str, Saturation]) -> str:
    worst = sorted(found, key=lambda name: found[name].reach, reverse=True)
    shown = ", ".join(f"{name} ({found[name]})" for name in worst[:NUM_SHOWN])
    more = f" and {len(worst) - NUM_SHOWN} more layers" if len(worst) > NUM_SHOWN else ""
    return (
        "inputs of linear layers lie beyond the range of their static scales and were cut, in "
        f"{shown}{more}: results may be wrong. Calibrate again on data like these, or with a "
        "larger margin (octavo.calibrate_linear), use scaling='dynamic', or add these layers to "
        "ignored_layers"
    )


# One for all models: a layer has no other that knows of the layers beside it.
WATCH = SaturationWatch()
