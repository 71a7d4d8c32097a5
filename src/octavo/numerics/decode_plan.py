"""DecodePlan: which program of a decode step reads which tokens, so that all end together."""

from dataclasses import dataclass

import torch
from torch import Tensor

# What an item says: its sequence (-1: no item), the blocks of tokens it reads [first, end), which
# split of its sequence it is and of how many, and the sequence's length.
ITEM_FIELDS = ("sequence", "first_block", "end_block", "split", "num_splits", "length")
# Starting and ending an item takes about as long as reading this many blocks.
ITEM_BLOCKS = 1
# So many splits of a sequence are combined at once; more of them cost COMBINE_BLOCKS blocks.
COMBINED_AT_ONCE = 16
COMBINE_BLOCKS = 3
# What is tried: mode 0 has one item for each program slot and few splits, modes 1 … 3 have as many
# items for each slot and as many splits as they need.
NUM_MODES = 4
# Fractions of a program slot are counted in units of 1 / SLOT_UNITS.
SLOT_UNITS = 1024


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a plan is made for, apart from the lengths: shapes and the device, never data.

    block_tokens: an item reads whole blocks of this many tokens. q_len: query tokens of each
    sequence. window: the spec's. num_slots: programs that run on the device at once.
    programs_per_item: one for each KV head, more where a head's queries do not fit one program.
    capacity: the most items a plan may have, and so the size of its launch.
    """

    block_tokens: int
    q_len: int
    window: int | None
    num_slots: int
    programs_per_item: int
    capacity: int

    @property
    def slot_units(self) -> int:
        """What the slots hold of items, in units of 1 / SLOT_UNITS."""
        return self.num_slots * SLOT_UNITS // self.programs_per_item

    @property
    def numbers(self) -> list[int]:
        """The fields in order, 0 for no window: how settings travel through torch.library."""
        return [
            self.block_tokens,
            self.q_len,
            self.window or 0,
            self.num_slots,
            self.programs_per_item,
            self.capacity,
        ]

    @staticmethod
    def of_numbers(numbers: list[int]) -> "PlanSettings":
        """The settings whose `numbers` these are."""
        block_tokens, q_len, window, num_slots, programs_per_item, capacity = numbers
        return PlanSettings(
            block_tokens=block_tokens,
            q_len=q_len,
            window=window or None,
            num_slots=num_slots,
            programs_per_item=programs_per_item,
            capacity=capacity,
        )


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """The work list of one decode step, for every layer with these lengths and settings.

    items: [capacity, 6] int32, see ITEM_FIELDS; the longest first, those of one sequence in a row,
    unused ones at the end. counters: [num_sequences · programs_per_item] int32, zeros between
    calls: a plan serves one stream at a time. impl: the implementation it was made for.
    """

    items: Tensor
    counters: Tensor
    settings: PlanSettings
    impl: str

    @property
    def capacity(self) -> int:
        """How many items the plan has room for."""
        return self.items.shape[0]


def make_items(lengths: Tensor, settings: PlanSettings) -> Tensor:
    """The items of sequences of these lengths, [capacity, 6] int32: the specification of plans.

    A sequence of n blocks becomes ⌈n / c⌉ items of nearly equal size, at least one. For a deadline
    D and w items for each slot, c is D/w less the cost of an item. An item of d blocks, its cost
    included, takes 1/⌊D/d⌋ of a slot, since so many of them end by D; D is feasible if all items
    fit the slots. Bisection finds a small feasible D for each mode; the smallest one decides.
    """
    lengths = lengths.cpu().long()
    first, num_blocks = _blocks(lengths, settings)
    if len(lengths) == 0:
        return torch.full((settings.capacity, len(ITEM_FIELDS)), -1, dtype=torch.int32)
    chunk = _best_chunk(num_blocks, settings)
    num_splits = _num_splits(num_blocks, chunk)
    cost = -(-num_blocks // num_splits)
    order = sorted(range(len(lengths)), key=lambda sequence: (-int(cost[sequence]), sequence))
    rows = []
    for sequence in order:
        start, n, splits = (int(x[sequence]) for x in (first, num_blocks, num_splits))
        for split in range(splits):
            begin, end = start + split * n // splits, start + (split + 1) * n // splits
            rows.append([sequence, begin, end, split, splits, int(lengths[sequence])])
    rows += [[-1] * len(ITEM_FIELDS)] * (settings.capacity - len(rows))
    return torch.tensor(rows, dtype=torch.int32)


def max_deadline(num_sequences: int, max_blocks: int, settings: PlanSettings) -> int:
    """A deadline that is feasible in mode 0 whatever the lengths are."""
    longest = max_blocks + ITEM_BLOCKS
    work = settings.programs_per_item * num_sequences * longest
    return max(longest, -(-2 * work // settings.num_slots))


def _blocks(lengths: Tensor, settings: PlanSettings) -> tuple[Tensor, Tensor]:
    """(first block, number of blocks) that each sequence's queries see."""
    oldest = torch.zeros_like(lengths)
    if settings.window is not None:
        oldest = (lengths - settings.q_len - settings.window + 1).clamp(min=0)
    first = oldest // settings.block_tokens
    return first, -(-lengths // settings.block_tokens) - first


def _best_chunk(num_blocks: Tensor, settings: PlanSettings) -> int:
    longest, total = int(num_blocks.max()), int(num_blocks.sum())
    work = settings.programs_per_item * (total + ITEM_BLOCKS * len(num_blocks))
    low = max(ITEM_BLOCKS, (work - 1) // settings.num_slots)  # never feasible
    high = max(longest + ITEM_BLOCKS, -(-2 * work // settings.num_slots))
    chunks, costs = [], []
    for mode in range(NUM_MODES):
        deadline = _bisect(num_blocks, mode, low, high, settings)
        chunks.append(_chunk(deadline, mode))
        most_splits = int(_num_splits(num_blocks, chunks[-1]).max())
        costs.append(deadline + COMBINE_BLOCKS * (most_splits > COMBINED_AT_ONCE))
    return chunks[costs.index(min(costs))]


def _bisect(num_blocks: Tensor, mode: int, low: int, high: int, settings: PlanSettings) -> int:
    """A small feasible deadline above `low`; twice `high` if not even that is feasible."""
    if not _is_feasible(num_blocks, high, mode, settings):
        return 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _is_feasible(num_blocks, middle, mode, settings):
            high = middle
        else:
            low = middle
    return high


def _is_feasible(num_blocks: Tensor, deadline: int, mode: int, settings: PlanSettings) -> bool:
    num_splits = _num_splits(num_blocks, _chunk(deadline, mode))
    if int(num_splits.sum()) > settings.capacity:
        return False
    if mode == 0 and int(num_splits.max()) > COMBINED_AT_ONCE:
        return False
    cost = -(-num_blocks // num_splits) + ITEM_BLOCKS  # at most the deadline
    units = (num_splits * (SLOT_UNITS // (deadline // cost))).sum()
    return int(units) <= settings.slot_units


def _chunk(deadline: int, mode: int) -> int:
    return max(deadline // max(mode, 1) - ITEM_BLOCKS, 1)


def _num_splits(num_blocks: Tensor, chunk: int) -> Tensor:
    return (-(-num_blocks // chunk)).clamp(min=1)
