"""Steps in which every sequence decodes one token, as CUDA graphs.

A graph has one batch size, steps have many: a step is padded to the next size that has a graph. A
row of padding attends to one token of whatever page its table names and writes none; nobody reads
its logits. All graphs read the same tensors, so a step is told to one by writing to them.
"""

import logging
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.cache.storage import PagedStorage
from octavo.errors import UnsupportedError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.serving.engine.scheduler import Batch
from octavo.serving.engine.step import Group, Step, page_table, upload

logger = logging.getLogger(__name__)

LARGEST = 256
# Before a capture: kernels are compiled, libraries get their memory.
NUM_WARMUPS = 2


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The batch sizes with graphs, for steps of up to max_batch sequences: close enough to waste
    little, and few, since each takes a moment and some memory.
    """
    largest = min(max_batch, LARGEST)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, LARGEST + 1, 32)]
    return (*(size for size in sizes if size < largest), largest)


class DecodeGraphs:
    """Decode steps of a model over its pages, each by the graph of its size.

    A graph is captured when a step first needs it. Larger steps than any graph's, and those that
    do more than decode, are not for here (`fits`).
    """

    def __init__(
        self, model: EngineModel, storage: PagedStorage, *, max_batch: int, max_context: int
    ) -> None:
        self.sizes = batch_sizes(max_batch)
        self.num_replays = 0
        self._model, self._storage = model, storage
        self._captured: dict[int, tuple[Callable[[], Any], Tensor]] = {}
        self._pool: Any = None
        width = -(-storage.spec.num_pages_for(max_context) // 4) * 4
        options: dict[str, Any] = {"dtype": torch.int32, "device": storage.device}
        # Ids, positions, slots and lengths; then the pages of each sequence.
        self._numbers = torch.zeros(4, self.sizes[-1], **options)
        self._table = torch.zeros(self.sizes[-1], width, **options)

    def fits(self, batch: Batch) -> bool:
        """Whether all that a step does is to decode, for no more sequences than a graph has."""
        is_short = batch.num_single == len(batch.chunks) <= self.sizes[-1]
        return is_short and not any(chunk.has_images for chunk in batch.chunks)

    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Logits [sampled sequences, vocab], good until the next step.

        tokens: int64 [sequences] on the device, if the host does not know them yet.
        """
        num_rows = len(batch.chunks)
        size = next(size for size in self.sizes if size >= num_rows)
        self._write(batch, size, is_known=tokens is None)
        if tokens is not None:
            self._numbers[0, :num_rows].copy_(tokens)
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        replay, logits = self._captured[size]
        self._model.look()
        replay()
        self.num_replays += 1
        if all(chunk.samples for chunk in batch.chunks):
            return logits[:num_rows]
        rows = [row for row, chunk in enumerate(batch.chunks) if chunk.samples]
        return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]

    def warm_up(self, progress: Callable[[list[int]], Iterable[int]] = iter) -> None:
        """Capture all graphs, the largest first: the others then fit its memory."""
        missing = [size for size in reversed(self.sizes) if size not in self._captured]
        for size in progress(missing):
            self._write(Batch(()), size)
            self._captured[size] = self._capture(size)

    def _write(self, batch: Batch, size: int, *, is_known: bool = True) -> None:
        """Tell a step to the graphs: in one copy to the device, without waiting for it.

        is_known: whether the sequences have the tokens of the step.
        """
        page_size, chunks = self._storage.spec.page_size, batch.chunks
        padding = size - len(chunks)
        ids, positions, slots, lengths = (array("i") for _ in range(4))
        for chunk in chunks:
            page, place = divmod(chunk.start, page_size)
            ids.append(chunk.sequence.tokens[chunk.start] if is_known else 0)
            positions.append(chunk.position)
            slots.append(chunk.sequence.pages[page] * page_size + place)
            lengths.append(chunk.stop)
        numbers = array("i")
        for values, fill in ((ids, 0), (positions, 0), (slots, -1), (lengths, 1)):
            numbers += values + array("i", [fill]) * padding
        parts = upload([numbers, page_table(chunks, page_size)], self._storage.device)
        self._numbers[:, :size].copy_(parts[0].view(4, size))
        if chunks:
            table = parts[1].view(len(chunks), -1)
            width = min(table.shape[1], self._table.shape[1])
            self._table[: len(chunks), :width].copy_(table[:, :width])

    def _compute(self, size: int) -> Tensor:
        """The logits of a step of this size that reads what `_write` has written."""
        ids, positions, slots, lengths = self._numbers[:, :size]
        nothing = self._numbers[0, :0]
        step = Step(
            storage=self._storage,
            ids=ids.long(),
            positions=positions.long(),
            slots=slots.long(),
            rows=torch.arange(size, device=ids.device),
            single=Group(self._table[:size], lengths),
            multi=Group(nothing.view(0, 1), nothing),
            cu_seqlens=self._numbers[0, :1],
            max_seqlen=0,
            num_cached_tokens=0,
        )
        return self._model.forward(step.ids, step.positions, step.rows, step)

    def _capture(self, size: int) -> tuple[Callable[[], Any], Tensor]:
        """The graph of a size: what replays it, and the logits that it then has."""
        # A row that decodes nothing: warming up writes no key, and nothing in the tables is wrong.
        numbers = self._numbers.clone()
        self._numbers.zero_()
        self._numbers[2] = -1
        self._numbers[3] = 1
        stream = torch.cuda.Stream(self._storage.device)
        stream.wait_stream(torch.cuda.current_stream(self._storage.device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARMUPS):
                self._compute(size)
        torch.cuda.current_stream(self._storage.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._compute(size)
        except RuntimeError as error:
            raise UnsupportedError(
                f"expected a model whose decode step a CUDA graph can hold, got an error in its "
                f"capture: {error}. Run it without graphs: EngineSettings(cuda_graphs=False), or "
                "--enforce-eager"
            ) from error
        finally:
            self._numbers.copy_(numbers)
        self._pool = graph.pool()
        logger.debug("captured the decode step of %d sequences", size)
        return graph.replay, logits
