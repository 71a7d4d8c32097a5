"""One more token after a long context: a whole decoder, its KV cache in BF16 and in FP8.

All have the same weights, and the same random keys and values in their caches, which are written
there and not computed: a prefill would take minutes. Steps are CUDA graphs replayed in turn, so
that launching is not counted; the token after the context is compared before anyone is timed.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers import kv_cache
from octavo.integrations.transformers.decoder import (
    KeysAndValues,
    cache_bytes,
    fill_cache,
    find_scales,
    make_static_cache,
    random_keys_and_values,
)
from octavo.measure.bench.benchmark import read_rows
from octavo.measure.bench.expect import expect, expect_within
from octavo.measure.bench.timing import capture, machine_of, sample_in_turn_ms
from octavo.measure.records import Measurement, Scalar, timing
from octavo.measure.rows import GENERATE, Row
from octavo.numerics.error import relative_rms

BF16, STOCK = "bf16", "stock"
# Tokens that the caches have room for after the context: warm-up and samples take some.
ROOM = 256
# What FP8 may do to the logits of random weights, and what another order of sums in BF16 does. The
# rounding of many keys and values averages out: FP8 is at 0.01 (tiny, a context of 200), and at
# 0.03 with a single token, where nothing does. Attention that returns zeros is at 1.4.
MAX_ERROR = {"bf16": 0.05, "fp8": 0.15}


@dataclass(frozen=True)
class GenerateCase:
    """So many sequences with a context of so many tokens each."""

    context: int
    batch: int = 1

    def __post_init__(self) -> None:
        expect(min(self.context, self.batch) >= 1, "a context and a batch of at least 1", self)


@dataclass(frozen=True)
class _Prepared:
    """A row that has taken its step once: what it gave, and how to take it again."""

    row: Row
    logits: Tensor
    step: Callable[[], object]
    cache_bytes: int

    def error(self, first: Tensor) -> float:
        """How far the logits are from the first one's; raises if they are wrong."""
        limit = MAX_ERROR["bf16" if self.row.kv_cache is None else "fp8"]
        wanted = f"logits within {limit} of the baseline's"
        error = relative_rms(self.logits, first)
        return expect_within(limit, error, f"generate with {self.row.name}", wanted)


def run_generate(
    model: Any,
    case: GenerateCase,
    recipes: Sequence[str],
    *,
    about: dict[str, Scalar],
    command: str,
) -> list[Measurement]:
    """Time one step of the model after the context, for each row; the first is the baseline.

    bf16 is octavo's own attention over pages that are not quantized, stock is transformers with a
    static cache. Static scales are from the amax of what fills the cache; with unit scales, 1.0 as
    without calibration, saturation is counted.
    """
    rows = read_rows(recipes, GENERATE, (BF16, STOCK))
    if quantized := [row.name for row in rows if row.linear is not None]:
        raise ConfigError(
            f"expected rows of KV caches, got {', '.join(quantized)}: linear layers take part in "
            "calls of generate() alone (--calls)"
        )
    device = next(model.parameters()).device
    is_cuda = device.type == "cuda"
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, 1)
    last = torch.randint(2, model.config.vocab_size, shape, generator=generator).to(device)
    source = random_keys_and_values(model, case.batch)
    with torch.no_grad():
        is_static = any(row.needs_scales for row in rows)
        scales = find_scales(model, source, case.context) if is_static else None
        prepared = [_prepare(model, case, row, last, source, scales) for row in rows]
        errors = [one.error(prepared[0].logits) for one in prepared]
        warmup_ms, num_samples = (60.0, 25) if is_cuda else (0.0, 3)
        steps = [one.step for one in prepared]
        samples = sample_in_turn_ms(steps, device, warmup_ms=warmup_ms, num_samples=num_samples)
    machine, first_ms = machine_of(device), timing(samples[0])["median_ms"]
    sizes = {"context": case.context, "batch": case.batch}
    records = []
    for one, own, error in zip(prepared, samples, errors, strict=True):
        times, name = timing(own), one.row.name
        records.append(
            Measurement(
                op="generate",
                impl="transformers" if name == STOCK else "octavo",
                case={**about, **sizes, "recipe": name, "graphs": is_cuda},
                values={
                    **times,
                    "cache_bytes": one.cache_bytes,
                    "relative_rms": error,
                    "speedup": first_ms / times["median_ms"],
                    "cache_ratio": one.cache_bytes / prepared[0].cache_bytes,
                },
                machine=machine,
                command=command,
                baseline=rows[0].name,
            )
        )
    return records


def _prepare(
    model: Any,
    case: GenerateCase,
    row: Row,
    last: Tensor,
    source: KeysAndValues,
    scales: ScaleSet | None,
) -> _Prepared:
    """Fill a cache, take the step once, and capture it: a graph needs the model no more."""
    is_cuda = last.is_cuda
    if not is_cuda:
        model = copy.deepcopy(model)
    if row.name != STOCK:
        kv_cache.attach(model, row.kv_cache, scales=scales if row.needs_scales else None)
    try:
        cache = make_static_cache(model, case.context + 1 + ROOM)
        fill_cache(model, cache, source, case.context)
        position = torch.full((1, 1), case.context, device=last.device)

        def step() -> Tensor:
            logits: Tensor = model(last, position_ids=position, past_key_values=cache).logits
            return logits

        logits = step().float()
        taken = capture([step]) if is_cuda else step
        return _Prepared(row, logits, taken, cache_bytes(cache))
    finally:
        if row.name != STOCK and is_cuda:
            kv_cache.detach(model)
