"""Rooms: memory of paged caches that CUDA graphs read, which the next cache of a batch takes over.

A graph reads fixed addresses, and every call of `generate()` makes a cache of its own. So the pages
of a cache whose steps are captured are a room: it outlives the cache, with its graphs, and the next
cache with as many sequences stores its prompt there and replays from its first step on.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.integrations.transformers.paged_steps import PAGE_SIZE, Sequences, whole_pages

# Where a decoder with rooms has them, among its attributes.
GRAPHS = "octavo_decode_graphs"
# Pages move to a larger room by this fraction, at least by so many tokens: each move is a capture.
GROWTH, MIN_GROWTH_TOKENS = 4, 1024
# Rooms of a model, and the part of the device's memory that those without a cache may keep.
MAX_ROOMS, KEPT_FRACTION = 8, 8


@contextmanager
def lasting_memory() -> Iterator[None]:
    """Tensors made inside may be written to outside of inference mode, too: graphs outlive it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True)
class Captured:
    """A step as a graph: what replays it, the tensors it reads, and what it leaves.

    kind: makes the decoder's result of its fields.
    """

    replay: Callable[[], Any]
    inputs: dict[str, Tensor]
    hidden: Tensor
    kind: type
    has_cache: bool


@dataclass(eq=False)
class Room:
    """Pages of every layer by index and name, lengths, and the graphs that read them."""

    batch: int
    lengths: Tensor
    num_columns: Tensor
    pages: dict[int, dict[str, Tensor]]
    owner: "weakref.ref[RoomSequences]"
    full: frozenset[int]  # layers without a window, whose pages grow
    graphs: dict[Hashable, Captured] = field(default_factory=dict)
    pool: Any = None
    stream: Any = None

    def capacity(self, index: int) -> int:
        """How many tokens of each sequence a layer has pages for."""
        return len(self.pages[index]["key_pages"]) // self.batch * PAGE_SIZE

    @property
    def nbytes(self) -> int:
        """Bytes of the pages and of scales beside them."""
        return sum(x.nbytes for pages in self.pages.values() for x in pages.values())

    def fits(self, device: torch.device, num_columns: int) -> bool:
        """Whether a prompt of so many columns, and a token after it, have a place here."""
        has_place = all(self.capacity(index) > num_columns for index in self.full)
        return self.lengths.device == device and has_place

    def forget_graphs(self) -> None:
        """Free the graphs; the memory stays its owner's."""
        self.graphs.clear()
        self.pool = None  # torch takes no pool whose graphs are all gone


class Rooms:
    """The rooms of a decoder: some that are kept for the next cache, others while theirs lives."""

    def __init__(self) -> None:
        self._kept: list[Room] = []
        self._all: weakref.WeakSet[Room] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay when all caches are gone."""
        return sum(room.nbytes for room in self._kept)

    def take(
        self, owner: "RoomSequences", batch: int, device: torch.device, num_columns: int
    ) -> Room | None:
        """A room without a cache that a prompt fits; one that is too small makes way."""
        free = [room for room in self._kept if room.owner() is None and room.batch == batch]
        found = next((room for room in free if room.fits(device, num_columns)), None)
        for room in free:
            if room is not found:
                self.forget(room)
        if found is None:
            return None
        self._kept.append(self._kept.pop(self._kept.index(found)))  # the last to go
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if found.stream not in (None, stream):
                stream.wait_stream(found.stream)
            found.stream = stream
        found.owner = weakref.ref(owner)
        found.lengths.zero_()
        found.num_columns.zero_()
        return found

    def has_place(self) -> bool:
        """Whether there may be one more room; those without a cache make way."""
        free = [room for room in self._kept if room.owner() is None]
        while len(self._all) >= MAX_ROOMS and free:
            self.forget(free.pop(0))
        return len(self._all) < MAX_ROOMS

    def add(self, room: Room, budget: int) -> None:
        """Take a new room in, and keep those of the last caches as far as the bytes allow."""
        self._all.add(room)
        self._kept.append(room)
        while self._kept and self.kept_bytes > budget:
            self._kept.pop(0)  # it ends with its cache

    def forget(self, room: Room) -> None:
        """Free a room's graphs, and its memory unless a cache lives there."""
        room.forget_graphs()
        if room in self._kept:
            self._kept.remove(room)
        self._all.discard(room)

    def forget_graphs(self) -> None:
        """Free all graphs, and the memory of all rooms without a cache."""
        for room in list(self._all):
            if room.owner() is None:
                self.forget(room)
            else:
                room.forget_graphs()


class RoomSequences(Sequences):
    """The lengths of a batch's sequences, and the room that its cache is in, if any.

    rooms: of the decoder; None for a cache that no graph of ours reads.
    """

    def __init__(self, rooms: Rooms | None = None) -> None:
        super().__init__()
        self.rooms, self.room = rooms, None
        self.seen: set[Hashable] = set()  # kinds of steps that were taken

    room: Room | None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has memory of its own, and no graphs."""
        return {**vars(self), "rooms": None, "room": None, "seen": set()}

    def enter(self, batch: int, device: torch.device, num_columns: int) -> None:
        """Take a room for a prompt before its first keys are stored, if there is one."""
        if self.rooms is None or self.lengths is not None or torch.compiler.is_compiling():
            return
        self.room = self.rooms.take(self, batch, device, num_columns)
        if self.room is not None:
            self.lengths, self.num_columns = self.room.lengths, self.room.num_columns

    def leave(self) -> None:
        """Give up the room: its graphs are gone, and its memory is the cache's alone."""
        if self.room is not None and self.rooms is not None:
            self.rooms.forget(self.room)
        self.room = None

    def prepare(self, batch: int, device: torch.device, is_static: bool) -> None:
        """Make the tensors, when the first keys arrive."""
        if torch.compiler.is_compiling():
            super().prepare(batch, device, is_static)
            return
        with lasting_memory():
            super().prepare(batch, device, is_static)

    def select(self, indices: Tensor) -> None:
        """Keep the sequences with these indices, in this order."""
        before = self.lengths
        super().select(indices)
        if self.room is None or before is None or self.lengths is None:
            return
        if self.lengths.shape == before.shape:
            self.lengths = before.copy_(self.lengths)
        else:
            self.leave()


def roomy(num_tokens: int) -> int:
    """The capacity of a room for so many tokens."""
    return whole_pages(num_tokens + max(num_tokens // GROWTH, MIN_GROWTH_TOKENS))
