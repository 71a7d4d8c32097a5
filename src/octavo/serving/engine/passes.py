"""A batch's way to its tokens, and the pass after it, begun before anybody has read them.

While the host makes deltas of a pass's tokens, schedules and writes tables, the device would wait.
So where all that runs only decodes, the next pass is queued at once: its tokens are on the device,
where they are drawn, and everything else about it is known. Only an answer that ends by its token
is a surprise: what the next pass computes of it is thrown away.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import OctavoError
from octavo.serving.engine.request import GrammarFailure
from octavo.serving.engine.runner import Runner
from octavo.serving.engine.sampler import Draws, LogitsError, Sampled, Sampler, SamplerRow
from octavo.serving.engine.scheduler import Batch, Chunk, Scheduler
from octavo.serving.engine.sequence import Sequence

Reason = str  # why a sequence gets no token, and must end


def open_chunks(batch: Batch) -> tuple[Chunk, ...]:
    """Those of sequences that have not ended since the batch was made."""
    return tuple([chunk for chunk in batch.chunks if chunk.sequence.state == "running"])


@dataclass(frozen=True)
class Pass:
    """A forward pass that was begun.

    draws: its tokens, None if it samples none. reasons: why rows of it must end, whatever those
    are.
    """

    batch: Batch
    draws: Draws | None
    reasons: dict[int, Reason]

    @property
    def open_chunks(self) -> tuple[Chunk, ...]:
        """Those that somebody waits for."""
        return open_chunks(self.batch)


class Passes:
    """Begins passes and reads their tokens.

    grammar_of: an open sequence's place in its grammar, None if it has none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        grammar_of: Callable[[Sequence], Any],
    ) -> None:
        self._scheduler, self._runner, self._sampler = scheduler, runner, sampler
        self._grammar_of = grammar_of

    @torch.inference_mode()
    def begin(self, batch: Batch) -> Pass:
        """Compute a batch and draw its tokens, without waiting for them."""
        logits = self._runner.run(batch)
        reasons: dict[int, Reason] = {}
        rows = [self._row(index, s, reasons) for index, s in enumerate(batch.sampled)]
        return Pass(batch, self._sampler.draw(logits, rows) if rows else None, reasons)

    @torch.inference_mode()
    def begin_next(self, under_way: Pass) -> Pass | None:
        """Begin the pass after one that nobody has read; None if it may depend on its tokens."""
        batch, draws = under_way.batch, under_way.draws
        if draws is None or not self._runner.runs_ahead(batch):
            return None
        if any(self._depends_on_output(sequence) for sequence in batch.sampled):
            return None
        following = self._scheduler.schedule_ahead(batch)
        if following is None:
            return None
        logits = self._runner.run_ahead(following, draws.tokens)
        rows = [
            SamplerRow(s.request.sampling, s.request.prompt, s.output, s.seed, num_pending=1)
            for s in following.sampled
        ]
        return Pass(following, self._sampler.draw(logits, rows), {})

    def read(self, under_way: Pass) -> list[Sampled | Reason]:
        """The next token of each open sequence that was sampled, or why there is none."""
        if under_way.draws is None:
            return []
        reasons = under_way.reasons
        sampled: list[Sampled | None]
        try:
            sampled = list(self._sampler.read(under_way.draws))
        except LogitsError as error:
            sampled = error.sampled
            reasons = error.reasons | reasons
        found = []
        for index, (sequence, one) in enumerate(zip(under_way.batch.sampled, sampled, strict=True)):
            if sequence.state == "running":
                reason = reasons.get(index)
                found.append(self._follow(sequence, one) if reason is None else reason)
        return found

    def _follow(self, sequence: Sequence, sampled: Sampled | None) -> Sampled | Reason:
        """A token, once the sequence's grammar has taken it."""
        assert sampled is not None  # or there would be a reason
        grammar = self._grammar_of(sequence)
        if grammar is not None:
            try:
                grammar.advance(sampled.token)
            except OctavoError as error:
                return GrammarFailure(error)
        return sampled

    def _depends_on_output(self, sequence: Sequence) -> bool:
        """Whether a token must be read before the next one can be drawn."""
        if sequence.state != "running" or sequence.request.sampling.has_penalty:
            return True
        return self._grammar_of(sequence) is not None

    def _row(self, index: int, sequence: Sequence, reasons: dict[int, Reason]) -> SamplerRow:
        """What the sampler needs; a grammar that has failed gives its request a reason to end."""
        request, grammar, allowed = sequence.request, self._grammar_of(sequence), None
        if grammar is not None:
            try:
                allowed = grammar.allowed("cpu")
            except OctavoError as error:
                reasons[index] = GrammarFailure(error)
        return SamplerRow(request.sampling, request.prompt, sequence.output, sequence.seed, allowed)
