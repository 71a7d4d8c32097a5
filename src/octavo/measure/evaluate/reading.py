"""Texts read in chunks through the KV cache, and what a model loses on them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.integrations.transformers.decoder import counts_on_host, make_static_cache
from octavo.ops.plan_decode import MAX_QUERY_TOKENS

# Logits of so many tokens become losses at a time: their softmax needs a copy.
LOSS_ROWS = 128
# Passes before the one that a CUDA graph holds: the first fills the cache, the next compiles.
NUM_WARMUPS = 3

DEFAULT_CHUNK = 512

Count = Literal["later", "all", "last"]
Step = Callable[[int], None]  # told how many tokens are done


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a text is read: in chunks that go through the cache, and which predictions count.

    chunk: tokens of one pass; the first one of a window fills the cache, and all later ones attend
    to what it holds. Up to 4 are decoded, their queries as they are; more are a prefill, whose
    queries an e4m3 cache quantizes as well. count: "later" leaves out what the first chunk
    predicts, "all" counts every prediction, "last" those of the last chunk alone. batch: windows
    that are read side by side.
    """

    chunk: int = DEFAULT_CHUNK
    count: Count = "later"
    batch: int = 1

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ConfigError(f"expected a chunk of one token or more, got {self.chunk}")
        if self.batch < 1:
            raise ConfigError(f"expected a batch of one window or more, got {self.batch}")
        if self.count not in get_args(Count):
            expected = ", ".join(get_args(Count))
            raise ConfigError(f"expected count to be one of {expected}, got {self.count!r}")

    def check(self, context: int) -> None:
        """ConfigError unless a window of this many tokens has predictions that count."""
        if context < 2 or not any(self._counted(chunk, context) for chunk in self.chunks(context)):
            raise ConfigError(
                f"a chunk of {self.chunk} tokens leaves no predictions to count ({self.count}) in "
                f"a context of {context}: use a smaller chunk, a longer context, or count all"
            )

    def chunks(self, context: int) -> list[range]:
        """The tokens of each pass over a window; the last one predicts nothing, and is not read."""
        num_read = context - 1
        starts = range(0, num_read, self.chunk)
        return [range(start, min(start + self.chunk, num_read)) for start in starts]

    def _counted(self, chunk: range, context: int) -> bool:
        match self.count:
            case "all":
                return True
            case "later":
                return chunk.start > 0
        return chunk.stop == context - 1

    def passes(self, context: int) -> Iterator[tuple[range, bool]]:
        """The chunks of a window, and whether their predictions count."""
        for chunk in self.chunks(context):
            yield chunk, self._counted(chunk, context)


def window_losses(
    model: Any, windows: Sequence[Tensor], reading: Reading, on_step: Step = lambda n: None
) -> list[float]:
    """The mean negative log-likelihood of each window's counted tokens, in nats.

    Token t + 1 is predicted by the pass that reads token t, from the cache of all before.
    """
    losses: list[float] = []
    for start in range(0, len(windows), reading.batch):
        batch = torch.stack(list(windows[start : start + reading.batch]))
        losses += _batch_losses(model, batch, reading, on_step)
    return losses


@torch.inference_mode()
def _batch_losses(model: Any, windows: Tensor, reading: Reading, on_step: Step) -> list[float]:
    """The losses of windows [batch, context], read side by side."""
    batch, context = windows.shape
    reading.check(context)
    tokens = windows.to(next(model.parameters()).device)
    # Short passes take as long as their launches: on a GPU all but the first are one graph.
    is_graph = tokens.is_cuda and reading.chunk <= MAX_QUERY_TOKENS
    reader = _Replays(model, batch, context, reading.chunk) if is_graph else _Passes(model)
    totals = torch.zeros(batch, dtype=torch.float64, device=tokens.device)
    num_counted = 0
    for chunk, is_counted in reading.passes(context):
        logits = reader.read(tokens[:, chunk.start : chunk.stop], chunk.start, is_counted)
        if is_counted:
            totals += _losses(logits, tokens[:, chunk.start + 1 : chunk.stop + 1])
            num_counted += len(chunk)
        on_step(batch * len(chunk))
    return [total / num_counted for total in totals.tolist()]


class _Passes:
    """A model that reads chunk after chunk, and its cache, which it makes itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None

    def read(self, ids: Tensor, start: int, is_counted: bool) -> Tensor:
        """Logits of the next tokens [batch, chunk, vocab]; of the last alone if none counts."""
        result = self.model(
            input_ids=ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0 if is_counted else 1,
        )
        self.cache = result.past_key_values
        logits: Tensor = result.logits
        return logits


class _Replays:
    """A model that reads chunk after chunk by a CUDA graph, into a cache that never moves."""

    def __init__(self, model: Any, batch: int, context: int, chunk: int) -> None:
        self.model = model
        self.cache = make_static_cache(model, context)
        device = next(model.parameters()).device
        self.ids = torch.zeros(batch, chunk, dtype=torch.int64, device=device)
        self.positions = torch.zeros(1, chunk, dtype=torch.int64, device=device)
        self.graph: Any = None
        self.logits: Tensor | None = None
        self.num_passes = 0

    def read(self, ids: Tensor, start: int, is_counted: bool) -> Tensor:
        """Logits of the next tokens [batch, chunk, vocab], good until the next call."""
        self.num_passes += 1
        stop = start + ids.shape[1]
        positions = torch.arange(start, stop, device=ids.device)[None]
        is_short = self.num_passes <= NUM_WARMUPS or ids.shape != self.ids.shape
        if is_short or counts_on_host(self.cache):
            return self._call(ids, positions)
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._call(self.ids, self.positions)
            self.graph = graph
        self.graph.replay()
        assert self.logits is not None
        return self.logits

    def _call(self, ids: Tensor, positions: Tensor) -> Tensor:
        result = self.model(
            input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        logits: Tensor = result.logits
        return logits


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The sums of the negative log-likelihoods of each text, in float32, added up in float64."""
    rows, wanted = logits.flatten(0, 1).split(LOSS_ROWS), targets.flatten().split(LOSS_ROWS)
    losses = [
        torch.nn.functional.cross_entropy(some.float(), own, reduction="none")
        for some, own in zip(rows, wanted, strict=True)
    ]
    return torch.cat(losses).double().view(targets.shape).sum(1)
