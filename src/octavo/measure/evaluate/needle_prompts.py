"""Haystacks with a needle: keys with values, of which one is asked for.

`PairHaystack` speaks the words of the retrieval model, one token each. `TextHaystack` hides
sentences about numbers among others, for models that read text, and needs their tokenizer to have
the length in tokens.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ConfigError
from octavo.integrations.transformers import retrieval_model
from octavo.measure.records import Scalar

# Numbers of text haystacks: so many digits that none is guessed.
NUMBERS = range(1_000_000, 10_000_000)
_NAMES = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "juniper")
_KINDS = ("castle", "meadow", "harbor", "tower", "orchard", "bridge", "market", "garden", "mill")
_WHO = ("The farmer", "A traveller", "The miller", "Our neighbour", "The painter", "A sailor")
_DID = ("walked past", "looked at", "talked about", "remembered", "drew a map of", "slept near")
_WHAT = ("the old wall", "a quiet river", "the wooden gate", "a field of wheat", "the high road")
_WHEN = ("in the morning", "after the rain", "before dinner", "all day long", "without a word")


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt whose continuation is the answer."""

    text: str
    answer: str
    is_one_word: bool = False

    def is_found(self, completion: str) -> bool:
        """Whether a completion says the answer: as its first word, or anywhere in it."""
        if self.is_one_word:
            return completion.split()[:1] == [self.answer]
        return self.answer in completion.replace(",", "")


class Haystack(Protocol):
    """Makes prompts; num_answer_tokens: as many as an answer needs."""

    @property
    def name(self) -> str:
        """What records call it."""

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it: all that its prompts depend on beside their length and seed."""

    @property
    def num_answer_tokens(self) -> int:
        """The most tokens of an answer."""

    def make(self, length: int, depth: float, seed: int) -> NeedlePrompt:
        """A prompt of `length` tokens with the needle at this depth, 0 its start and 1 its end."""


def prompt_seed(seed: int, length: int, depth: float, repetition: int) -> int:
    """The seed of a prompt: another one for each, and the same for all rows."""
    return random.Random(f"{seed}, {length}, {depth:.6f}, {repetition}").randrange(2**31)


@dataclass(frozen=True)
class PairHaystack:
    """Keys and values of the retrieval model: `<s> ban 17 dor 42 … ? dor`, exactly `length` tokens.

    The needle's key is there once; all others come again, with other values.
    """

    name: str = "pairs"
    num_answer_tokens: int = 1

    @property
    def about(self) -> dict[str, Scalar]:
        """Every word but the needle's is one of many keys."""
        return {"haystack": self.name, "num_keys": "all"}

    def make(self, length: int, depth: float, seed: int) -> NeedlePrompt:
        """A prompt of `length` words, which are as many tokens."""
        _check(length, depth, shortest=5)
        draw = random.Random(seed)
        keys, values = list(retrieval_model.KEYS), retrieval_model.VALUES
        key = keys.pop(draw.randrange(len(keys)))
        num_pairs = (length - 3) // 2
        words = [retrieval_model.START]
        for other, value in zip(
            draw.choices(keys, k=num_pairs), draw.choices(values, k=num_pairs), strict=True
        ):
            words += (other, value)
        place = 1 + 2 * round(depth * (num_pairs - 1))
        words[place] = key
        words += [retrieval_model.FILLER] * (length - 3 - 2 * num_pairs)
        words += (retrieval_model.QUESTION, key)
        return NeedlePrompt(" ".join(words), words[place + 1], is_one_word=True)


