"""TeaCache's polynomial for a model, fitted to what its pipeline does without a cache."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from octavo.errors import ConfigError
from octavo.integrations.diffusers.denoising import Denoising
from octavo.integrations.diffusers.pipeline import find_transformers
from octavo.integrations.diffusers.step_cache import (
    check_transformer,
    detach_step_cache_,
    scheduler_finder,
)
from octavo.integrations.diffusers.steps import Prompt, Run
from octavo.integrations.diffusers.tea_cache import attach_tea_cache_

DEGREE = 4


def fit_tea_cache(
    pipe: Any, prompts: Sequence[Prompt], *, num_inference_steps: int, seed: int = 0, **options: Any
) -> dict[str, list[float]]:
    """TeaCache's coefficients for each transformer of a pipeline, as its config takes them.

    The pipeline runs once for each prompt, without a cache; the change of the modulated input from
    step to step and that of what the blocks add make one pair. Use the number of steps and the
    sizes that the cache is for, and prompts unlike each other: texts, or the arguments of a call.
    options: others of the pipeline's call, such as height, width and guidance_scale. The i-th
    prompt has the noise of seed + i.
    """
    if isinstance(pipe, nn.Module):
        raise ConfigError(
            f"fit_tea_cache: expected a pipeline, got {type(pipe).__name__}, a model alone"
        )
    transformers = find_transformers(pipe)
    denoising = Denoising(scheduler_finder(pipe, None))
    for name, part in transformers.items():
        check_transformer(name, part, "tea_cache")
    run = Run(num_inference_steps=num_inference_steps, seed=seed, call_options=options)
    calls = run.calls(pipe, prompts)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in transformers}
    try:
        for name, part in transformers.items():
            attach_tea_cache_(
                *(name, part, denoising), rel_l1_thresh=0, coefficients=(0.0,), pairs=pairs[name]
            )
        for call in calls:
            call()
    finally:
        for part in transformers.values():
            detach_step_cache_(part)
    return {name: fit_polynomial(pairs[name], name) for name in pairs}


def fit_polynomial(pairs: Sequence[tuple[float, float]], name: str = "pairs") -> list[float]:
    """The polynomial of degree 4 that is nearest to the pairs (x, y), highest power first."""
    found = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    found = found[np.isfinite(found).all(1)]
    num_different = len(np.unique(found[:, 0]))
    if num_different <= DEGREE:
        raise ConfigError(
            f"{name}: expected at least {DEGREE + 1} different changes from one step to the next, "
            f"got {num_different}: use more steps or prompts"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", np.exceptions.RankWarning)
        try:
            fitted = np.polyfit(found[:, 0], found[:, 1], DEGREE)
        except np.exceptions.RankWarning:
            raise ConfigError(
                f"{name}: expected changes that differ from step to step, got "
                f"{found[:, 0].min():.3g} to {found[:, 0].max():.3g}: use more steps or prompts"
            ) from None
    return [float(value) for value in fitted]
