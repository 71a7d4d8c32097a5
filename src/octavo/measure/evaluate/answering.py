"""Greedy answers of a local model: the prompt in chunks through the cache, then token by token."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens, text_tokens
from octavo.ops.plan_decode import MAX_QUERY_TOKENS

Message = Mapping[str, str]
Content = str | tuple[Message, ...]  # a text to go on with, or a chat to answer
Step = Callable[[int], None]  # told how many tokens of a prompt are done


def prompt_chunks(length: int, chunk: int) -> list[range]:
    """The passes over a prompt: whole chunks at its end, what is left over at its start.

    Passes of a few tokens would be decoded, with queries that are not quantized: the last one,
    which answers, never is, unless the prompt itself is as short.
    """
    if chunk <= MAX_QUERY_TOKENS:
        raise ConfigError(f"expected a chunk of {MAX_QUERY_TOKENS + 1} tokens or more, got {chunk}")
    first = length % chunk
    if 0 < first <= MAX_QUERY_TOKENS and length > chunk:
        first += chunk
    starts = [*([0] if first else []), *range(first, length, chunk)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], length], strict=True)]


@torch.inference_mode()
def answer_tokens(
    model: Any,
    prompt: Tensor,
    *,
    max_tokens: int,
    chunk: int = 2048,
    stop: frozenset[int] = frozenset(),
    on_step: Step = lambda num_tokens: None,
) -> list[int]:
    """The most likely tokens after a prompt [length], up to one of `stop` or max_tokens.

    The first of them is computed by the last pass over the prompt: a prefill.
    """
    ids = prompt.to(next(model.parameters()).device)[None]
    cache: Any = None
    result: Any = None
    for part in prompt_chunks(len(prompt), chunk):
        result = model(
            input_ids=ids[:, part.start : part.stop],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = result.past_key_values
        on_step(len(part))
    found: list[int] = []
    while True:
        token = result.logits[:, -1:].argmax(dim=-1)
        found.append(int(token))
        if found[-1] in stop or len(found) == max_tokens:
            return found
        result = model(input_ids=token, past_key_values=cache, use_cache=True)


def answer_text(
    text_model: TextModel,
    content: Content,
    *,
    max_tokens: int,
    chunk: int = 2048,
    on_step: Step = lambda num_tokens: None,
) -> str:
    """A model's greedy answer; ConfigError if the model was not made for the length."""
    tokenizer = text_model.tokenizer
    if isinstance(content, str):
        prompt = text_tokens(tokenizer, content)
    else:
        prompt = chat_tokens(tokenizer, content)
    limit = text_model.max_length
    if limit is not None and len(prompt) + max_tokens > limit:
        raise ConfigError(
            f"expected at most {limit} tokens, for which {text_model.name} was made, got "
            f"{len(prompt)} and {max_tokens} of the answer: use shorter prompts"
        )
    tokens = answer_tokens(
        text_model.model,
        torch.tensor(prompt),
        max_tokens=max_tokens,
        chunk=chunk,
        stop=stop_tokens(text_model),
        on_step=on_step,
    )
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def stop_tokens(text_model: TextModel) -> frozenset[int]:
    """The tokens that end an answer, by the model's generation config or its tokenizer."""
    generation = getattr(text_model.model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    if ends is None:
        ends = text_model.tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
