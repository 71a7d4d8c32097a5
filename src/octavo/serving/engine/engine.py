"""The engine: requests in, steps of one forward pass each, what they added out."""

import dataclasses
import logging
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AnySequence
from typing import Any

import torch

from octavo.cache.pages import PageAllocator
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.apply import apply_, quantized_twin, split_linear
from octavo.integrations.transformers.decoder_layers import brings_kv_scales
from octavo.integrations.transformers.engine_images import (
    SERVED,
    EngineImages,
    PromptImages,
    check_places,
)
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.integrations.transformers.text_model import load_served_model
from octavo.integrations.transformers.tokenizer import PromptSettings, prepare_tokenizer
from octavo.recipe import Recipe
from octavo.serving.engine.image_store import ImageError, ImageStore
from octavo.serving.engine.precision import describe_engine
from octavo.serving.engine.request import Delta, FinishReason, Request, Stats
from octavo.serving.engine.runner import Pass, Runner
from octavo.serving.engine.sampler import Sampled
from octavo.serving.engine.saturation_totals import SaturationTotals
from octavo.serving.engine.scheduler import Batch, Scheduler
from octavo.serving.engine.sequence import Sequence
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.engine.sizing import choose_context, choose_num_pages, try_pass
from octavo.serving.engine.text import Texts, TextStream

logger = logging.getLogger(__name__)