@dataclass(frozen=True)
class TextHaystack:
    """Sentences, among them `num_keys` about secret numbers of places, one of which is asked for.

    count: how many tokens a text has; num_added: how many more a tokenizer puts around a prompt.
    filler: sentences to hide them in, taken from a place that the seed chooses; left out, they are
    made up. A length is that of the prompt and its answer, which both must fit a model's context.
    """

    count: Callable[[str], int]
    num_added: int = 0
    num_keys: int = 4
    filler: tuple[str, ...] = ()
    name: str = "text"
    num_answer_tokens: int = 12

    def __post_init__(self) -> None:
        if not 1 <= self.num_keys <= len(_NAMES) * len(_KINDS):
            most = len(_NAMES) * len(_KINDS)
            raise ConfigError(f"expected 1 to {most} keys, got {self.num_keys}")

    @property
    def about(self) -> dict[str, Scalar]:
        """With the digest of a text that was given: its file may change."""
        found: dict[str, Scalar] = {"haystack": self.name, "num_keys": self.num_keys}
        if self.filler:
            digest = hashlib.sha256("\n".join(self.filler).encode())
            found["data_digest"] = digest.hexdigest()[:12]
        return found

    def make(self, length: int, depth: float, seed: int) -> NeedlePrompt:
        """A prompt that leaves room for the answer, and for less than one more sentence."""
        _check(length, depth, shortest=1)
        asked_for = length
        length -= self.num_answer_tokens + self.num_added
        draw = random.Random(seed)
        places = [f"{name} {kind}" for name in _NAMES for kind in _KINDS]
        asked, *others = draw.sample(places, self.num_keys)
        numbers = [str(number) for number in draw.sample(NUMBERS, self.num_keys)]
        needles = [_statement(asked, numbers[0])]
        needles += map(_statement, others, numbers[1:])
        head = "Some places in this text have a secret number. Remember them."
        tail = f"\n\nThe secret number of the {asked}, as the text says, is"
        room = length - sum(map(self.count, (head, tail, *needles))) - self.num_keys
        sentences = self._filler(draw, room, length)
        shares = [depth, *(draw.random() for _ in others)]
        while True:
            text = head + " " + " ".join(_hide(sentences, needles, shares)) + tail
            too_much = self.count(text) - length
            if too_much <= 0:
                return NeedlePrompt(text, numbers[0])
            if not sentences:
                raise ConfigError(
                    f"expected a length with room for {self.num_keys} keys, got {asked_for} "
                    "tokens: use longer prompts or fewer keys"
                )
            while sentences and too_much > 0:
                too_much -= self.count(sentences.pop())

    def _filler(self, draw: random.Random, room: int, length: int) -> list[str]:
        """Sentences of `room` tokens or a few more."""
        found: list[str] = []
        place = draw.randrange(len(self.filler)) if self.filler else 0
        while room > 0:
            if self.filler:
                sentence = self.filler[place % len(self.filler)]
                place += 1
            else:
                parts = (draw.choice(words) for words in (_WHO, _DID, _WHAT, _WHEN))
                sentence = " ".join(parts) + "."
            found.append(sentence)
            room -= max(1, self.count(sentence))
            if len(found) > length:
                break
        return found


def split_sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, each in one line; ConfigError if there are none."""
    joined = " ".join(text.split())
    ends = joined.replace("! ", "!\n").replace("? ", "?\n").replace(". ", ".\n")
    found = tuple(line for line in ends.split("\n") if line.strip())
    if not found:
        raise ConfigError("expected a text with sentences to hide needles in, got an empty one")
    return found


def _statement(place: str, number: str) -> str:
    return f"The secret number of the {place} is {number}."


def _hide(sentences: Sequence[str], needles: Sequence[str], shares: Sequence[float]) -> list[str]:
    """The sentences with each needle after its share of them."""
    spots = [round(share * len(sentences)) for share in shares]
    found: list[str] = []
    for index in range(len(sentences) + 1):
        found += [needle for needle, spot in zip(needles, spots, strict=True) if spot == index]
        found += sentences[index : index + 1]
    return found


def _check(length: int, depth: float, shortest: int) -> None:
    if length < shortest:
        raise ConfigError(f"expected prompts of {shortest} tokens or more, got {length}")
    if not 0 <= depth <= 1:
        raise ConfigError(f"expected a depth of 0 to 1, got {depth}")
