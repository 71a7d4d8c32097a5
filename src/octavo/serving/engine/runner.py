"""The model with its pages: forward passes, and the tokens drawn from their logits.

While the host makes deltas of a pass's tokens, schedules and writes tables, the device would wait.
So where all that runs only decodes, the next pass is queued at once: its tokens are on the device,
where they are drawn, and everything else about it is known. Only an answer that ends by its token
is a surprise: what the next pass computes of it is thrown away.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.errors import OctavoError, UnsupportedError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.numerics.granularity import PerToken
from octavo.serving.engine.decode_graphs import DecodeGraphs
from octavo.serving.engine.image_store import ImageStore
from octavo.serving.engine.request import GrammarFailure
from octavo.serving.engine.sampler import Draws, Reason, Sampled, Sampler, SamplerRow
from octavo.serving.engine.scheduler import Batch
from octavo.serving.engine.sequence import Sequence
from octavo.serving.engine.step import make_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass:
    """A forward pass that was begun.

    draws: its tokens, None if it samples none. reasons: why rows of it must end, whatever those
    are.
    """

    batch: Batch
    draws: Draws | None
    reasons: dict[int, Reason] = field(default_factory=dict)


class Runner:
    """A model with its pages.

    All passes are in inference mode, trials as well: compiled layers have a graph for each mode.

    images: its embeddings of images, None if it takes none.
    graphs: what runs steps that only decode, if `use_graphs` was called and a graph can hold them.
    """

    graphs: DecodeGraphs | None = None

    def __init__(
        self,
        model: EngineModel,
        spec: CacheSpec,
        num_pages: int,
        images: ImageStore | None = None,
    ) -> None:
        self.model, self.images = model, images
        self._needs_graphs = False
        self._sampler = Sampler(model.vocab_size, model.device, eos_tokens=sorted(model.eos_tokens))
        self.storage = PagedStorage(spec, num_pages, model.device)
        if isinstance(spec.granularity, PerToken):
            return
        for index, attention in enumerate(model.attention):
            if attention.dtype is not None:
                shape = spec.scale_shape(index, num_pages)
                scales = (attention.key_scale, attention.value_scale)
                self.storage.set_scales(index, *(scale.expand(shape) for scale in scales))

    def use_graphs(self, *, max_batch: int, max_context: int, is_required: bool) -> None:
        """Replay decode steps from CUDA graphs; where none can be, raise if they are required."""
        self._needs_graphs = is_required
        if self.model.device.type == "cuda":
            self.graphs = DecodeGraphs(
                self.model, self.storage, max_batch=max_batch, max_context=max_context
            )
        elif is_required:
            raise UnsupportedError(
                f"CUDA graphs need a CUDA GPU, got a model on {self.model.device}"
            )

    @torch.inference_mode()
    def capture_graphs(self, progress: Callable[[list[int]], Iterable[int]] = iter) -> None:
        """Capture the graphs of all batch sizes, if steps are replayed from them."""
        if self.graphs is None:
            return
        try:
            self.graphs.warm_up(progress)
        except UnsupportedError as error:
            self._give_up_graphs(error)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Compute the chunks; returns logits [sampled sequences, vocab] for the next tokens.

        They are good until the next call.
        """
        if self.graphs is not None and self.graphs.fits(batch):
            try:
                return self.graphs.run(batch)
            except UnsupportedError as error:
                self._give_up_graphs(error)
        step = make_step(batch, self.storage)
        images = None if self.images is None else self.images.make_pass(batch, step.positions)
        logits = self.model.forward(step.ids, step.positions, step.rows, step, images)
        if self.images is not None and images is not None:
            self.images.release(batch)
        return logits

    @torch.inference_mode()
    def begin(self, batch: Batch) -> Pass:
        """Compute a batch and draw its tokens, without waiting for them."""
        logits = self.run(batch)
        reasons: dict[int, Reason] = {}
        rows = [_row(index, s, reasons) for index, s in enumerate(batch.sampled)]
        return Pass(batch, self._sampler.draw(logits, rows) if rows else None, reasons)

    def can_begin_next(self, under_way: Pass) -> bool:
        """Whether the pass after one that nobody has read needs no token on the host."""
        if self.graphs is None or under_way.draws is None or not self.graphs.fits(under_way.batch):
            return False
        return not any(_depends_on_output(sequence) for sequence in under_way.batch.sampled)

    @torch.inference_mode()
    def begin_next(self, under_way: Pass, following: Batch) -> Pass:
        """Begin the pass that computes the tokens of one that nobody has read."""
        assert self.graphs is not None and under_way.draws is not None  # as `can_begin_next` says
        logits = self.graphs.run(following, under_way.draws.tokens)
        rows = [
            SamplerRow(s.request.sampling, s.request.prompt, s.output, s.seed, num_pending=1)
            for s in following.sampled
        ]
        return Pass(following, self._sampler.draw(logits, rows))

    def read(self, under_way: Pass) -> list[Sampled | Reason]:
        """The next token of each open sequence that was sampled, or why there is none."""
        if under_way.draws is None:
            return []
        found: list[Sampled | Reason] = []
        sampled = self._sampler.read(under_way.draws)
        for index, (sequence, one) in enumerate(zip(under_way.batch.sampled, sampled, strict=True)):
            if sequence.state == "running":
                one = under_way.reasons.get(index, one)
                found.append(_follow(sequence, one) if isinstance(one, Sampled) else one)
        return found

    def _give_up_graphs(self, error: UnsupportedError) -> None:
        """Go on without graphs, unless they are required."""
        if self._needs_graphs:
            raise error
        logger.warning("decode steps run without CUDA graphs: %s", error)
        self.graphs = None


def _row(index: int, sequence: Sequence, reasons: dict[int, Reason]) -> SamplerRow:
    """What the sampler needs; a grammar that has failed gives its request a reason to end."""
    request, allowed = sequence.request, None
    if sequence.grammar is not None:
        try:
            allowed = sequence.grammar.allowed("cpu")
        except OctavoError as error:
            reasons[index] = GrammarFailure(error)
    return SamplerRow(request.sampling, request.prompt, sequence.output, sequence.seed, allowed)


def _depends_on_output(sequence: Sequence) -> bool:
    """Whether a token must be read before the next one can be drawn."""
    is_plain = sequence.state == "running" and sequence.grammar is None
    return not is_plain or sequence.request.sampling.has_penalty


def _follow(sequence: Sequence, sampled: Sampled) -> Sampled | Reason:
    """A token, once the sequence's grammar has taken it."""
    if sequence.grammar is not None:
        try:
            sequence.grammar.advance(sampled.token)
        except OctavoError as error:
            return GrammarFailure(error)
    return sampled
