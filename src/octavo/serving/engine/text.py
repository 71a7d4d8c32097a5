"""Tokens into text as they come, and the texts that end an answer.

The text of a token depends on the ones before it: a character may be made of several tokens, and
many tokenizers write a space before every word but the first. So the newest tokens are decoded
together with the last ones whose text was complete, and what is new in that is their text.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has four bytes at most: of more tokens than this, some are no part of any.
MAX_WAITING_TOKENS = 16
# Pairs of tokens whose texts are kept: some MB.
NUM_KEPT_TEXTS = 2**15


class TextDelta(NamedTuple):
    """What tokens added to a text, and whether a stop text has ended it."""

    text: str
    is_stopped: bool = False


class TextStream:
    """The text of an answer, piece by piece; equal to decoding all of its tokens at once.

    Special tokens have no text. A piece never ends inside a character, nor in what may be the
    beginning of a stop text: that waits for the tokens that decide. The stop text that is complete
    first ends the text, the longest one if several are; neither it nor what follows is part of it.
    tokenizer: one of transformers' or of tokenizers', or Texts of one, which streams can share.
    Spaces before marks are left as they are (clean_up_tokenization_spaces=False). Bytes that are no
    UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decoder = _Decoder(tokenizer if isinstance(tokenizer, Texts) else Texts(tokenizer))
        self._stop = tuple(stop)
        self._held = ""  # decoded, but perhaps the beginning of a stop text
        self._is_stopped = False

    def add(self, tokens: Sequence[int]) -> TextDelta:
        """The text that these tokens make certain; nothing more after a stop text."""
        if not self._stop:
            return TextDelta("".join(map(self._decoder.add, tokens)))
        shown = ""
        for token in tokens:
            if not self._is_stopped:
                shown += self._show(self._decoder.add(token))
        return TextDelta(shown, self._is_stopped)

    def finish(self) -> str:
        """The text that was waiting: no more tokens will come."""
        shown = "" if self._is_stopped else self._show(self._decoder.finish())
        held, self._held = self._held, ""
        return shown + held

    def _show(self, text: str) -> str:
        """What can be shown of the text so far, `text` being its newest part."""
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) != -1]
        if found:
            self._held, self._is_stopped = "", True
            return held[: min(found)[1]]
        num_shown = len(held) - num_undecided(held, self._stop)
        self._held = held[num_shown:]
        return held[:num_shown]


def num_undecided(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop text."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class Texts:
    """The texts of a tokenizer's tokens, which may not change any more.

    Pairs of tokens come again and again: what is known of them is kept.
    """

    def __init__(self, tokenizer: Any) -> None:
        # What transformers' fast tokenizers wrap decodes faster, and cleans no spaces up.
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
        if hasattr(self._tokenizer, "get_added_tokens_decoder"):
            added = self._tokenizer.get_added_tokens_decoder()
            self._special = frozenset(token for token, entry in added.items() if entry.special)
        else:
            self._special = frozenset(getattr(self._tokenizer, "all_special_ids", ()))
        self.piece = lru_cache(NUM_KEPT_TEXTS)(self._piece)
        self.is_silent = lru_cache(NUM_KEPT_TEXTS)(self._is_silent)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _piece(self, last: int, token: int) -> str | None:
        """The text that a token adds to that of the last one; None if a character is not whole."""
        text = self.decode([last, token])
        return None if text.endswith(REPLACEMENT) else text[len(self.decode([last])) :]

    def _is_silent(self, token: int) -> bool:
        """Whether decoding leaves the token out: a special one, or one that only the model has."""
        if token in self._special:
            return True
        name_of = getattr(self._tokenizer, "id_to_token", None)
        return name_of is not None and name_of(token) is None


class _Decoder:
    """Text as soon as it is certain, whatever may stop it."""

    def __init__(self, texts: Texts) -> None:
        self._texts, self._decode = texts, texts.decode
        self._context: list[int] = []  # the last tokens whose text was complete
        self._waiting: list[int] = []
        self._num_done = 0  # characters of the text of both that were given out, if any wait

    def add(self, token: int) -> str:
        """The text that this token makes certain."""
        if self._texts.is_silent(token):
            return ""
        if not self._waiting:
            if len(self._context) == 1:
                piece = self._texts.piece(self._context[0], token)
                if piece is not None:
                    self._context[0] = token
                    return piece
            self._num_done = len(self._decode(self._context))
        self._waiting.append(token)
        text = self._decode(self._context + self._waiting)
        if text.endswith(REPLACEMENT):
            return self._give(text.rstrip(REPLACEMENT)) + self._forget()
        new = self._give(text)
        self._context, self._waiting = self._waiting, []
        return new

    def finish(self) -> str:
        """What was left: the beginning of a character, as U+FFFD."""
        return self._give(self._decode(self._context + self._waiting)) if self._waiting else ""

    def _give(self, text: str) -> str:
        new = text[self._num_done :]
        self._num_done = max(self._num_done, len(text))
        return new

    def _forget(self) -> str:
        """Text of the oldest waiting tokens when there are too many, lest the window grow for ever.

        Bytes may come that are no characters. Where text may be cut shows when its parts are
        decoded one by one; the tokens behind the cut have more bytes than a character can miss.
        """
        if len(self._waiting) <= MAX_WAITING_TOKENS:
            return ""
        text = self._decode(self._context + self._waiting)
        for num_left in range(4, 9):
            old, left = self._waiting[:-num_left], self._waiting[-num_left:]
            first = self._decode(self._context + old)
            if first + self._decode(left) == text:
                new = first[self._num_done :]
                self._context, self._waiting = [], left
                self._num_done = max(self._num_done - len(first), 0)
                return new
        return ""