class Engine:
    """Many requests, one forward pass at a time; one thread owns it.

    Every request that was added ends with exactly one Delta that has a finish_reason. Tokens that
    end an answer (EOS, stop_token_ids, those of a stop text) are among its tokens, without text.
    tokenizer: as transformers' are; None if prompts are tokens and nobody needs text.
    image_processor: as transformers' are, for prompts with images; None refuses them.
    precision: what is in FP8. eos_tokens: those that end an answer, as the model has them. model:
    with the engine's attention until the engine is closed.
    """

    def __init__(
        self,
        model: EngineModel,
        tokenizer: Any = None,
        settings: EngineSettings = EngineSettings(),
        *,
        model_name: str = "model",
        image_processor: Any = None,
    ) -> None:
        has_images = image_processor is not None
        self._images = EngineImages(model.model, image_processor) if has_images else None
        spec = model.cache_spec(settings.page_size)
        if settings.compile:
            model.compile()
            try_pass(model, spec, num_tokens=1, num_seqs=1)
        num_pages = choose_num_pages(model, spec, settings, self._images)
        self.max_context = choose_context(model, num_pages * spec.page_size, settings)
        self.settings = dataclasses.replace(settings, max_context=self.max_context)
        self.model_name, self.tokenizer = model_name, tokenizer
        self._texts = None if tokenizer is None else Texts(tokenizer)
        self._model, self.model = model, model.model
        self.eos_tokens = tuple(sorted(model.eos_tokens))
        self._allocator = PageAllocator(num_pages, spec.page_size)
        self._scheduler = Scheduler(self._allocator, self.settings)
        store = None if self._images is None else ImageStore(self._images)
        self._runner: Runner | None = Runner(model, spec, num_pages, store)
        self.precision = describe_engine(model, self._runner.storage)
        self._saturation = SaturationTotals(model)
        if settings.cuda_graphs is not False:
            self._runner.use_graphs(
                max_batch=settings.max_num_seqs,
                max_context=self.max_context,
                is_required=settings.cuda_graphs is True,
            )
        self._seeds = random.Random(settings.seed)
        self._ahead: Pass | None = None
        self._ended: list[Delta] = []  # by abort and close: for the next step
        self._num_completion_tokens = self._num_finished = self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        return self._scheduler.has_work or bool(self._ended)

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are replayed from CUDA graphs."""
        return self._runner is not None and self._runner.graphs is not None

    @property
    def has_images(self) -> bool:
        """Whether prompts may have images."""
        return self._images is not None

    def prepare_images(self, prompt: AnySequence[int], images: Iterable[Any]) -> PromptImages:
        """Images as a request may have them, with the whole prompt as `tokens`.

        prompt: with one image token for each of them. `add` does it, too; this any thread may call.
        Images that are made while they are asked for are in memory one after another.
        """
        return self._need_images().prepare(prompt, images)

    def count_image_tokens(self, width: int, height: int) -> int | None:
        """The tokens of an image of this size; None if the image processor does not tell."""
        return self._need_images().count_tokens(width, height)

    def choose_image_reduction(self, width: int, height: int, factors: Iterable[int]) -> int:
        """The largest factor by which an image may be made smaller before it is prepared, or 1."""
        return self._need_images().choose_reduction(width, height, factors)

    def _need_images(self) -> EngineImages:
        if self._images is None:
            raise UnsupportedError(
                f"expected a prompt of text, got images: {self.model_name} came without an image "
                f"processor, or is none of the models they are read for ({', '.join(SERVED)})"
            )
        return self._images

    def check(self, request: Request) -> Request:
        """The request as it will run, with its images prepared.

        ConfigError or UnsupportedError if it never can.
        """
        if self._runner is None:
            raise ConfigError("expected an engine that is open, got one that was closed")
        images: Any = request.images
        if not isinstance(images, PromptImages) and len(images):
            prepared = self.prepare_images(request.prompt, images)
            request = dataclasses.replace(request, prompt=prepared.tokens, images=prepared)
        name, sampling = request.request_id, request.sampling
        if self._images is not None:
            check_places(request.prompt, request.images, self._images.image_token, name)
        if sampling.grammar is not None and not hasattr(sampling.grammar, "start"):
            raise ConfigError(
                f"request {name}: expected a grammar such as guided.Grammar makes, got "
                f"{type(sampling.grammar).__name__}"
            )
        if sampling.stop and self.tokenizer is None:
            raise ConfigError(f"request {name}: stop texts need a tokenizer, got none")
        biased = [token for token, _ in sampling.logit_bias]
        for what, tokens in (("tokens", request.prompt), ("tokens in logit_bias", biased)):
            low, high = min(tokens, default=0), max(tokens, default=0)
            if low < 0 or high >= self._model.vocab_size:
                raise ConfigError(
                    f"request {name}: expected {what} in [0, {self._model.vocab_size}), got "
                    f"{low if low < 0 else high}"
                )
        self._scheduler.check(request)
        return request

    def add(self, request: Request) -> None:
        """Queue a request; CapacityError if the queue is full, else as `check`."""
        request = self.check(request)
        sampling = request.sampling
        grammar = None if sampling.grammar is None else sampling.grammar.start()
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        sequence = self._scheduler.add(request, seed=seed)
        sequence.grammar = grammar
        if self._texts is not None:
            sequence.stream = TextStream(self._texts, sampling.stop)

    def warm_up(self, progress: Callable[[list[int]], Iterable[int]] = iter) -> None:
        """Capture all CUDA graphs now, if steps run by them; progress: over their batch sizes."""
        if self._runner is not None:
            self._runner.capture_graphs(progress)

    def abort(self, request_id: str) -> None:
        """End a request; its last Delta comes with the next step. Unknown ids are ignored."""
        sequence = self._scheduler.abort(request_id)
        if sequence is not None:
            self._ended.append(self._delta(sequence))

    def step(self) -> list[Delta]:
        """What one forward pass added to its requests; [] if there is nothing to do.

        Where possible, the pass after it is under way when this returns. A pass that fails ends its
        requests, and no others, with finish_reason "error"; a vision tower that fails ends the one
        whose images it was for. A GPU in an unknown state fails the engine: that error is raised.
        """
        deltas, self._ended = self._ended, []
        under_way, self._ahead = self._ahead, None
        if under_way is not None and not under_way.batch.open_chunks:
            under_way = None  # all have ended without it
        batch = self._scheduler.schedule() if under_way is None else under_way.batch
        if not batch.chunks:
            return deltas
        runner = self._runner
        assert runner is not None  # closed, no request is open
        self._num_steps += 1
        try:
            under_way = runner.begin(batch) if under_way is None else under_way
            ahead = None
            if runner.can_begin_next(under_way) and (next := self._scheduler.schedule_ahead(batch)):
                ahead = runner.begin_next(under_way, next)
            tokens = runner.read(under_way)
        except torch.AcceleratorError:
            raise
        except ImageError as error:
            logger.exception("request %s: its images failed", error.sequence.request_id)
            return [*deltas, self._fail(error.sequence, str(error))]  # all others run again
        except Exception as error:
            logger.exception("a forward pass of %d tokens failed", batch.num_tokens)
            message = f"{type(error).__name__}: {error}"
            return deltas + [self._fail(chunk.sequence, message) for chunk in batch.open_chunks]
        batch = Batch(batch.open_chunks)
        known = [one.token if isinstance(one, Sampled) else None for one in tokens]
        self._scheduler.advance(batch, known)
        # Not before: interrupted while it waits for tokens, the step is taken again.
        self._ahead = ahead
        for sequence, one in zip(batch.sampled, tokens, strict=True):
            if isinstance(one, Sampled):
                deltas.append(self._note(sequence, one))
            else:
                deltas.append(self._fail(sequence, one))
        return deltas

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
            saturated=self._saturation.last,
        )

    def read_saturation(self) -> None:
        """Ask the device how many values have saturated; `stats` has the answer of the last call.

        Waits for nothing.
        """
        if self._runner is not None:
            self._saturation.read()

    def close(self) -> None:
        """End every request, free the cache and give the model back as it was.

        The last Deltas come with the next step.
        """
        for sequence in self._scheduler.open_sequences:
            self.abort(sequence.request_id)
        self._ahead = None
        if self._runner is not None:
            self._runner = None
            self._model.close()

    def _note(self, sequence: Sequence, sampled: Sampled) -> Delta:
        """What a new token adds to its request, and whether it ends it."""
        self._num_completion_tokens += 1
        sampling, token = sequence.request.sampling, sampled.token
        stream, grammar, text = sequence.stream, sequence.grammar, ""
        is_end = token in sampling.stop_token_ids
        is_end |= not sampling.ignore_eos and token in self._model.eos_tokens
        is_stopped = False
        if stream is not None and not is_end:
            text, is_stopped = stream.add([token])
        reason: FinishReason | None = None
        if is_end or is_stopped or (grammar is not None and grammar.is_finished):
            reason = "stop"
        elif sequence.num_output_tokens >= sampling.max_tokens:
            reason = "length"
        if reason is not None:
            self._scheduler.finish(sequence, reason)
        logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
        return self._delta(sequence, (token,), text, logprobs=logprobs)

    def _fail(self, sequence: Sequence, error: str) -> Delta:
        self._scheduler.finish(sequence, "error")
        return self._delta(sequence, error=error)

    def _delta(
        self, sequence: Sequence, tokens: tuple[int, ...] = (), text: str = "", **others: Any
    ) -> Delta:
        """What is new of a request: if it has finished, with the text that was waiting."""
        if sequence.finish_reason is not None:
            text += "" if sequence.stream is None else sequence.stream.finish()
            self._num_finished += 1
            if self._runner is not None and self._runner.images is not None:
                self._runner.images.forget(sequence.request_id)
        return Delta(
            request_id=sequence.request_id,
            tokens=tokens,
            text=text,
            finish_reason=sequence.finish_reason,
            usage=sequence.usage,
            begun_s=sequence.begun_s,
            **others,
        )


def load_engine(
    model: Any = None,
    recipe: Recipe | None = None,
    settings: EngineSettings = EngineSettings(),
    *,
    tokenizer: Any = None,
    image_processor: Any = None,
    dtype: str = "auto",
    device: str | None = None,
    vision_impl: str | None = None,
    prefill_impl: str | None = None,
    prompts: PromptSettings = PromptSettings(),
) -> Engine:
    """An engine for a model: a folder, GGUF file or hub name, or a model that is loaded already.

    None is SmolLM2-135M-Instruct, "chart-reader" the chart reader that comes with octavo. dtype,
    device: of a model that is loaded here. A model that was loaded already is changed until the
    engine is closed, and stays on its device. vision_impl: of the recipe's vision_attention,
    prefill_impl: of attention of prompts, by name. Linear layers of the recipe are quantized in
    place if the model is loaded here; beside one that was there before, whose weights stay.
    prompts: how texts and chats become tokens.
    """
    name = getattr(getattr(model, "config", None), "name_or_path", None) or type(model).__name__
    is_own, given = False, tokenizer
    if model is None or isinstance(model, str):
        loaded, own = load_served_model(model, dtype=dtype, device=device, prompts=prompts)
        model, name = loaded.model, loaded.name
        tokenizer = loaded.tokenizer if given is None else given
        image_processor = own if image_processor is None else image_processor
        is_own = True
    elif dtype != "auto" or device is not None:
        raise ConfigError("dtype and device are for a model by name, got one that is loaded")
    if given is not None:
        tokenizer = prepare_tokenizer(given, prompts, model.config)
    elif tokenizer is None and prompts != PromptSettings():
        raise ConfigError("add_bos and chat_template need a tokenizer, got none")
    linear, recipe = (None, None) if recipe is None else split_linear(recipe)
    if linear is not None:
        if is_own:
            changes = apply_(model, linear)
        else:
            model, changes = quantized_twin(model, linear)
        logger.info("%s: %s", name, changes)
    if is_own and (recipe is None or recipe.kv_cache is None) and brings_kv_scales(model):
        logger.warning(
            "%s brings scales for an FP8 KV cache, which are not used: --kv-cache-dtype fp8, or "
            "Recipe(kv_cache='fp8'), uses them",
            name,
        )
    prepared = EngineModel(model, recipe, vision_impl=vision_impl, prefill_impl=prefill_impl)
    try:
        return Engine(
            *(prepared, tokenizer, settings), model_name=name, image_processor=image_processor
        )
    except BaseException:
        prepared.close()
        raise
