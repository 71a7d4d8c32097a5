"""Needles in haystacks: which of them a model finds, by length and depth, BF16 beside FP8."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.measure.evaluate.answering import answer_text
from octavo.measure.evaluate.applied import applied
from octavo.measure.evaluate.endpoint import Client, Endpoint
from octavo.measure.evaluate.needle_prompts import Haystack, NeedlePrompt, prompt_seed
from octavo.measure.evaluate.perplexity_rows import RecipeRow
from octavo.measure.evaluate.recovery import recovery
from octavo.measure.records import Machine, Measurement, Scalar

OP = "needle"

# Asked for the completions of some prompts, with at most so many tokens each.
Complete = Callable[[Sequence[str], int], list[str]]


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


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: who answers, from when `answer` is entered until it is left."""

    name: str
    impl: str
    about: dict[str, Scalar]
    machine: Machine
    answer: Callable[[], AbstractContextManager[Complete]] = field(repr=False)


def local_row(
    text_model: TextModel,
    row: RecipeRow,
    *,
    chunk: int,
    machine: Machine,
    recipe_digest: str | None = None,
    on_step: Callable[[int], None] = lambda num_tokens: None,
) -> Row:
    """A local model with a recipe applied for as long as it answers.

    recipe_digest: of what its name does not say of the recipe.
    """

    @contextmanager
    def answer() -> Iterator[Complete]:
        with applied(text_model.model, row.recipe) as model:
            own = replace(text_model, model=model)

            def complete(texts: Sequence[str], max_tokens: int) -> list[str]:
                return [
                    answer_text(own, text, max_tokens=max_tokens, chunk=chunk, on_step=on_step)
                    for text in texts
                ]

            yield complete

    about: dict[str, Scalar] = {"model": text_model.name, "dtype": text_model.dtype, "chunk": chunk}
    about |= text_model.prompts.about
    if recipe_digest is not None:
        about["recipe_digest"] = recipe_digest
    return Row(name=row.name, impl="transformers", about=about, machine=machine, answer=answer)


def endpoint_row(
    endpoint: Endpoint,
    model: str,
    *,
    tokenizer: str | None = None,
    on_prompt: Callable[[], None] = lambda: None,
) -> Row:
    """A server that answers; the machine of a record is the one that asked.

    tokenizer: the name of the one that lengths are counted by, if one is.
    """

    @contextmanager
    def answer() -> Iterator[Complete]:
        with Client(endpoint) as client:

            def complete(texts: Sequence[str], max_tokens: int) -> list[str]:
                def ask(text: str) -> str:
                    found = client.complete(text, max_tokens)
                    on_prompt()
                    return found

                return client.map(ask, texts)

            yield complete

    about: dict[str, Scalar] = {"model": model, "url": endpoint.url}
    if tokenizer is not None:
        about["tokenizer"] = tokenizer
    return Row(
        name=endpoint.name,
        impl="http",
        about=about,
        machine=Machine.current(),
        answer=answer,
    )


def evaluate(
    rows: Sequence[Row],
    grid: Grid,
    haystack: Haystack,
    *,
    command: str,
    done: Sequence[Measurement] = (),
    on_record: Callable[[Measurement], None] = lambda record: None,
    on_skip: Callable[[int], None] = lambda num_tokens: None,
) -> list[Measurement]:
    """One record for each row and cell, in this order.

    found_percent is how many needles were found; every row after the first also has what it
    recovers of the first row's cell, if anything was found there. done: records of an earlier run;
    a cell that is among them is not measured again. on_record is told of each new one, on_skip of
    the tokens of each other.
    """
    if not rows or len({row.name for row in rows}) != len(rows):
        raise ConfigError(f"expected rows of different names, got {[row.name for row in rows]}")
    known = {_identity(r.impl, r.machine, r.case, r.baseline): r for r in done if r.op == OP}
    first: dict[tuple[int, float], Measurement] = {}
    records: list[Measurement] = []
    for row in rows:
        is_first = row is rows[0]
        baseline = None if is_first else rows[0].name
        cases = {cell: _case(row, grid, haystack, *cell) for cell in grid.cells}
        identities = {
            cell: _identity(row.impl, row.machine, case, baseline) for cell, case in cases.items()
        }
        left = [cell for cell in cases if identities[cell] not in known]
        measured: dict[tuple[int, float], Measurement] = {}
        for cell in cases.keys() - set(left):
            measured[cell] = known[identities[cell]]
            on_skip(cell[0] * grid.repetitions)
        if left:
            with row.answer() as complete:
                for cell in left:
                    prompts = grid.prompts(haystack, *cell)
                    texts = complete([p.text for p in prompts], haystack.num_answer_tokens)
                    found = [p.is_found(t) for p, t in zip(prompts, texts, strict=True)]
                    measured[cell] = Measurement(
                        op=OP,
                        impl=row.impl,
                        case=cases[cell],
                        values=_values(found, None if is_first else first[cell]),
                        machine=row.machine,
                        command=command,
                        baseline=baseline,
                    )
                    on_record(measured[cell])
        if is_first:
            first = measured
        records += [measured[cell] for cell in grid.cells]
    return records


def _case(row: Row, grid: Grid, haystack: Haystack, length: int, depth: float) -> dict[str, Scalar]:
    return {
        **row.about,
        "recipe": row.name,
        **haystack.about,
        "length": length,
        "depth": depth,
        "repetitions": grid.repetitions,
        "seed": grid.seed,
    }


def _identity(
    impl: str, machine: Machine, case: Mapping[str, Scalar], baseline: str | None
) -> object:
    """What must be the same for a cell to be done already."""
    return impl, str(machine), frozenset(case.items()), baseline


def _values(found: Sequence[bool], first: Measurement | None) -> dict[str, float]:
    """Percentages with their standard errors."""
    values = {"found_percent": 100 * statistics.fmean(found), "num_found": float(sum(found))}
    if len(found) > 1:
        error = statistics.stdev(map(float, found)) / math.sqrt(len(found))
        values["found_standard_error_percent"] = 100 * error
    if first is not None:
        values |= recovery(values, first.values, "found")
    return values
