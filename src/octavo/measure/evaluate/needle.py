"""Needles in haystacks: which of them a model finds, by length and depth, BF16 beside FP8."""

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from octavo.amounts import parse_tokens
from octavo.errors import ConfigError
from octavo.integrations.embedded_models import RETRIEVAL_MODEL
from octavo.integrations.transformers.text_model import TextModel, read_text
from octavo.integrations.transformers.tokenizer import text_tokens
from octavo.kernels.device import default_device
from octavo.measure.evaluate.language import (
    Ask,
    Prompt,
    calibrate_rows,
    counting_tokenizer,
    given_scales,
    load_model,
    participants,
)
from octavo.measure.evaluate.requests import NeedleRequest
from octavo.measure.records import Measurement, Scalar
from octavo.measure.run import Outcome, Progress, Records, Watch, Workload, run_workload
from octavo.measure.statistics import (
    mean_values,
    paired_values,
    question_values,
    recovery,
)

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
        """What records say of it: every word but the needle's is one of many keys."""
        return {"haystack": self.name, "num_keys": "all"}

    def make(self, length: int, depth: float, seed: int) -> NeedlePrompt:
        """A prompt of `length` words, which are as many tokens; depth: the needle's, 0 to 1."""
        _check(length, depth, shortest=5)
        draw = random.Random(seed)
        known = RETRIEVAL_MODEL.load_module()
        keys, values = list(known.KEYS), known.VALUES
        key = keys.pop(draw.randrange(len(keys)))
        num_pairs = (length - 3) // 2
        words = [known.START]
        for other, value in zip(
            draw.choices(keys, k=num_pairs), draw.choices(values, k=num_pairs), strict=True
        ):
            words += (other, value)
        place = 1 + 2 * round(depth * (num_pairs - 1))
        words[place] = key
        words += [known.FILLER] * (length - 3 - 2 * num_pairs)
        words += (known.QUESTION, key)
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
        most = len(_NAMES) * len(_KINDS)
        if not 1 <= self.num_keys <= most:
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
        if self.filler:
            place = draw.randrange(len(self.filler))
            source: Iterator[str] = cycle(self.filler[place:] + self.filler[:place])
        else:
            parts = repeat((_WHO, _DID, _WHAT, _WHEN))
            source = (" ".join(map(draw.choice, words)) + "." for words in parts)
        sentences: list[str] = []
        while room > 0 and len(sentences) <= length:
            sentences.append(next(source))
            room -= max(1, self.count(sentences[-1]))
        shares = [depth, *(draw.random() for _ in others)]
        while True:
            # Each needle stands after its share of the sentences.
            spots = [round(share * len(sentences)) for share in shares]
            hidden = list(sentences)
            for spot, needle in sorted(zip(spots, needles, strict=True), key=itemgetter(0))[::-1]:
                hidden.insert(spot, needle)
            text = head + " " + " ".join(hidden) + tail
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


Haystack = PairHaystack | TextHaystack


def split_sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, each in one line; ConfigError if there are none."""
    found = tuple(filter(None, re.split("(?<=[.!?]) ", " ".join(text.split()))))
    if not found:
        raise ConfigError("expected a text with sentences to hide needles in, got an empty one")
    return found


def _statement(place: str, number: str) -> str:
    return f"The secret number of the {place} is {number}."


def _check(length: int, depth: float, shortest: int) -> None:
    if length < shortest:
        raise ConfigError(f"expected prompts of {shortest} tokens or more, got {length}")
    if not 0 <= depth <= 1:
        raise ConfigError(f"expected a depth of 0 to 1, got {depth}")


Cell = tuple[int, float]  # a length in tokens and a depth
CALIBRATION_LENGTH, NUM_CALIBRATION_PROMPTS = 2048, 4


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The cells of a heat map: lengths in tokens × depths from 0 to 1, each some times."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    repetitions: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, numbers in (("lengths", self.lengths), ("depths", self.depths)):
            if not numbers or len(set(numbers)) != len(numbers):
                raise ConfigError(f"expected different {name}, got {list(numbers)}")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(f"expected depths of 0 to 1, got {list(self.depths)}")

    @property
    def cells(self) -> list[Cell]:
        """(length, depth) of every cell, short ones first."""
        return [(length, depth) for length in sorted(self.lengths) for depth in self.depths]

    @property
    def num_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(self.lengths) * len(self.depths) * self.repetitions

    def prompts(self, haystack: Haystack, length: int, depth: float) -> list[NeedlePrompt]:
        """The prompts of a cell, the same for all rows."""
        seeds = (prompt_seed(self.seed, length, depth, i) for i in range(self.repetitions))
        return [haystack.make(length, depth, seed) for seed in seeds]


def make_grid(request: NeedleRequest, text_model: TextModel | None = None) -> Grid:
    """The cells that a request asks for, of lengths that the model was made for."""
    own = "8k,16k,32k,64k,128k" if default_device().capability is not None else "512,1k,2k"
    is_retrieval = request.model is None and not request.endpoint
    asked = request.lengths or (own if is_retrieval else "1k,2k,4k,8k")
    lengths = tuple(map(parse_tokens, asked.split(",")))
    limit = None if text_model is None else text_model.max_length
    if text_model is not None and limit is not None:
        if request.lengths is None:
            lengths = tuple(length for length in lengths if length <= limit) or (limit,)
        if max(lengths) > limit:
            raise ConfigError(
                f"expected lengths up to {limit}, for which {text_model.name} was made, got "
                f"{max(lengths)}"
            )
    try:
        depths = tuple(float(part) for part in request.depths.split(","))
    except ValueError:
        raise ConfigError(f"expected depths such as 0,0.5,1, got {request.depths!r}") from None
    return Grid(lengths=lengths, depths=depths, repetitions=request.repetitions, seed=request.seed)


def make_haystack(request: NeedleRequest, tokenizer: Any) -> Haystack:
    """The request's haystack; tokenizer: None where prompts are no text."""
    if not request.has_text:
        return PairHaystack()

    def count(text: str) -> int:
        return len(text_tokens(tokenizer, text, add_special_tokens=False))

    return TextHaystack(
        count=lru_cache(maxsize=4096)(count),
        num_added=len(tokenizer("")["input_ids"]),
        num_keys=request.num_keys,
        filler=() if request.data is None else split_sentences(read_text(request.data)),
        name="text" if request.data is None else request.data.name,
    )


