"""Which tokens the next forward pass computes, and in which pages: no tensors, no model.

Every request has a place in one line, by arrival. Those that run are the first in it, those that
wait come after them, so the order never depends on lengths or luck: who came first makes progress
in every step, and nobody starves.

A request gets pages for all tokens it has when it starts to run, and one more page at a time as it
grows. When there is none left, the last in the line of those that run gives its pages back and
waits again; what it has generated becomes part of its prompt, and is computed anew (or found, where
its pages are still there). Layers with a sliding window keep all of their tokens, too: one page
table serves every layer, and what a window does not see is not read.
"""

import time
from array import array
from collections import deque
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from octavo.cache.pages import ROOT_HASH, PageAllocator
from octavo.errors import CapacityError, ConfigError
from octavo.serving.engine.request import FinishReason, Request
from octavo.serving.engine.sequence import Sequence
from octavo.serving.engine.settings import EngineSettings


class Chunk(NamedTuple):
    """Tokens of one sequence that a forward pass computes.

    samples: whether its last token is among them, so that the next one follows from this pass.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def stop(self) -> int:
        """The place after the last token."""
        return self.start + self.num_tokens

    @property
    def has_images(self) -> bool:
        """Whether tokens of images, or between two of them, are among these."""
        return self.start < self.sequence.image_stop and self.stop > self.sequence.image_start

    @property
    def position(self) -> int:
        """The position of its first token, unless it `has_images`; the others follow."""
        is_after = self.start >= self.sequence.image_stop
        return self.start + (self.sequence.position_offset if is_after else 0)


@dataclass(frozen=True)
class Batch:
    """The chunks of one forward pass, those of one token first."""

    chunks: tuple[Chunk, ...]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @cached_property
    def num_single(self) -> int:
        """How many chunks have one token: they come first."""
        return sum(chunk.num_tokens == 1 for chunk in self.chunks)

    @cached_property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences that get a token, in order."""
        return tuple([chunk.sequence for chunk in self.chunks if chunk.samples])

    @property
    def open_chunks(self) -> tuple[Chunk, ...]:
        """Those of sequences that have not ended since the batch was made."""
        return tuple([chunk for chunk in self.chunks if chunk.sequence.state == "running"])


