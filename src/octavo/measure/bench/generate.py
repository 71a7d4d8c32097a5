"""One more token after a long context: a whole decoder, its KV cache in BF16 and in FP8.

All who take part have the same weights, and the same random keys and values in their caches, which
are written there and not computed: a prefill would take minutes. Steps are captured as
CUDA graphs and replayed in turn, so that launching is not counted; the token after the context is
compared before anyone is timed.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers import kv_cache
from octavo.integrations.transformers.decoder import (
    KeysAndValues,
    cache_bytes,
    fill_cache,
    find_scales,
    make_static_cache,
    random_keys_and_values,
)
from octavo.kernels.device import describe
from octavo.measure.bench.timing import capture, sample_in_turn_ms
from octavo.measure.records import Machine, Measurement, Scalar, timing
from octavo.numerics.error import relative_rms
from octavo.recipe import KvCacheSettings

# What a recipe stores: None is keys and values as they are, in pages. Static scales are from the
# amax of what fills the cache, unit scales 1.0, as without calibration: saturation is then counted.
RECIPES: dict[str, KvCacheSettings | None] = {
    "bf16": None,
    "fp8": KvCacheSettings(scaling="static"),
    "fp8-head": KvCacheSettings(granularity="head", scaling="static"),
    "fp8-unit": KvCacheSettings(scaling="unit"),
    "fp8-token": KvCacheSettings(granularity="token"),
}
STOCK = "stock"
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
        if self.context < 1 or self.batch < 1:
            raise ConfigError(f"expected a context and a batch of at least 1, got {self}")


@dataclass(frozen=True)
class _Contender:
    recipe: str
    logits: Tensor
    step: Callable[[], object]
    cache_bytes: int


def run_generate(
    model: Any,
    case: GenerateCase,
    recipes: Sequence[str],
    *,
    about: dict[str, Scalar],
    command: str,
) -> list[Measurement]:
    """Time one step of the model after the context, for each recipe; the first is the baseline."""
    if unknown := [name for name in recipes if name != STOCK and name not in RECIPES]:
        raise ConfigError(f"expected recipes of {STOCK}, {', '.join(RECIPES)}; got {unknown}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, 1)
    last = torch.randint(2, model.config.vocab_size, shape, generator=generator).to(device)
    source = random_keys_and_values(model, case.batch)
    with torch.no_grad():
        scales = None
        if any(_is_static(recipe) for recipe in recipes):
            scales = find_scales(model, source, case.context)
        contenders = [_prepare(model, case, recipe, last, source, scales) for recipe in recipes]
        errors = _check(contenders)
        steps = [contender.step for contender in contenders]
        is_cuda = device.type == "cuda"
        warmup_ms, num_samples = (60.0, 25) if is_cuda else (0.0, 3)
        samples = sample_in_turn_ms(steps, device, warmup_ms=warmup_ms, num_samples=num_samples)
    described = describe(device)
    machine = Machine.current(gpu=described.gpu, capability=described.capability)
    first_ms = timing(samples[0])["median_ms"]
    records = []
    for contender, own, error in zip(contenders, samples, errors, strict=True):
        values = timing(own)
        values |= {"cache_bytes": contender.cache_bytes, "relative_rms": error}
        values["speedup"] = first_ms / values["median_ms"]
        values["cache_ratio"] = contender.cache_bytes / contenders[0].cache_bytes
        records.append(
            Measurement(
                op="generate",
                impl="transformers" if contender.recipe == STOCK else "octavo",
                case={**about, "context": case.context, "batch": case.batch}
                | {"recipe": contender.recipe, "graphs": is_cuda},
                values=values,
                machine=machine,
                command=command,
                baseline=contenders[0].recipe,
            )
        )
    return records


def _is_static(recipe: str) -> bool:
    settings = RECIPES.get(recipe)
    return settings is not None and settings.scaling == "static"


def _prepare(
    model: Any,
    case: GenerateCase,
    recipe: str,
    last: Tensor,
    source: KeysAndValues,
    scales: ScaleSet | None,
) -> _Contender:
    """Fill a cache, take the step once, and capture it: a graph needs the model no more."""
    is_cuda = last.is_cuda
    if not is_cuda:
        model = copy.deepcopy(model)
    if recipe != STOCK:
        kv_cache.attach(model, RECIPES[recipe], scales=scales if _is_static(recipe) else None)
    try:
        cache = make_static_cache(model, case.context + 1 + ROOM)
        fill_cache(model, cache, source, case.context)
        position = torch.full((1, 1), case.context, device=last.device)

        def step() -> Tensor:
            logits: Tensor = model(last, position_ids=position, past_key_values=cache).logits
            return logits

        logits = step().float()
        taken = capture([step]) if is_cuda else step
        return _Contender(recipe, logits, taken, cache_bytes(cache))
    finally:
        if recipe != STOCK and is_cuda:
            kv_cache.detach(model)


def _check(contenders: list[_Contender]) -> list[float]:
    """How far the logits are from the first one's; raises if they are wrong."""
    errors = []
    for contender in contenders:
        error = relative_rms(contender.logits, contenders[0].logits)
        limit = MAX_ERROR["fp8" if contender.recipe.startswith("fp8") else "bf16"]
        if not error <= limit or math.isnan(error):
            raise UnsupportedError(
                f"generate with {contender.recipe} is wrong: expected logits within {limit} of "
                f"{contenders[0].recipe}'s, got {error:.3g}"
            )
        errors.append(error)
    return errors