def calibration_of(request: NeedleRequest, grid: Grid) -> tuple[float, int]:
    """What scales that are calibrated here depend on: the margin, and tokens of a prompt."""
    return request.margin, min(CALIBRATION_LENGTH, max(grid.lengths))


def run(
    request: NeedleRequest,
    output: Path | None,
    watch: Watch,
    *,
    text_model: TextModel | None = None,
) -> list[Measurement]:
    """Search with every row; a record is in the file `output` as soon as its cell is done.

    text_model: the request's, where it is loaded already.
    """
    records = Records.of_file(output, is_resumed=request.resume)
    scales, grid = given_scales(request), make_grid(request)  # before a model is loaded
    if not request.endpoint:
        text_model = text_model or load_model(request)
        grid = make_grid(request, text_model)
    request = replace(request, lengths=",".join(map(str, grid.lengths)))
    haystack = make_haystack(request, counting_tokenizer(request, text_model))
    calibration = calibration_of(request, grid)
    if text_model is not None and not scales:
        tokenizer, count, length = text_model.tokenizer, NUM_CALIBRATION_PROMPTS, calibration[1]

        def other_prompts() -> tuple[str, list[torch.Tensor]]:
            """Prompts that are not searched, and what records call them."""
            windows = []
            for i in range(count):
                seed = prompt_seed(-1, length, 0.0, i)
                text = haystack.make(length, (i + 0.5) / count, seed).text
                windows.append(torch.tensor(text_tokens(tokenizer, text)))
            return f"{count} other haystacks ({haystack.name}) of {length} tokens", windows

        scales = calibrate_rows(request, text_model, other_prompts, watch)
    num_rows = len(request.endpoint or request.parsed_rows)
    progress = Progress(watch, "searching", num_rows * grid.num_tokens)
    rows = participants(request, text_model, scales, progress, calibration=calibration)
    return run_workload(
        rows,
        make_workload(grid, haystack, request.command),
        records,
        on_skip=lambda cell: progress.add(cell[0] * grid.repetitions),
    )


def make_workload(grid: Grid, haystack: Haystack, command: str) -> Workload[Ask, Cell]:
    """Every cell of a grid: found_percent is how many of its needles a row finds.

    Rows after the first also have what they retain of the first row's cell, if anything was found
    there.
    """

    def measure(ask: Ask, cell: Cell) -> Outcome:
        prompts = grid.prompts(haystack, *cell)
        texts = ask([Prompt(one.text, haystack.num_answer_tokens, cell[0]) for one in prompts])
        found = [p.is_found(text) for p, text in zip(prompts, texts, strict=True)]
        own = mean_values(found, "found") | question_values(list(map(float, found)))
        return Outcome({**own, "num_found": float(sum(found))})

    numbers = {"repetitions": grid.repetitions, "seed": grid.seed}
    return Workload(
        op="needle",
        command=command,
        cells={
            (length, depth): {**haystack.about, "length": length, "depth": depth, **numbers}
            for length, depth in grid.cells
        },
        measure=measure,
        compare=lambda own, first: recovery(own, first, "found") | paired_values(own, first),
    )
