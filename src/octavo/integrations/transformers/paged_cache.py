"""Layers of a transformers cache whose keys and values lie in octavo's pages.

Every sequence of the batch has a range of pages to itself, in layers with a window a ring. Padding
is not stored: a sequence's tokens lie one after the other, whatever columns they had.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from octavo import ops
from octavo.cache.view import PagedView
from octavo.errors import CapacityError, UnsupportedError
from octavo.integrations.transformers.paged_steps import (
    PAGE_SIZE,
    Pass,
    Places,
    Sequences,
    Step,
    Tables,
    keep_address,
    whole_pages,
)
from octavo.internals import internals
from octavo.layers.decoder_attention import DecoderAttention
from octavo.numerics.decode_plan import DecodePlan
from octavo.numerics.granularity import PerToken
from octavo.numerics.rotary import Rotary
from octavo.ops.plan_decode import MAX_QUERY_TOKENS

with internals("torch"):
    from torch import _assert_async

# Columns that a layer with a window takes at a time: its ring has room for them beside the window.
WINDOW_COLUMNS = 256
# A cache that grows makes room for one more token in so many, at least for some pages.
GROWTH, MIN_GROWTH_TOKENS = 32, 256


class PagedLayer(CacheLayerMixin):
    """Pages of one layer: a range for each sequence, which grows, or a ring if it has a window.

    is_first: whether it keeps what all layers share. checks_room: whether it refuses tokens beyond
    max_length, the room of a static cache, which never moves; None for one that grows.
    """

    is_croppable = True

    def __init__(
        self,
        attention: DecoderAttention,
        sequences: Sequences,
        *,
        is_first: bool,
        checks_room: bool = False,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.sequences = attention, sequences
        self.is_first, self.checks_room, self.max_length = is_first, checks_room, max_length
        self.window = attention.spec.window
        self.is_sliding = self.window is not None
        self.capacity, self.num_seen, self.batch_size = 0, 0, 0
        self.key_pages: Tensor | None = None
        self.value_pages: Tensor | None = None
        self.key_scale, self.value_scale = attention.key_scale, attention.value_scale
        self._checked: PagedView | None = None  # of these pages, with a batch of the past

    @property
    def is_compileable(self) -> bool:
        """Whether a compiled step may use the layer: a static one."""
        return self.max_length is not None

    @property
    def _stored(self) -> list[str]:
        """The names of what grows with the tokens: pages, and scales if each token has its own."""
        per_token = isinstance(self.attention.granularity, PerToken)
        scales = ["key_scale", "value_scale"] if per_token and self.attention.dtype else []
        return ["key_pages", "value_pages", *scales]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, and of scales that lie beside them."""
        return sum(getattr(self, name).nbytes for name in self._stored) if self.capacity else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the first pages, for the shapes of these keys."""
        if key_states.shape[-1] != value_states.shape[-1]:
            raise UnsupportedError(
                f"{self.attention.name}: expected keys and values of one head_dim, got "
                f"{key_states.shape[-1]} and {value_states.shape[-1]}"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self.sequences.prepare(self.batch_size, self.device, self.max_length is not None)
        # Buffers may have moved with the model since the layer was made.
        self.key_scale, self.value_scale = self.attention.key_scale, self.attention.value_scale
        num_heads, _, head_dim = key_states.shape[1:]
        self._page_shape = (num_heads, PAGE_SIZE, head_dim)
        self._make_room(self._first_capacity(key_states.shape[2]))
        self.is_initialized = True

    def _first_capacity(self, num_columns: int) -> int:
        if self.window is not None:
            longest = self.window if self.max_length is None else min(self.window, self.max_length)
            return whole_pages(longest + WINDOW_COLUMNS) + PAGE_SIZE
        return whole_pages(max(1, self.max_length or num_columns))

    def _make_room(self, capacity: int) -> None:
        """Pages for so many tokens of each sequence; what is there stays."""
        self._checked = None
        pages = (self.batch_size * (capacity // PAGE_SIZE), *self._page_shape)
        for name in self._stored:
            is_scale = name.endswith("_scale")
            dtype = torch.float32 if is_scale else self.attention.dtype or self.dtype
            new = torch.zeros(pages[: 3 if is_scale else 4], dtype=dtype, device=self.device)
            if self.max_length is not None:
                keep_address(new)
            if self.capacity:
                kept = self._by_sequence(getattr(self, name))
                self._by_sequence(new)[:, : kept.shape[1]] = kept
                del kept  # the old pages are free before the next ones are made
            setattr(self, name, new)
        self.capacity = capacity
        # What a plan is made for. A string, which knows its hash: every layer looks a plan up.
        attention = self.attention
        dtype, num_kv_heads = attention.dtype or self.dtype, self._page_shape[0]
        self._plan_key = f"{capacity} {attention.spec} {dtype} {attention.num_heads}/{num_kv_heads}"

    def _by_sequence(self, x: Tensor) -> Tensor:
        """Pages or their scales as [batch, pages, …]."""
        return _bits(x).view(self.batch_size, -1, *x.shape[1:])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Make room for new keys and values; attention stores them, since it knows the padding."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.expect(key_states.shape[2])
        return key_states, value_states

    def expect(self, num_columns: int) -> None:
        """Make room for so many new columns."""
        if self.max_length is not None:
            seen = self.sequences.num_columns
            assert seen is not None
            if self.is_first:
                seen.add_(num_columns)
            if self.checks_room:
                # On the device, without waiting: what is too much would land in another's place.
                fits = seen <= self.max_length
                _assert_async(fits, f"expected at most {self.max_length} tokens, got more")
            return
        self.num_seen += num_columns
        if self.window is None and self.num_seen > self.capacity:
            more = self.capacity + max(self.capacity // GROWTH, MIN_GROWTH_TOKENS)
            self._make_room(whole_pages(max(self.num_seen, more)))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        num_columns: int,
        run: Pass,
        *,
        mask: Tensor | None,
        sinks: Tensor | None,
        tables: Tables | None = None,
    ) -> Tensor:
        """Store k and v, and attend to all that is stored: [batch, columns, heads, head_dim].

        q, k, v: [batch · columns, heads, head_dim]; mask: [batch, columns so far] or None. tables:
        cos and sin, by which queries and keys are turned first.
        """
        batch, head_dim = self.batch_size, q.shape[-1]
        # A window's ring has no room for many new tokens beside those that their queries see.
        at_once = num_columns if self.window is None else WINDOW_COLUMNS
        parts = []
        for start in range(0, num_columns, at_once):
            stop = min(start + at_once, num_columns)
            step, part, rotary = run.step(start, stop, num_columns, mask), (q, k, v), None
            if stop - start < num_columns:
                by_sequence = (x.view(batch, num_columns, *x.shape[1:]) for x in part)
                q_part, k_part, v_part = (x[:, start:stop].flatten(0, 1) for x in by_sequence)
                part = q_part, k_part, v_part
            if tables is not None:
                rotary = run.rotary(tables, (batch, num_columns, head_dim), start, stop)
            parts.append(self._attend(step, sinks, rotary, *part))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def store(self, k: Tensor, v: Tensor, run: Pass) -> None:
        """Store k and v, [batch, columns, heads, head_dim] without padding; attend to nothing."""
        if self.window is not None:
            raise UnsupportedError(f"{self.attention.name}: expected a layer that sees all keys")
        num_columns = k.shape[1]
        places = run.step(0, num_columns, num_columns, None).places_in(self.capacity, None)
        self.attention.append(self._view(places), k.flatten(0, 1), v.flatten(0, 1), places.slots)

    def _attend(
        self,
        step: Step,
        sinks: Tensor | None,
        rotary: Rotary | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        places = step.places_in(self.capacity, self.window)
        view, attention = self._view(places), self.attention
        query = None if rotary is None else q
        turned = attention.append(view, k, v, places.slots, query=query, rotary=rotary)
        packed = q if turned is None else turned
        shape = (self.batch_size, step.num_columns, *q.shape[1:])
        # A few tokens for each sequence are decoded: their queries stay as they are.
        if step.real is None and step.num_columns <= MAX_QUERY_TOKENS:
            q = packed.view(shape)
            return attention.decode(q, view, sinks=sinks, plan=self._plan(q, view, step))
        if step.real is not None:
            packed = packed[step.real]
        # An upper bound that is known without asking the device.
        room = min(self.capacity, self.num_seen) if self.max_length is None else self.capacity
        out = attention.prefill(
            *(packed, view, step.cu_seqlens, step.num_columns),
            sinks=sinks,
            num_cached_tokens=self.batch_size * room,
        )
        if step.real is not None:
            out = out.new_zeros(q.shape).index_copy_(0, step.real, out)
        return out.view(shape)

    def _view(self, places: Places) -> PagedView:
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and self._checked is not None:
            return self._checked.for_batch(places.page_table, places.lengths)
        assert self.key_pages is not None and self.value_pages is not None
        view = PagedView(
            self.key_pages,
            self.value_pages,
            self.key_scale,
            self.value_scale,
            places.page_table,
            places.lengths,
        )
        if not is_compiling:  # its tensors would be those of a graph
            self._checked = view
        return view

    def _plan(self, q: Tensor, view: PagedView, step: Step) -> DecodePlan | None:
        """The plan of a decode step on a GPU, made once for all layers alike."""
        if not q.is_cuda:
            return None
        plan = step.plans.get(self._plan_key)
        if plan is None:
            plan = step.plans[self._plan_key] = ops.plan_decode(
                *(view, self.attention.spec),
                num_heads=q.shape[2],
                q_len=q.shape[1],
                dtype=q.dtype,
                impl=self.attention.impl,
            )
        return plan

    def get_seq_length(self) -> int:
        """How many columns the layer has seen, padding included."""
        if self.max_length is None or not self.is_initialized:
            return self.num_seen
        return self.sequences.num_columns  # type: ignore[return-value]  # as StaticLayer does

    def get_max_length(self) -> int:
        """How many columns there is room for; −1 if that grows."""
        return -1 if self.max_length is None else self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask, all columns: our attention takes what it needs."""
        if self.max_length is not None:
            return self.max_length, 0
        return self.num_seen + query_length, 0

    def reset(self) -> None:
        """Forget all tokens; the pages stay."""
        self.num_seen = 0
        if self.is_first and self.sequences.lengths is not None:
            assert self.sequences.num_columns is not None
            self.sequences.lengths.zero_()
            self.sequences.num_columns.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last −tokens_to_remove columns, without padding; if positive, keep so many."""
        if not self.is_initialized or tokens_to_remove == 0:
            return
        if self.max_length is not None:
            raise UnsupportedError("expected a dynamic cache to crop, got a static one")
        num = -tokens_to_remove if tokens_to_remove < 0 else self.num_seen - tokens_to_remove
        if num <= 0:
            return
        room = self.capacity - (self.window or 0) - PAGE_SIZE
        if self.window is not None and self.num_seen > self.capacity and num > room:
            raise CapacityError(
                f"expected at most {room} tokens to remove, as a window keeps so many, got {num}"
            )
        self.num_seen -= num
        if self.is_first:
            assert self.sequences.lengths is not None
            self.sequences.lengths.sub_(num).clamp_(min=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences with these indices, or where this mask is True."""
        self.reorder_cache(torch.arange(self.batch_size, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every sequence `repeats` times."""
        if self.is_initialized:
            index = torch.arange(self.batch_size, device=self.device)
            self.reorder_cache(index.repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i be what sequence beam_idx[i] was."""
        if not self.is_initialized:
            return
        index, self._checked = beam_idx.to(self.device), None
        for name in self._stored:
            setattr(self, name, self._selected(getattr(self, name), index))
        self.batch_size = len(index)
        if self.is_first:
            self.sequences.select(index)

    def _selected(self, x: Tensor, index: Tensor) -> Tensor:
        chosen = self._by_sequence(x).index_select(0, index).flatten(0, 1).view(x.dtype)
        if self.max_length is not None and chosen.shape == x.shape:
            _bits(x).copy_(_bits(chosen))  # a compiled step knows where the pages are
            return x
        return chosen

    def offload(self) -> None:
        """Pages stay on the device: octavo makes the cache small instead."""
        raise UnsupportedError("expected a cache on the device, got one that is offloaded")

    prefetch = offload


def _bits(x: Tensor) -> Tensor:
    """FP8 as bytes: torch has no indexed writes for it on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
