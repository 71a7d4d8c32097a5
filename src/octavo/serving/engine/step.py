"""Step: what all layers share in one forward pass over the chunks of a batch."""

from array import array
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView
from octavo.layers.decoder_attention import DecoderAttention
from octavo.numerics.decode_plan import DecodePlan
from octavo.serving.engine.scheduler import Batch, Chunk

# Kernels see page tables of few different widths, and tables whose start is aligned (16 bytes).
MIN_WIDTH, ALIGNMENT = 4, 4


@dataclass(frozen=True)
class Group:
    """Sequences that attend alike: page_table [sequences, pages] and lengths, int32."""

    page_table: Tensor
    lengths: Tensor

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        return len(self.lengths)


# Not frozen: of one that is, the compiler looks into every tensor, and makes a graph for each kind.
@dataclass(eq=False)
class Step:
    """A packed pass over the pages, shared by all layers.

    single: sequences with one new token, which come first and are decoded. multi: those with more,
    whose tokens begin at cu_seqlens [sequences + 1], the longest at most max_seqlen. slots: where
    each token's key and value go. positions: one number for each token, also where images give it
    three: those are in an ImagePass beside the step. num_cached_tokens: the sum of multi's lengths.
    """

    storage: PagedStorage
    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    single: Group
    multi: Group
    cu_seqlens: Tensor
    max_seqlen: int
    num_cached_tokens: int
    plans: dict[object, DecodePlan] = field(default_factory=dict)

    def attend(
        self,
        attention: DecoderAttention,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store k and v of a layer in their pages, and attend with q to all that is stored."""
        num_single, parts = self.single.num_sequences, []
        view = self._view(layer, self.single if num_single else self.multi)
        attention.append(view, k, v, self.slots)
        if num_single:
            own = q[:num_single, None]
            plan = self._plan(attention, own, view)
            parts.append(attention.decode(own, view, sinks=sinks, plan=plan)[:, 0])
        if self.multi.num_sequences:
            view = self._view(layer, self.multi) if num_single else view
            out = attention.prefill(
                *(q[num_single:], view, self.cu_seqlens, self.max_seqlen),
                sinks=sinks,
                num_cached_tokens=self.num_cached_tokens,
            )
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _view(self, layer: int, group: Group) -> PagedView:
        return self.storage.view(layer, group.page_table, group.lengths)

    def _plan(self, attention: DecoderAttention, q: Tensor, view: PagedView) -> DecodePlan | None:
        """The plan of a decode step on a GPU, made once for all layers alike."""
        if not q.is_cuda:
            return None
        key = (attention.spec, view.dtype, attention.num_heads)
        if key not in self.plans:
            self.plans[key] = ops.plan_decode(
                *(view, attention.spec),
                num_heads=attention.num_heads,
                dtype=q.dtype,
                impl=attention.impl,
            )
        return self.plans[key]


def make_step(batch: Batch, storage: PagedStorage) -> Step:
    """The tensors of a pass, brought to the device in one copy."""
    page_size = storage.spec.page_size
    single, multi = batch.chunks[: batch.num_single], batch.chunks[batch.num_single :]
    ids, positions, slots, rows = _tokens(batch, page_size)
    ends = [0]
    for chunk in multi:
        ends.append(ends[-1] + chunk.num_tokens)
    single_table, multi_table = page_table(single, page_size), page_table(multi, page_size)
    single_lengths, multi_lengths = ([chunk.stop for chunk in part] for part in (single, multi))
    parts = upload(
        [
            *(ids, positions, slots, rows, ends),
            *(single_table, single_lengths, multi_table, multi_lengths),
        ],
        storage.device,
    )
    return Step(
        storage=storage,
        ids=parts[0].long(),
        positions=parts[1].long(),
        slots=parts[2].long(),
        rows=parts[3].long(),
        single=Group(parts[5].view(len(single), -1 if single else 1), parts[6]),
        multi=Group(parts[7].view(len(multi), -1 if multi else 1), parts[8]),
        cu_seqlens=parts[4],
        max_seqlen=max((chunk.num_tokens for chunk in multi), default=0),
        num_cached_tokens=sum(multi_lengths),
    )


def _tokens(batch: Batch, page_size: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ids, positions and slots of all tokens, and the indices of those with logits."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    for chunk in batch.chunks:
        ids += chunk.sequence.tokens[chunk.start : chunk.stop]
        positions += range(chunk.position, chunk.position + chunk.num_tokens)
        for index in range(chunk.start // page_size, -(-chunk.stop // page_size)):
            first = index * page_size
            offset = chunk.sequence.pages[index] * page_size - first
            begin, end = max(chunk.start, first), min(chunk.stop, first + page_size)
            slots += range(begin + offset, end + offset)
        if chunk.samples:
            rows.append(len(ids) - 1)
    return ids, positions, slots, rows


def page_table(chunks: AnySequence[Chunk], page_size: int) -> "array[int]":
    """The pages of each chunk's sequence, rows of one width after each other."""
    counts = [-(-chunk.stop // page_size) for chunk in chunks]
    width = MIN_WIDTH
    while width < max(counts, default=0):
        width *= 2
    table, empty = array("i"), array("i", [0])
    for chunk, count in zip(chunks, counts, strict=True):
        table += chunk.sequence.pages[:count]
        table += empty * (width - count)
    return table


def upload(parts: AnySequence[AnySequence[int]], device: torch.device) -> list[Tensor]:
    """Numbers as int32 tensors on the device, in one copy without waiting for it."""
    numbers = array("i")
    places = []
    for part in parts:
        places.append((len(numbers), len(part)))
        numbers.extend(part)
        numbers.extend(array("i", [0]) * (-len(numbers) % ALIGNMENT))
    host = torch.frombuffer(numbers, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    together = host.to(device, non_blocking=True)
    return [together[start : start + length] for start, length in places]