class Scheduler:
    """The line of requests, and the pages they hold.

    waiting, running: both by arrival, and all that run came before all that wait.
    """

    def __init__(self, allocator: PageAllocator, settings: EngineSettings) -> None:
        self.allocator, self.settings = allocator, settings
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = self.prompt_tokens = self.cached_tokens = 0
        self._open: dict[str, Sequence] = {}
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._open)

    @property
    def open_sequences(self) -> list[Sequence]:
        """All that run or wait, by arrival."""
        return [*self.running, *self.waiting]

    @property
    def max_context(self) -> int:
        """The most tokens of a prompt and its answer."""
        # The last token of an answer is never computed, and needs no place.
        most = self.allocator.num_pages * self.allocator.page_size + 1
        return most if self.settings.max_context is None else min(most, self.settings.max_context)

    def check(self, request: Request) -> None:
        """ConfigError for a request that can never run."""
        if request.request_id in self._open:
            raise ConfigError(f"expected a new request_id, got {request.request_id!r} again")
        num_prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
        if num_prompt + max_tokens > self.max_context:
            raise ConfigError(
                f"expected prompt and max_tokens within the context of {self.max_context} tokens, "
                f"got {num_prompt} + {max_tokens}: shorten the prompt or set max_tokens lower"
            )

    def add(self, request: Request, *, seed: int = 0) -> Sequence:
        """Put a request at the end of the line; CapacityError if that is full, else as `check`."""
        self.check(request)
        if len(self.waiting) >= self.settings.max_queue:
            raise CapacityError(
                f"expected room in the queue, got {len(self.waiting)} requests that wait "
                f"(max_queue {self.settings.max_queue}): retry later"
            )
        sequence = Sequence(request, self._num_arrived, seed=seed)
        self._num_arrived += 1
        self._open[request.request_id] = sequence
        self.waiting.append(sequence)
        return sequence

    def abort(self, request_id: str) -> Sequence | None:
        """Take a request out of the line; None if it is not in it."""
        sequence = self._open.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out of the line, and free its pages."""
        line = self.running if sequence.state == "running" else self.waiting
        line.remove(sequence)
        del self._open[sequence.request_id]
        self._release(sequence)
        sequence.state, sequence.finish_reason = "finished", reason

    def schedule(self) -> Batch:
        """The next forward pass: a token for all that decode, then chunks of prompts, by arrival.

        Call `advance` with what came of it before the next one.
        """
        was_preempted = self._grow()
        budget = self.settings.max_num_batched_tokens
        single, multi, chunks = [], [], []
        for sequence in self.running:
            start = sequence.num_computed
            num_uncomputed = len(sequence.tokens) - start
            if num_uncomputed == 1:
                single.append(Chunk(sequence, start, 1, True))
            elif num_uncomputed > 1:
                multi.append(sequence)
        budget -= len(single)
        for sequence in multi:
            if budget > 0:
                chunks.append(_chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        # What a preempted sequence gave back is for those before it.
        while budget > 0 and not was_preempted and (admitted := self._admit()) is not None:
            chunks.append(_chunk(admitted, budget))
            budget -= chunks[-1].num_tokens
        # A prompt's last token may be alone in its chunk.
        single += [chunk for chunk in chunks if chunk.num_tokens == 1]
        return Batch((*single, *(chunk for chunk in chunks if chunk.num_tokens > 1)))

    def schedule_ahead(self, batch: Batch) -> Batch | None:
        """The pass after one that only decodes, before anybody knows its tokens.

        None where it depends on them, or on who waits: where a request ends by its length, or has
        ended, where one may be let in, and where pages are short. An answer may still end with the
        token that is not known: what this pass computes of it is then for nobody.
        """
        has_room = bool(self.waiting) and not self._is_full
        if has_room or len(batch.chunks) != len(self.running):
            return None
        for sequence, _, num_tokens, samples in batch.chunks:
            max_tokens = sequence.request.sampling.max_tokens
            is_going_on = samples and num_tokens == 1 and sequence.state == "running"
            if not is_going_on or sequence.num_output_tokens + 2 > max_tokens:
                return None
        size = self.allocator.page_size
        # The place of a token is where the pass before it stops.
        short = [c.sequence for c in batch.chunks if c.stop >= len(c.sequence.pages) * size]
        if len(short) > self.allocator.num_free:
            return None
        for sequence, page in zip(short, self.allocator.allocate(len(short)), strict=True):
            sequence.pages.append(page)
        return Batch(tuple([Chunk(c.sequence, c.stop, 1, True) for c in batch.chunks]))

    def advance(self, batch: Batch, tokens: AnySequence[int | None]) -> None:
        """Note that a pass was computed.

        tokens: the next one of each sequence that it sampled; None for one that gets none, and must
        be finished.
        """
        sampled = batch.sampled
        if len(tokens) != len(sampled):
            raise ConfigError(f"expected {len(sampled)} tokens, got {len(tokens)}")
        size = self.allocator.page_size
        for sequence, start, num_tokens, _ in batch.chunks:
            sequence.num_computed = start + num_tokens
            if sequence.num_computed >= (sequence.num_published + 1) * size:
                self._publish(sequence)
        for sequence, token in zip(sampled, tokens, strict=True):
            if token is not None:
                sequence.append(token)

    def check_invariants(self) -> None:
        """Assert that the line is in order and that pages and sequences agree."""
        self.allocator.check_invariants()
        arrivals = [s.arrival for s in self.open_sequences]
        assert arrivals == sorted(arrivals)
        assert {s.request_id: s for s in self.open_sequences} == self._open
        assert all(not s.pages and s.num_computed == 0 for s in self.waiting)
        assert len(self.running) <= self.settings.max_num_seqs
        held = [page for s in self.running for page in s.pages]
        for page in set(held):
            assert self.allocator.num_references(page) == held.count(page)
        assert self.allocator.num_in_use == len(set(held))
        for s in self.running:
            assert s.num_computed <= len(s.pages) * self.allocator.page_size

    def _grow(self) -> bool:
        """Give those that run a page where they need one, first come first served.

        Returns whether somebody later in the line had to give up pages for it.
        """
        was_preempted = False
        size = self.allocator.page_size
        # First those that need one, few of many: the loop below changes `running`.
        short = [s for s in self.running if len(s.tokens) > len(s.pages) * size]
        for sequence in short:
            missing = self._num_pages(sequence.num_tokens) - len(sequence.pages)
            # Its own pages count as well: the last in the line preempts itself.
            while sequence.state == "running" and self.allocator.num_free < missing:
                self._preempt(self.running[-1])
                was_preempted = True
            if sequence.state == "running":
                sequence.pages.extend(self.allocator.allocate(missing))
        return was_preempted

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = "waiting"
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    @property
    def _is_full(self) -> bool:
        """Whether nobody can be let in, whoever it is."""
        return len(self.running) >= self.settings.max_num_seqs or not self._has_pages(1)

    def _has_pages(self, num_pages: int) -> bool:
        """Whether a newcomer can have so many pages, and leaves one for each that may need one."""
        left, size = self.allocator.num_free - num_pages, self.allocator.page_size
        if left < 0 or left >= len(self.running):
            return left >= 0
        return left >= sum(len(s.pages) * size < s.max_computed for s in self.running)

    def _admit(self) -> Sequence | None:
        """Let the first that waits run, if there is room for it; None if not."""
        if not self.waiting or self._is_full:
            return None
        sequence = self.waiting[0]
        matched = self._match(sequence)
        missing = self._num_pages(sequence.num_tokens) - len(matched)
        if not self._has_pages(missing):
            self.allocator.free(matched)
            return None
        self.waiting.popleft()
        sequence.pages = array("i", matched + self.allocator.allocate(missing))
        sequence.num_computed = len(matched) * self.allocator.page_size
        sequence.num_published = len(matched)
        sequence.state = "running"
        self.running.append(sequence)
        if sequence.num_cached is None:
            sequence.begun_s = time.perf_counter()
            sequence.num_cached = sequence.num_computed
            self.prompt_tokens += len(sequence.request.prompt)
            self.cached_tokens += sequence.num_cached
        return sequence

    def _match(self, sequence: Sequence) -> list[int]:
        """Known pages of its first tokens, now held; the last token is always computed."""
        if not self.settings.enable_prefix_caching:
            return []
        num_pages = (sequence.num_tokens - 1) // self.allocator.page_size
        return self.allocator.match_prefix(self._hashes(sequence, num_pages))

    def _publish(self, sequence: Sequence) -> None:
        """Make its full pages findable."""
        if not self.settings.enable_prefix_caching:
            return
        num_full = sequence.num_computed // self.allocator.page_size
        hashes = self._hashes(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self.allocator.publish(sequence.pages[index], hashes[index])
        sequence.num_published = num_full

    def _hashes(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        """The hashes of its first pages."""
        size = self.allocator.page_size
        for index in range(len(sequence.hashes), num_pages):
            start, stop = index * size, (index + 1) * size
            parent = sequence.hashes[-1] if sequence.hashes else ROOT_HASH
            tokens, salt = sequence.tokens[start:stop], sequence.salt(start, stop)
            sequence.hashes += self.allocator.page_hashes(tokens, salt, parent)
        return sequence.hashes[:num_pages]

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.pages)
        sequence.pages = array("i")
        sequence.num_computed = sequence.num_published = 0

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.page_size)


def _chunk(sequence: Sequence, budget: int) -> Chunk:
    num_tokens = min(sequence.num_uncomputed, budget)
    samples = num_tokens == sequence.num_uncomputed
    return Chunk(sequence, sequence.num_computed, num_tokens, samples)
