"""A row as a model of lm-eval: texts are scored by transformers, answers come from the engine."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import text_tokens
from octavo.measure.evaluate.answering import prompt_chunks, stop_tokens
from octavo.measure.evaluate.fp8_layers import layers_that_ran, watched
from octavo.measure.evaluate.language import applied
from octavo.measure.run import Progress, Watch
from octavo.recipe import Recipe
from octavo.serving.engine.llm import LLM
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.settings import EngineSettings

DEFAULT_CONTEXT = 2048  # of a model whose config does not say
ROUNDS = 8  # times the engine's slots: prompts between two looks at the progress
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a context, and those that may follow


@torch.inference_mode()
def score_tokens(model: Any, pair: Pair, chunk: int) -> tuple[float, bool]:
    """The log-likelihood of tokens after a context, and whether each was the likeliest.

    All go through the cache in chunks, as a prompt does: with an e4m3 cache it is a prefill in FP8.
    """
    context, continuation = pair
    ids = torch.tensor([*context, *continuation], device=next(model.parameters()).device)
    cache, total, is_greedy = None, 0.0, True
    for part in prompt_chunks(len(ids) - 1, chunk):
        counted = part.stop - max(part.start, len(context) - 1)
        result = model(
            input_ids=ids[None, part.start : part.stop],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(counted, 1),
        )
        cache = result.past_key_values
        if counted > 0:
            logits = result.logits[0, -counted:].float()
            targets = ids[part.stop + 1 - counted : part.stop + 1]
            total -= float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            is_greedy = is_greedy and bool((logits.argmax(-1) == targets).all())
    return total, is_greedy


@dataclass(frozen=True, kw_only=True)
class RowSetup:
    """What a row of a local model runs with; ran: gets the number of its layers in FP8."""

    text_model: TextModel
    recipe: Recipe | None
    settings: EngineSettings
    chunk: int
    is_chat: bool
    ran: dict[str, float]
    watch: Watch


class HarnessModel(TemplateLM):
    """A row's model, as lm-eval calls one. A prompt that is too long raises before any is run."""

    def __init__(self, setup: RowSetup) -> None:
        super().__init__()
        self.setup, self.tokenizer = setup, setup.text_model.tokenizer
        self.max_length = setup.text_model.max_length or DEFAULT_CONTEXT

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        found: int | None = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        for token in (self.tokenizer.bos_token_id, self.eot_token_id):
            if token is not None:
                return int(token)
        raise ConfigError("expected a tokenizer with BOS or EOS, to score texts without a context")

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's own caches, which are not used."""
        return self.setup.text_model.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as a text; its last message goes on where no answer is asked for."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The tokens of a text; a chat template has written the special ones already."""
        special = not self.setup.is_chat if add_special_tokens is None else add_special_tokens
        return list(text_tokens(self.tokenizer, string, add_special_tokens=special))

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation of its context, and whether it is greedy."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            self._check(len(context) + len(continuation) - 1)
        return self._score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """The log-likelihood of whole texts, in windows of the model's context."""
        texts = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._score([window for text in texts for window in text]))
        return [sum(next(scores)[0] for _ in text) for text in texts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """The answers of octavo's engine, up to a stop text, which is no part of them."""
        asked = []
        for place, request in enumerate(requests):
            context, options = request.args
            prompt = self.tok_encode(context)
            self._check(len(prompt) + 1)
            asked.append((prompt, self._sampling(options, self.max_length - len(prompt), place)))
        setup, size = self.setup, ROUNDS * self.setup.settings.max_num_seqs
        progress = Progress(setup.watch, "answering", len(asked))
        answers: list[str] = []
        model, recipe = setup.text_model.model, setup.recipe or Recipe()
        with LLM(model, recipe=recipe, settings=setup.settings, tokenizer=self.tokenizer) as llm:
            setup.ran.update(layers_that_ran(llm.engine.precision.layers))
            for start in range(0, len(asked), size):
                some = asked[start : start + size]
                found = llm.generate([prompt for prompt, _ in some], [own for _, own in some])
                answers += [one.text for one in found]
                progress.add(len(some))
        del llm
        gc.collect()  # the cache: the next row needs its memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return answers

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        setup = self.setup
        progress = Progress(setup.watch, "reading", len(pairs))
        ready: Callable[[], AbstractContextManager[Any]] = partial(
            applied, setup.text_model.model, setup.recipe
        )
        scores = []
        with watched(ready, setup.ran) as model:
            for pair in pairs:
                scores.append(score_tokens(model, pair, setup.chunk))
                progress.add()
        return scores

    def _sampling(self, options: dict[str, Any], room: int, place: int) -> Sampling:
        """What lm-eval's generation_kwargs mean to the engine; ConfigError for unknown ones."""
        given = dict(normalize_gen_kwargs(options))
        is_sampled, until = given.pop("do_sample"), given.pop("until")
        limit = min(given.pop("max_gen_toks"), room)
        if unknown := sorted(given.keys() - {*SAMPLED}):
            raise ConfigError(
                f"expected generation_kwargs out of do_sample, until, max_gen_toks, "
                f"{', '.join(SAMPLED)}, got {', '.join(unknown)}"
            )
        own = {name: x for name, x in given.items() if x is not None}
        return Sampling(
            **(own if is_sampled else {"temperature": 0.0}),
            seed=place,
            max_tokens=limit,
            stop=tuple(text for text in until if text),
            stop_token_ids=tuple(sorted(stop_tokens(self.setup.text_model))),
        )

    def _check(self, num_tokens: int) -> None:
        if num_tokens > self.max_length:
            raise ConfigError(
                f"expected prompts of up to {self.max_length} tokens, for which "
                f"{self.setup.text_model.name} was made, got {num_tokens}: lower --num-fewshot"
            )
