"""Steps as CUDA graphs: those that decode, and those with tokens of prompts.

A graph has one shape, steps have many: a step is padded to the next shape that has a graph. Padding
writes no key and is no part of any sequence. All graphs read the same tensors, so a step is told to
one by writing to them: lengths, page tables and where sequences begin lie on the device alone.
"""

import logging
import operator
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.errors import UnsupportedError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.layers.saturation import WATCH
from octavo.numerics.formats import E4M3
from octavo.serving.engine.scheduler import Batch
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.engine.step import (
    ALIGNMENT,
    Group,
    Step,
    page_table,
    token_numbers,
    upload,
)

logger = logging.getLogger(__name__)

# Sequences of a step that only decodes, and tokens of one with prompts: from there on a GPU takes
# longer for a step than the host does to launch its kernels.
LARGEST_BATCH, LARGEST_STEP = 256, 4096
# Kernels of prompts and of decoding launch programs for all sequences that a graph has room for.
# Most steps have few, so each number of tokens has two graphs.
FEW_SINGLE, FEW_PROMPTS = 32, 8
# Cached tokens that a step's prompts may see together: of more, attention takes a GPU longer than
# the host. Their keys and values are gathered, one layer after the other.
MAX_ROOM, MAX_ROOM_BYTES = 2**16, 2**28
# Before a capture: kernels are compiled, libraries get their memory.
NUM_WARMUPS = 2


