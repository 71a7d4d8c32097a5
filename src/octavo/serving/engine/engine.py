"""The engine: requests in, steps of one forward pass each, what they added out."""

import dataclasses
import logging
import random
from typing import Any

import torch

from octavo.cache.pages import PageAllocator
from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.integrations.transformers.text_model import load_text_model
from octavo.recipe import Recipe
from octavo.serving.engine.request import Delta, FinishReason, Request, Stats
from octavo.serving.engine.runner import Runner
from octavo.serving.engine.sampler import LogitsError, Sampled, Sampler, SamplerRow
from octavo.serving.engine.scheduler import Batch, Scheduler
from octavo.serving.engine.sequence import Sequence
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.engine.sizing import choose_context, choose_num_pages
from octavo.serving.engine.text import Texts, TextStream

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Answer:
    """The text of an open request, and its place in its grammar; None if it has none."""

    stream: TextStream | None = None
    grammar: Any = None


class Engine:
    """Many requests, one forward pass at a time; one thread owns it.

    Every request that was added ends with exactly one Delta that has a finish_reason. Tokens that
    end an answer (EOS, stop_token_ids, those of a stop text) are among its tokens, without text.
    tokenizer: as transformers' are; None if prompts are tokens and nobody needs text.
    """

    def __init__(
        self,
        model: EngineModel,
        tokenizer: Any = None,
        settings: EngineSettings = EngineSettings(),
        *,
        model_name: str = "model",
    ) -> None:
        spec = model.cache_spec(settings.page_size)
        num_pages = choose_num_pages(model, spec, settings)
        self.max_context = choose_context(model, num_pages * spec.page_size, settings)
        self.settings = dataclasses.replace(settings, max_context=self.max_context)
        self.model_name, self.tokenizer = model_name, tokenizer
        self._texts = None if tokenizer is None else Texts(tokenizer)
        self._model = model
        self._allocator = PageAllocator(num_pages, spec.page_size)
        self._scheduler = Scheduler(self._allocator, self.settings)
        self._runner: Runner | None = Runner(model, spec, num_pages)
        self._sampler = Sampler(model.vocab_size, model.device, eos_tokens=sorted(model.eos_tokens))
        self._seeds = random.Random(settings.seed)
        self._answers: dict[str, _Answer] = {}
        self._ended: list[Delta] = []  # by abort and close: for the next step
        self._num_completion_tokens = self._num_finished = self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        return self._scheduler.has_work or bool(self._ended)

    def check(self, request: Request) -> None:
        """Raise ConfigError or UnsupportedError for a request that can never run here."""
        if self._runner is None:
            raise ConfigError("expected an engine that is open, got one that was closed")
        name, sampling = request.request_id, request.sampling
        if request.images:
            raise UnsupportedError(f"request {name}: expected a prompt of text, got images in it")
        if sampling.grammar is not None and not hasattr(sampling.grammar, "start"):
            raise ConfigError(
                f"request {name}: expected a grammar such as guided.Grammar makes, got "
                f"{type(sampling.grammar).__name__}"
            )
        if sampling.stop and self.tokenizer is None:
            raise ConfigError(f"request {name}: stop texts need a tokenizer, got none")
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= self._model.vocab_size:
            raise ConfigError(
                f"request {name}: expected tokens in [0, {self._model.vocab_size}), got "
                f"{low if low < 0 else high}"
            )
        self._scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request; CapacityError if the queue is full, else as `check`."""
        self.check(request)
        own = request.sampling.seed
        seed = self._seeds.getrandbits(63) if own is None else own
        answer = _Answer()
        if self._texts is not None:
            answer.stream = TextStream(self._texts, request.sampling.stop)
        if request.sampling.grammar is not None:
            answer.grammar = request.sampling.grammar.start()
        self._scheduler.add(request, seed=seed)
        self._answers[request.request_id] = answer

    def abort(self, request_id: str) -> None:
        """End a request; its last Delta comes with the next step. Unknown ids are ignored."""
        sequence = self._scheduler.abort(request_id)
        if sequence is not None:
            self._ended.append(self._end(sequence))

    def step(self) -> list[Delta]:
        """One forward pass, and what it added to its requests; [] if there is nothing to do.

        A pass that fails ends its requests, and no others, with finish_reason "error". A GPU in an
        unknown state fails the engine: that error is raised.
        """
        deltas, self._ended = self._ended, []
        batch = self._scheduler.schedule()
        if not batch.chunks:
            return deltas
        self._num_steps += 1
        try:
            sampled, reasons = self._compute(batch)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            logger.exception("a forward pass of %d tokens failed", batch.num_tokens)
            message = f"{type(error).__name__}: {error}"
            return deltas + [self._fail(chunk.sequence, message) for chunk in batch.chunks]
        sequences = batch.sampled
        self._scheduler.advance(batch, [None if one is None else one.token for one in sampled])
        for row, (sequence, one) in enumerate(zip(sequences, sampled, strict=True)):
            if one is None:
                deltas.append(self._fail(sequence, reasons[row]))
            else:
                deltas.append(self._note(sequence, one))
        return deltas

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the model has them."""
        return tuple(sorted(self._model.eos_tokens))

    def stats(self) -> Stats:
        """The engine now, and its totals."""
        return Stats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_pages=self._allocator.num_pages,
            num_pages_in_use=self._allocator.num_in_use,
            prompt_tokens=self._scheduler.prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            cached_tokens=self._scheduler.cached_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_finished=self._num_finished,
            num_steps=self._num_steps,
        )

    def close(self) -> None:
        """End every request, free the cache and give the model back as it was.

        The last Deltas come with the next step.
        """
        for sequence in self._scheduler.open_sequences:
            self.abort(sequence.request_id)
        if self._runner is not None:
            self._runner = None
            self._model.close()

    @torch.inference_mode()
    def _compute(self, batch: Batch) -> tuple[list[Sampled | None], dict[int, str]]:
        """The next token of each sampled sequence, None where there is none, and why."""
        assert self._runner is not None
        logits = self._runner.run(batch)
        reasons: dict[int, str] = {}
        rows = [self._row(index, s, reasons) for index, s in enumerate(batch.sampled)]
        if not rows:
            return [], {}
        sampled: list[Sampled | None]
        try:
            sampled = list(self._sampler.sample(logits, rows))
        except LogitsError as error:
            sampled = error.sampled
            reasons = error.reasons | reasons
        for index, (sequence, one) in enumerate(zip(batch.sampled, sampled, strict=True)):
            grammar = self._answers[sequence.request_id].grammar
            if one is not None and grammar is not None and index not in reasons:
                try:
                    grammar.advance(one.token)
                except OctavoError as error:
                    reasons[index] = str(error)
        return [None if i in reasons else one for i, one in enumerate(sampled)], reasons

    def _row(self, index: int, sequence: Sequence, reasons: dict[int, str]) -> SamplerRow:
        """What the sampler needs; a grammar that has failed gives its request a reason to end."""
        request = sequence.request
        grammar, allowed = self._answers[request.request_id].grammar, None
        if grammar is not None:
            try:
                allowed = grammar.allowed("cpu")
            except OctavoError as error:
                reasons[index] = str(error)
        return SamplerRow(request.sampling, request.prompt, sequence.output, sequence.seed, allowed)

    def _note(self, sequence: Sequence, sampled: Sampled) -> Delta:
        """What a new token adds to its request, and whether it ends it."""
        self._num_completion_tokens += 1
        sampling, token = sequence.request.sampling, sampled.token
        answer, text = self._answers[sequence.request_id], ""
        is_end = token in sampling.stop_token_ids
        is_end |= not sampling.ignore_eos and token in self._model.eos_tokens
        is_stopped = False
        if answer.stream is not None and not is_end:
            delta = answer.stream.add([token])
            text, is_stopped = delta.text, delta.is_stopped
        reason: FinishReason | None = None
        if is_end or is_stopped or (answer.grammar is not None and answer.grammar.is_finished):
            reason = "stop"
        elif sequence.num_output_tokens >= sampling.max_tokens:
            reason = "length"
        if reason is not None:
            self._scheduler.finish(sequence, reason)
            if answer.stream is not None:
                text += answer.stream.finish()
        logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
        return self._delta(sequence, (token,), text, logprobs=logprobs)

    def _fail(self, sequence: Sequence, error: str) -> Delta:
        self._scheduler.finish(sequence, "error")
        return self._end(sequence, error)

    def _end(self, sequence: Sequence, error: str | None = None) -> Delta:
        """The last Delta of a request that ends without another token."""
        stream = self._answers[sequence.request_id].stream
        text = "" if stream is None else stream.finish()
        return self._delta(sequence, (), text, error=error)

    def _delta(
        self, sequence: Sequence, tokens: tuple[int, ...], text: str, **others: Any
    ) -> Delta:
        if sequence.finish_reason is not None:
            del self._answers[sequence.request_id]
            self._num_finished += 1
        return Delta(
            request_id=sequence.request_id,
            tokens=tokens,
            text=text,
            finish_reason=sequence.finish_reason,
            usage=sequence.usage,
            **others,
        )


def load_engine(
    model: Any = None,
    recipe: Recipe | None = None,
    settings: EngineSettings = EngineSettings(),
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Engine:
    """An engine for a model: a folder or hub name, or a model that is loaded already.

    None is SmolLM2-135M-Instruct. dtype, device: of a model that is loaded here. A model that was
    loaded already is changed until the engine is closed, and stays on its device.
    """
    name = getattr(getattr(model, "config", None), "name_or_path", None) or type(model).__name__
    if model is None or isinstance(model, str):
        loaded = load_text_model(model, dtype=dtype, device=device)
        model, name = loaded.model, loaded.name
        tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
    elif dtype != "auto" or device is not None:
        raise ConfigError("dtype and device are for a model by name, got one that is loaded")
    prepared = EngineModel(model, recipe)
    try:
        return Engine(prepared, tokenizer, settings, model_name=name)
    except BaseException:
        prepared.close()
        raise
