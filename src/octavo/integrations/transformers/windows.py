"""Windows of tokens, cut from texts and chats by a model's own tokenizer, and run by the model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from octavo.calibration.data import Chat, Document, Passage, PromptData, TextData
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.transformers.text import find_decoder
from octavo.integrations.transformers.tokenizer import chat_tokens, text_tokens

Window = list[int]


def cut_windows(
    texts: TextData,
    tokenizer: Any,
    max_length: int,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> PromptData[Window]:
    """Windows of at most `max_length` tokens; the same texts always give the same ones.

    A text becomes consecutive windows, each behind what the tokenizer puts in front of a text (BOS,
    for many); the last one of each text may be shorter. A chat is one window: the model's chat
    template is applied, and what is beyond `max_length` is left out. about: what else decides which
    tokens they have.
    """
    prefix = _prefix(tokenizer)
    if max_length <= len(prefix):
        raise ConfigError(f"expected max_length from {len(prefix) + 1} on, got {max_length}")

    def cut(document: Document) -> Iterator[Window]:
        match document:
            case Passage():
                yield from _passage_windows(document, tokenizer, prefix, max_length)
            case Chat():
                if ids := _chat_tokens(document, tokenizer)[:max_length]:
                    yield ids

    def read(start: int) -> Iterator[Window]:
        # Tokenizing what was seen before takes no time beside a model's pass over it.
        return islice(chain.from_iterable(map(cut, texts.read())), start, None)

    words = [texts.fingerprint, f"windows of {max_length}"]
    words += [f"{key} {value}" for key, value in about.items()]
    return PromptData(texts.name, ", ".join(words), None, read)


def _passage_windows(
    passage: Passage, tokenizer: Any, prefix: Window, max_length: int
) -> Iterator[Window]:
    size = max_length - len(prefix)
    rest: Window = []
    for piece in passage.pieces:
        rest += _tokens(tokenizer, piece)
        num_whole = len(rest) // size * size
        for start in range(0, num_whole, size):
            yield prefix + rest[start : start + size]
        rest = rest[num_whole:]
    if rest:
        yield prefix + rest


def _chat_tokens(chat: Chat, tokenizer: Any) -> Window:
    try:
        return list(chat_tokens(tokenizer, chat.messages, add_generation_prompt=False))
    except ConfigError as error:
        raise ConfigError(f"{chat.where}: {error}") from None


def _tokens(tokenizer: Any, text: str) -> Window:
    return list(text_tokens(tokenizer, text, add_special_tokens=False))


def _prefix(tokenizer: Any) -> Window:
    """The tokens that a tokenizer puts in front of a text."""
    plain, full = _tokens(tokenizer, "a"), list(text_tokens(tokenizer, "a"))
    starts = range(len(full) - len(plain) + 1)
    start = next((s for s in starts if full[s : s + len(plain)] == plain), None)
    if start is None:
        raise CheckpointError(
            f"expected a tokenizer that leaves a text as it is between special tokens, got {full} "
            f"for {plain}"
        )
    return full[:start]


def run_windows(model: nn.Module, windows: Sequence[Window]) -> None:
    """Run a decoder on windows of tokens; those of one length in a row at once, so none is padded.

    Neither a vision tower nor the logits are computed.
    """
    _, decoder = find_decoder(model)
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    for _, group in groupby(windows, key=len):
        input_ids = torch.tensor(list(group), device=embeddings.weight.device)
        if int(input_ids.max()) >= embeddings.num_embeddings:
            raise CheckpointError(
                f"expected tokens below {embeddings.num_embeddings}, as the model has embeddings, "
                f"got {int(input_ids.max())}: the tokenizer is another model's"
            )
        decoder(input_ids=input_ids, use_cache=False)
