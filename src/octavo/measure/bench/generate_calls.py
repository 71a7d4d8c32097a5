"""generate() of a transformers model, called as users call it: eagerly, after a real prompt.

No graphs, no compiler, no settings but the recipe: what a token costs here includes all that the
host does for it. A row's time per token is the difference of two calls with the same prompt, one
for few new tokens and one for many, over the tokens between them. Rows take turns.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.integrations.apply import apply_
from octavo.measure.bench.benchmark import read_rows
from octavo.measure.bench.expect import expect, expect_within
from octavo.measure.bench.generate import STOCK
from octavo.measure.bench.timing import machine_of
from octavo.measure.records import Measurement, Scalar, timing
from octavo.measure.rows import GENERATE, Row
from octavo.numerics.error import relative_rms

ROWS = (STOCK, "kv", "kv+linear")
# Tokens of the shorter call.
FEW_TOKENS = 2
# What is compared: the prompt's hidden states after so many layers. Random weights make any
# difference larger from layer to layer: after all of them, even BF16 with another order of sums is
# far away.
NUM_LAYERS = 2
# Their relative error; FP8 is at 0.01 to 0.05, attention that returns zeros at 0.3 to 0.8 (tiny).
MAX_ERROR = 0.15
NUM_ROUNDS = {"cuda": 7, "cpu": 1}


@dataclass(frozen=True)
class CallCase:
    """So many sequences, each with a prompt and new tokens of these lengths."""

    prompt: int
    new_tokens: int = 34
    batch: int = 1

    def __post_init__(self) -> None:
        expect(min(self.prompt, self.batch) >= 1, "a prompt and a batch of at least 1", self)
        expect(self.new_tokens > FEW_TOKENS, f"more than {FEW_TOKENS} new tokens", self.new_tokens)


@dataclass(frozen=True)
class _Entry:
    """A row, its model, and how far its hidden states are from the baseline's."""

    row: Row
    model: Any
    error: float


@torch.no_grad()
def run_generate_calls(
    model: Any,
    case: CallCase,
    recipes: Sequence[str],
    *,
    about: dict[str, Scalar],
    command: str,
) -> list[Measurement]:
    """The records of all rows; the first is the baseline. stock is the model as it comes.

    A row's model is a copy, to which its recipe is applied.
    """
    rows = read_rows(recipes, GENERATE, (STOCK,))
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.prompt)
    prompt = torch.randint(2, model.config.vocab_size, shape, generator=generator).to(device)
    entries: list[_Entry] = []
    expected: Tensor | None = None
    for row in rows:
        own = copy.deepcopy(model)
        if (recipe := row.recipe()) is not None:
            apply_(own, recipe)
        states = own(prompt, logits_to_keep=1, output_hidden_states=True).hidden_states
        found = states[min(NUM_LAYERS, len(states) - 1)].float()
        del states  # those of all layers are large
        expected = found if expected is None else expected
        wanted = f"hidden states within {MAX_ERROR} of the baseline's"
        error = relative_rms(found, expected)
        expect_within(MAX_ERROR, error, f"generate() with {row.name}", wanted)
        entries.append(_Entry(row, own, error))
    samples = _sample_ms(entries, prompt, case)
    machine, first_ms = machine_of(device), timing(samples[0])["median_ms"]
    records = []
    for one, own_ms in zip(entries, samples, strict=True):
        times = timing(own_ms)
        records.append(
            Measurement(
                op="generate_call",
                impl="transformers" if one.row.is_plain else "octavo",
                case={
                    **about,
                    "prompt": case.prompt,
                    "new_tokens": case.new_tokens,
                    "batch": case.batch,
                    "recipe": one.row.name,
                },
                values={
                    **times,
                    "relative_rms": one.error,
                    "speedup": first_ms / times["median_ms"],
                },
                machine=machine,
                command=command,
                baseline=rows[0].name,
            )
        )
    return records


def _sample_ms(entries: Sequence[_Entry], prompt: Tensor, case: CallCase) -> list[list[float]]:
    """Milliseconds of one more token, for each entry, of several rounds."""

    def once(model: Any, num_tokens: int) -> float:
        start = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        if prompt.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def per_token(model: Any) -> float:
        spent = once(model, case.new_tokens) - once(model, FEW_TOKENS)
        return spent / (case.new_tokens - FEW_TOKENS)

    for one in entries:  # what first calls compile and allocate does not count
        once(one.model, case.new_tokens)
    num_rounds = NUM_ROUNDS[prompt.device.type]
    rounds = [[per_token(one.model) for one in entries] for _ in range(num_rounds)]
    return [list(samples) for samples in zip(*rounds, strict=True)]
