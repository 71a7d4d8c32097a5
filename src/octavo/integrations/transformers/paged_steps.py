"""Where the tokens of a step lie in a paged cache: what the layers of one forward pass share."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.internals import internals
from octavo.numerics.decode_plan import DecodePlan
from octavo.numerics.rotary import Rotary

PAGE_SIZE = 64


@dataclass(frozen=True)
class Places:
    """Where the tokens of a step lie in layers of one capacity and window."""

    slots: Tensor
    page_table: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Step:
    """New tokens of every sequence: some columns of the input, padding among them.

    before, lengths: [batch] int32, tokens of each sequence before and after. positions: [batch,
    columns] int64, places in the sequence, −1 for padding. real: the tokens' indices among batch ·
    columns, None if all are; cu_seqlens: of these.
    """

    before: Tensor
    lengths: Tensor
    positions: Tensor
    real: Tensor | None
    cu_seqlens: Tensor
    places: dict[tuple[int, int | None], Places] = field(default_factory=dict)
    plans: dict[str, DecodePlan] = field(default_factory=dict)

    @staticmethod
    def make(before: Tensor, num_columns: int, mask: Tensor | None) -> "Step":
        """The step after `before`; mask: [batch, columns] bool, False at padding."""
        batch, device = len(before), before.device
        if mask is None:
            position = torch.arange(num_columns, device=device)
            ends = torch.arange(batch + 1, device=device, dtype=torch.int32) * num_columns
            return Step(before, before + num_columns, before[:, None] + position, None, ends)
        count = mask.cumsum(1)
        positions = torch.where(mask, before[:, None] + count - 1, -1)
        added = count[:, -1].to(torch.int32)
        real = None
        if num_columns > 1:  # a single column has one place for each sequence, padding or not
            real = mask.flatten().nonzero().squeeze(1)
            # Eager code has waited for how many there are; compiled code must not ask.
            if not torch.compiler.is_compiling() and len(real) == mask.numel():
                real = None
        ends = torch.nn.functional.pad(added.cumsum(0), (1, 0)).to(torch.int32)
        return Step(before, before + added, positions, real, ends)

    @property
    def num_columns(self) -> int:
        """How many tokens and paddings each sequence got."""
        return self.positions.shape[1]

    def places_in(self, capacity: int, window: int | None) -> Places:
        """Where the tokens lie in layers with `capacity` tokens for each sequence."""
        key = (capacity, window)
        if key not in self.places:
            self.places[key] = self._make_places(capacity, window)
        return self.places[key]

    def _make_places(self, capacity: int, window: int | None) -> Places:
        batch, device = len(self.before), self.before.device
        sequence = torch.arange(batch, device=device)[:, None]
        num_pages = capacity // PAGE_SIZE
        page = torch.arange(num_pages, device=device)
        slots = sequence * capacity + self.positions % capacity
        slots = torch.where(self.positions < 0, -1, slots).flatten()
        if window is None:
            table = sequence * num_pages + page
            return Places(slots, table.to(torch.int32), self.lengths)
        # The first page that a query of this step may see comes first: older ones are overwritten.
        first_page = (self.before - window + 1).clamp(min=0) // PAGE_SIZE
        table = sequence * num_pages + (first_page[:, None] + page) % num_pages
        return Places(slots, table.to(torch.int32), self.lengths - PAGE_SIZE * first_page)


class Sequences:
    """The lengths of a batch's sequences, [batch] int32, which all layers of a cache share.

    num_columns: what a static cache has seen, on the device: a compiled step asks no host.
    """

    def __init__(self) -> None:
        self.lengths: Tensor | None = None
        self.num_columns: Tensor | None = None

    def prepare(self, batch: int, device: torch.device, is_static: bool) -> None:
        """Make the tensors, when the first keys arrive."""
        if self.lengths is not None:
            if self.lengths.device != device:
                raise UnsupportedError(
                    f"expected a cache on one device, got {self.lengths.device} and {device}"
                )
            return
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.num_columns = torch.zeros((), dtype=torch.int64, device=device)
        if is_static:
            keep_address(self.lengths)
            keep_address(self.num_columns)

    def select(self, indices: Tensor) -> None:
        """Keep the sequences with these indices, in this order."""
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, indices.to(self.lengths.device))


Tables = tuple[Tensor, Tensor]


class Pass:
    """One forward pass of a model over a cache: what its layers share.

    cache: whose layers a forward of ours may use itself; None if its class has its own `update`.
    config: of the modules, as the last one has checked it.
    """

    def __init__(self, layers: list[Any], sequences: Sequences, cache: Any = None) -> None:
        self.layers, self.sequences, self.cache = layers, sequences, cache
        self.config: Any = None
        self.steps: dict[tuple[int, int], Step] = {}
        self.rotaries: dict[tuple[int, ...], tuple[Tables, Rotary]] = {}

    def rotary(self, tables: Tables, shape: tuple[int, int, int], start: int, stop: int) -> Rotary:
        """The angles of columns start … stop, made once for all layers with these tables.

        tables: cos and sin, [1 or batch, columns, head_dim]; their halves are the same. shape:
        (batch, columns, head_dim).
        """
        if torch.compiler.is_compiling():  # where tensors have no id
            return _as_rotary(tables, shape, start, stop)
        cos, sin = tables
        key = (id(cos), id(sin), *shape, start, stop)
        found = self.rotaries.get(key)
        if found is None:  # the tables are kept, so that no others get their ids
            found = self.rotaries[key] = tables, _as_rotary(tables, shape, start, stop)
        return found[1]

    def step(self, start: int, stop: int, num_columns: int, mask: Tensor | None) -> Step:
        """The step of columns start … stop of `num_columns` new ones, made once for all layers.

        mask: [batch, columns so far], 0 or False at padding.
        """
        found = self.steps.get((start, stop))
        return self._make_step(start, stop, num_columns, mask) if found is None else found

    def _make_step(self, start: int, stop: int, num_columns: int, mask: Tensor | None) -> Step:
        whole = (0, num_columns)
        if mask is not None:
            mask = mask[:, -num_columns:].bool()
        if whole not in self.steps:
            lengths = self.sequences.lengths
            assert lengths is not None
            self.steps[whole] = Step.make(lengths.clone(), num_columns, mask)
            lengths.copy_(self.steps[whole].lengths)
        if (start, stop) not in self.steps:
            before = self.steps[whole].before
            if start > 0:
                before = self.step(0, start, num_columns, mask).lengths
            part = None if mask is None else mask[:, start:stop]
            self.steps[start, stop] = Step.make(before, stop - start, part)
        return self.steps[start, stop]


def _as_rotary(tables: Tables, shape: tuple[int, int, int], start: int, stop: int) -> Rotary:
    cos, sin = tables
    batch, num_columns, head_dim = shape
    is_good = cos.shape == sin.shape and cos.shape in (shape, (1, num_columns, head_dim))
    if not is_good:
        raise ConfigError(
            f"expected position_embeddings of shape [1 or {batch}, {num_columns}, {head_dim}], got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    cos, sin = (x[:, start:stop, : head_dim // 2].flatten(0, 1) for x in tables)
    return Rotary(cos, sin)


def whole_pages(num_tokens: int) -> int:
    """The number of tokens that pages for so many have room for."""
    return -(-num_tokens // PAGE_SIZE) * PAGE_SIZE


def keep_address(x: Tensor) -> None:
    """Tell torch.compile that a tensor stays where it is: a CUDA graph may read it in place."""
    # Here, not above: this imports the compiler, for seconds.
    with internals("torch"):
        from torch._dynamo import mark_static_address
    mark_static_address(x)