class Shape(NamedTuple):
    """What a graph has room for.

    num_single, num_prompts: sequences with one token, and with more. num_logits: those that sample.
    """

    num_tokens: int
    num_single: int
    num_prompts: int
    num_logits: int

    def __str__(self) -> str:
        kind = f"a step of {self.num_tokens} tokens"
        return f"{kind}, {self.num_prompts} prompts" if self.num_prompts else kind


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The batch sizes with graphs, for steps of up to max_batch sequences: close enough to waste
    little, and few, since each takes a moment and some memory.
    """
    largest = min(max_batch, LARGEST_BATCH)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, LARGEST_BATCH + 1, 32)]
    return (*(size for size in sizes if size < largest), largest)


def token_counts(max_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens with graphs, for steps with prompts of up to max_tokens."""
    largest = min(max_tokens, LARGEST_STEP)
    halves = [16, 32, 64, 128, 256, 512]
    counts = sorted([*halves, *(n * 3 // 2 for n in halves), *range(1024, LARGEST_STEP, 256)])
    return (*(count for count in counts if count < largest), largest)


def choose_shapes(max_batch: int, max_tokens: int) -> tuple[Shape, ...]:
    """The shapes of graphs, the smallest first: of steps that only decode, and of those that do
    more.
    """
    shapes = {Shape(size, size, 0, size) for size in batch_sizes(max_batch)}
    for count in token_counts(max_tokens):
        for most_single, most_prompts in ((FEW_SINGLE, FEW_PROMPTS), (max_batch, max_batch)):
            single = min(count, max_batch, most_single)
            prompts = min(max(1, count // 2), max_batch, most_prompts)
            num_logits = min(count, max_batch, single + prompts)
            shapes.add(Shape(count, single, prompts, num_logits))
    return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_prompts, shape)))


def choose_room(model: EngineModel, spec: CacheSpec, num_pages: int | None = None) -> int:
    """The cached tokens that a graph's prompts may see together; at most those of all pages."""
    room = min(MAX_ROOM, MAX_ROOM_BYTES // _gathered_bytes(model, spec))
    return room if num_pages is None else min(room, num_pages * spec.page_size)


def memory_of_graphs(model: EngineModel, spec: CacheSpec, pass_bytes: int) -> int:
    """Bytes that graphs take, if the largest pass takes so many: they share one pass's memory.

    What runs without a graph has memory of its own, beside it.
    """
    return pass_bytes + choose_room(model, spec) * _gathered_bytes(model, spec)


def _gathered_bytes(model: EngineModel, spec: CacheSpec) -> int:
    """Bytes of a token's gathered key and value: FP8 beside FP8 queries, else of the model's."""
    is_fp8 = all(layer.dtype == E4M3.dtype for layer in model.attention)
    return 2 * spec.num_kv_heads * spec.head_dim * (1 if is_fp8 else model.dtype.itemsize)


class StepGraphs:
    """Steps of a model over its pages, each by the graph of its shape.

    A graph is captured when a step first needs it, or by `capture`. `find` says which steps have
    one. They share their memory: a step's logits are copied out of it.
    """

    def __init__(self, model: EngineModel, storage: PagedStorage, settings: EngineSettings) -> None:
        most = settings.max_num_seqs
        self.shapes = choose_shapes(most, settings.max_num_batched_tokens)
        self.room = choose_room(model, storage.spec, storage.num_pages)
        self.num_replays = 0
        self._model, self._storage = model, storage
        self._captured: dict[Shape, Callable[[], Any]] = {}
        self._pool: Any = None
        assert settings.max_context is not None
        width = -(-storage.spec.num_pages_for(settings.max_context) // ALIGNMENT) * ALIGNMENT
        options: dict[str, Any] = {"dtype": torch.int32, "device": storage.device}
        size = max(sum(_sizes(shape)) for shape in self.shapes)
        self._numbers = torch.zeros(size, **options)
        _, num_single, num_prompts, self._num_logits = map(max, zip(*self.shapes, strict=True))
        # A row for each sequence, behind one for all that decode: see Step.
        self._single_table = torch.zeros(num_single, width, **options)
        self._prompt_table = torch.zeros(1 + num_prompts, width, **options)
        self._logits: Tensor | None = None

    def find(self, batch: Batch) -> Shape | None:
        """The smallest shape that has room for a step; None if it must run without a graph.

        So does a step with tokens of images, as the tower's results come from outside; one whose
        prompts see more than there is room for, which takes the GPU longer than the host anyway;
        one larger than any shape; and one to be padded where the model would notice.
        """
        num_single, num_sampled = batch.num_single, len(batch.sampled)
        prompts = batch.chunks[num_single:]
        if any(chunk.has_images for chunk in batch.chunks):
            return None
        if prompts and sum(chunk.stop for chunk in prompts) > self.room:
            return None
        return self._smallest(batch.num_tokens, num_single, len(prompts), num_sampled)

    def can_decode(self, num_sequences: int) -> bool:
        """Whether the graph of a step in which so many sequences decode was captured."""
        return self._smallest(num_sequences, num_sequences, 0, num_sequences) in self._captured

    def _smallest(self, *sizes: int) -> Shape | None:
        """The smallest shape with room for these sizes."""
        for shape in self.shapes:
            if all(map(operator.ge, shape, sizes)):
                return shape if shape == sizes or not self._model.sees_padding else None
        return None

    def run(self, batch: Batch, shape: Shape, tokens: Tensor | None = None) -> Tensor:
        """Logits [sampled sequences, vocab], good until the next step.

        shape: as `find` says. tokens: int64 [sequences] on the device, of a step that only decodes,
        if the host does not know them yet.
        """
        self.capture(shape)
        self._write(batch, shape, is_known=tokens is None)
        if tokens is not None:
            self._numbers[: len(tokens)].copy_(tokens)
        self._model.look()
        self._captured[shape]()
        self.num_replays += 1
        assert self._logits is not None  # as something was captured
        return self._logits[: len(batch.sampled)]

    @property
    def usual_shapes(self) -> list[Shape]:
        """Those to capture before they are needed, the largest first: the others fit its memory."""
        return [shape for shape in reversed(self.shapes) if shape.num_prompts <= FEW_PROMPTS]

    def give_up(self, shape: Shape) -> bool:
        """Forget all graphs of the same kind: of steps that only decode, or of those with prompts.

        Returns whether there were any left.
        """
        left = [one for one in self.shapes if bool(one.num_prompts) != bool(shape.num_prompts)]
        is_new, self.shapes = len(left) < len(self.shapes), tuple(left)
        return is_new

    def capture(self, shape: Shape) -> None:
        """Capture the graph of a shape, unless it is or was given up."""
        if shape in self._captured or shape not in self.shapes:
            return
        began = time.perf_counter()
        # A step of padding: warming up writes no key, and nothing in the tables is wrong.
        self._write(Batch(()), shape)
        with WATCH.paused():
            self._captured[shape] = self._capture(shape)
        logger.info("captured %s in %.1f s", shape, time.perf_counter() - began)

    def _write(self, batch: Batch, shape: Shape, *, is_known: bool = True) -> None:
        """Tell a step to the graph of a shape: in one copy to the device, without waiting for it.

        is_known: whether the sequences have the tokens of the step.
        """
        page_size, device = self._storage.spec.page_size, self._storage.device
        single, prompts = batch.chunks[: batch.num_single], batch.chunks[batch.num_single :]
        ids, positions, slots, rows = token_numbers(batch, page_size, is_known=is_known)
        # Sequences that decode are one without keys to the kernel of prompts.
        ends = [0, len(single)]
        for chunk in prompts:
            ends.append(ends[-1] + chunk.num_tokens)
        lengths = [chunk.stop for chunk in single]
        prompt_lengths = [0, *(chunk.stop for chunk in prompts)]
        numbers = array("i")
        numbers_of = (ids, positions, slots, rows, lengths, prompt_lengths, ends)
        fills = (0, 0, -1, 0, 1, 0, ends[-1])
        for values, fill, size in zip(numbers_of, fills, _sizes(shape), strict=True):
            numbers.extend(values)
            numbers.extend(array("i", [fill]) * (size - len(values)))
        tables = [page_table(chunks, page_size) for chunks in (single, prompts)]
        parts = upload([numbers, *tables], device)
        self._numbers[: len(numbers)].copy_(parts[0])
        _copy_rows(parts[1], self._single_table, len(single))
        _copy_rows(parts[2], self._prompt_table[1:], len(prompts))

    def _compute(self, shape: Shape) -> None:
        """Put the logits of a step of this shape, as `_write` has told it, in their place."""
        sizes = _sizes(shape)
        parts = self._numbers[: sum(sizes)].split(sizes)
        ids, positions, slots, rows, lengths, prompt_lengths, ends = parts
        num_tokens, num_single, num_prompts, num_logits = shape
        # Without prompts there is no sequence for those that decode, either.
        num_multi = 1 + num_prompts if num_prompts else 0
        step = Step(
            storage=self._storage,
            ids=ids[:num_tokens].long(),
            positions=positions[:num_tokens].long(),
            slots=slots[:num_tokens].long(),
            rows=rows[:num_logits].long(),
            single=Group(self._single_table[:num_single], lengths[:num_single]),
            multi=Group(self._prompt_table[:num_multi], prompt_lengths[:num_multi]),
            cu_seqlens=ends[: 1 + num_multi],
            max_seqlen=num_tokens,
            num_cached_tokens=self.room,
            is_padded=num_prompts > 0,
        )
        logits = self._model.forward(step.ids, step.positions, step.rows, step)
        if self._logits is None:
            self._logits = logits.new_empty(self._num_logits, logits.shape[-1])
        self._logits[: len(logits)].copy_(logits)

    def _capture(self, shape: Shape) -> Callable[[], Any]:
        """What replays the graph of a shape."""
        stream = torch.cuda.Stream(self._storage.device)
        stream.wait_stream(torch.cuda.current_stream(self._storage.device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARMUPS):
                self._compute(shape)
        torch.cuda.current_stream(self._storage.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._compute(shape)
        except RuntimeError as error:
            raise UnsupportedError(
                f"expected a model of which a CUDA graph can hold {shape}, got an error in its "
                f"capture: {error}. Run it without graphs: EngineSettings(cuda_graphs=False), or "
                "--enforce-eager"
            ) from error
        self._pool = graph.pool()
        return graph.replay


def _sizes(shape: Shape) -> list[int]:
    """Places for ids, positions, slots, rows of logits, lengths of those that decode, lengths of
    prompts and where those begin; each part starts aligned.
    """
    num_tokens, num_single, num_prompts, num_logits = shape
    sizes = (*[num_tokens] * 3, num_logits, num_single, 1 + num_prompts, 2 + num_prompts)
    return [_aligned(size) for size in sizes]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _copy_rows(part: Tensor, table: Tensor, num_rows: int) -> None:
    """Copy the pages of so many sequences into the first rows of a table."""
    if num_rows:
        rows = part.view(num_rows, -1)
        width = min(rows.shape[1], table.shape[1])
        table[:num_rows, :width].copy_(rows[:, :width])
