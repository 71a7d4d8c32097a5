"""Needles in haystacks: which of them a model finds, by length and depth, BF16 beside FP8."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.amounts import parse_tokens
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers import retrieval_model
from octavo.integrations.transformers.retrieval_model import load_retrieval_model
from octavo.integrations.transformers.text_model import TextModel, read_text
from octavo.integrations.transformers.tokenizer import text_tokens
from octavo.kernels.device import default_device
from octavo.measure.evaluate.answering import answer_text
from octavo.measure.evaluate.language import (
    Ask,
    Client,
    Keys,
    calibrate_rows,
    counting_tokenizer,
    given_scales,
    load_model,
    participants,
)
from octavo.measure.evaluate.requests import NeedleRequest
from octavo.measure.evaluate.statistics import mean_values, recovery
from octavo.measure.records import Measurement, Scalar
from octavo.measure.run import (
    Outcome,
    Participant,
    Progress,
    Records,
    Watch,
    Workload,
    run_workload,
    unwatched,
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
        if self.repetitions < 1:
            raise ConfigError(f"expected one repetition or more, got {self.repetitions}")

    @property
    def cells(self) -> list[tuple[int, float]]:
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


def make_grid(request: NeedleRequest) -> Grid:
    """The cells that a request asks for."""
    own = "8k,16k,32k,64k,128k" if default_device().capability is not None else "512,1k,2k"
    is_retrieval = request.model is None and not request.endpoint
    lengths = request.lengths or (own if is_retrieval else "1k,2k,4k,8k")
    try:
        depths = tuple(float(part) for part in request.depths.split(","))
    except ValueError:
        raise ConfigError(f"expected depths such as 0,0.5,1, got {request.depths!r}") from None
    return Grid(
        lengths=tuple(map(parse_tokens, lengths.split(","))),
        depths=depths,
        repetitions=request.repetitions,
        seed=request.seed,
    )


def make_haystack(request: NeedleRequest, tokenizer: Any) -> Haystack:
    """The request's haystack; tokenizer: None where prompts are no text."""
    if not request.has_text:
        return PairHaystack()

    @lru_cache(maxsize=4096)
    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return TextHaystack(
        count=count,
        num_added=len(tokenizer("")["input_ids"]),
        num_keys=request.num_keys,
        filler=() if request.data is None else split_sentences(read_text(request.data)),
        name="text" if request.data is None else request.data.name,
    )


def calibration_of(request: NeedleRequest, grid: Grid) -> list[float]:
    """What scales that are calibrated here depend on: the margin, and tokens of a prompt."""
    return [request.margin, min(CALIBRATION_LENGTH, max(grid.lengths))]


Asked = tuple[str, int]  # a prompt, and the most tokens of its answer


def run(
    request: NeedleRequest,
    output: Path | None,
    watch: Watch = unwatched,
    *,
    text_model: TextModel | None = None,
) -> list[Measurement]:
    """Search with every row; a record is in the file `output` as soon as its cell is done.

    text_model: the request's, where it is loaded already.
    """
    records = Records.of_file(output, is_resumed=request.resume)
    scales, grid = given_scales(request), make_grid(request)  # before a model is loaded
    if not request.endpoint:
        load = load_model if request.has_text else _load_retrieval_model
        text_model = text_model or load(request)
        grid = _fitted(grid, text_model, is_strict=request.lengths is not None)
    request = replace(request, lengths=",".join(map(str, grid.lengths)))
    haystack = make_haystack(request, counting_tokenizer(request, text_model))
    if text_model is not None and request.rows_with_scales and not scales:
        scales = _calibrate(request, text_model, grid, haystack, watch)

    def reply(client: Client, asked: Asked) -> str:
        found = client.complete(*asked)
        progress.add(round(grid.num_tokens / (len(grid.cells) * grid.repetitions)))
        return found

    def answer(own: TextModel, asked: Asked) -> str:
        text, max_tokens = asked
        chunk = request.chunk or 2048
        return answer_text(own, text, max_tokens=max_tokens, chunk=chunk, on_step=progress.add)

    calibration = calibration_of(request, grid)
    rows = participants(request, text_model, scales, answer, reply, calibration=calibration)
    progress = Progress(watch, "searching", len(rows) * grid.num_tokens)
    return evaluate(
        rows,
        grid,
        haystack,
        command=request.command,
        records=records,
        on_skip=progress.add,
    )


def _load_retrieval_model(request: NeedleRequest) -> TextModel:
    return load_retrieval_model(dtype=request.dtype)


def evaluate(
    rows: Sequence[Participant[Ask[Asked]]],
    grid: Grid,
    haystack: Haystack,
    *,
    command: str,
    records: Records | None = None,
    on_skip: Callable[[int], None] = lambda num_tokens: None,
) -> list[Measurement]:
    """One record for each row and cell, in this order.

    found_percent is how many needles were found; every row after the first also has what it
    retains of the first row's cell, if anything was found there. on_skip is told of the tokens of
    each cell that the records have already.
    """

    def measure(ask: Ask[Asked], cell: tuple[int, float]) -> Outcome:
        prompts = grid.prompts(haystack, *cell)
        texts = ask([(prompt.text, haystack.num_answer_tokens) for prompt in prompts])
        found = [p.is_found(text) for p, text in zip(prompts, texts, strict=True)]
        return Outcome({**mean_values(found, "found"), "num_found": float(sum(found))})

    def about(length: int, depth: float) -> dict[str, Scalar]:
        numbers = {"repetitions": grid.repetitions, "seed": grid.seed}
        return {**haystack.about, "length": length, "depth": depth, **numbers}

    workload = Workload(
        op="needle",
        command=command,
        cells={cell: about(*cell) for cell in grid.cells},
        measure=measure,
        compare=lambda own, first: recovery(own, first, "found"),
    )
    return run_workload(
        rows, workload, records, on_skip=lambda cell: on_skip(cell[0] * grid.repetitions)
    )


def _fitted(grid: Grid, text_model: TextModel, *, is_strict: bool) -> Grid:
    """The cells of lengths that the model was made for; is_strict: longer ones are an error."""
    limit = text_model.max_length
    if limit is not None and not is_strict:
        fitting = tuple(length for length in grid.lengths if length <= limit)
        grid = replace(grid, lengths=fitting or (limit,))
    longest = max(grid.lengths)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"expected lengths up to {limit}, for which {text_model.name} was made, got {longest}"
        )
    return grid


def _calibrate(
    request: NeedleRequest, text_model: TextModel, grid: Grid, haystack: Haystack, watch: Watch
) -> dict[Keys, ScaleSet]:
    """Static scales by prompts that are not searched, for all kinds of keys that rows have."""
    length, count = int(calibration_of(request, grid)[1]), NUM_CALIBRATION_PROMPTS
    windows = []
    for i in range(count):
        prompt = haystack.make(length, (i + 0.5) / count, prompt_seed(-1, length, 0.0, i))
        windows.append(torch.tensor(text_tokens(text_model.tokenizer, prompt.text)))
    return calibrate_rows(
        text_model,
        windows,
        request.rows_with_scales,
        data=f"{count} other haystacks ({haystack.name}) of {length} tokens",
        margin=request.margin,
        watch=watch,
    )
