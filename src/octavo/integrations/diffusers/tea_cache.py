"""TeaCache: steps that change little reuse what a transformer's blocks added in an earlier one.

The rule: x is the modulated input of the first block, rel_l1 = |x - x_before|.mean() /
|x_before|.mean(), and |polynomial(rel_l1)| estimates the change of the output. The estimates add up
until they reach rel_l1_thresh; below it the blocks are skipped, and what they added when they last
ran is added again. The first and the last step of a generation always run.

While a transformer runs, its lists of blocks hand out calls instead of blocks (`CachedBlocks`): the
first decides, the others pass on what they get if the step is skipped, and the last returns what
came into the first plus the residual. What the model does before and after its blocks stays as it
is, and the blocks themselves know nothing of it, compiled or not.

x is what the first block gives to its attention. The block is run up to there, no further: this
needs no formula of ours for any model, and costs a norm.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import HookRegistry
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.diffusers.denoising import (
    STEP_HOOK,
    BlockList,
    Denoising,
    StepHook,
    class_names,
    layout_of,
    read_argument,
)
from octavo.internals import internals, require

with internals("diffusers"):
    from diffusers.hooks.hooks import BaseState, StateManager

require("diffusers.hooks.hooks.ModelHook")

Streams = Mapping[str, Tensor]
# Of the polynomials that are fitted.
DEGREE = 4
# Where a list of blocks has the hook on its transformer, and what it is in the layout.
_CALLS = "_octavo_calls"


@dataclass(frozen=True)
class Coefficients:
    """A polynomial, highest power first: the model that it is for, by its size, and its source."""

    values: tuple[float, ...]
    model: str
    size: Mapping[str, int]
    source: str


BY_CLASS: Mapping[str, tuple[Coefficients, ...]] = {
    "FluxTransformer2DModel": (
        Coefficients(
            (4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401, 2.64230861e-01),
            model="FLUX.1-dev",
            size={"num_layers": 19, "num_single_layers": 38},
            source="TeaCache4FLUX of ali-vilab/TeaCache; vllm-omni 0.30 has the same",
        ),
        Coefficients(
            (25932.645, -14720.2587, 3089.70585, -281.272785, 9.45977427),
            model="small-image",
            size={"num_layers": 1, "num_single_layers": 5, "num_attention_heads": 3},
            source="octavo.fit_tea_cache: the first 8 of its prompts, 20 steps, float32",
        ),
    ),
    "QwenImageTransformer2DModel": (
        Coefficients(
            (-450.0, 280.0, -45.0, 3.2, -0.02),
            model="Qwen-Image",
            size={"num_layers": 60},
            source="ComfyUI-TeaCache, tuned by hand; vllm-omni 0.30 has the same",
        ),
    ),
}

HOW_TO_FIT = (
    "fit them with octavo.fit_tea_cache(pipe, prompts, num_inference_steps=…) and give them as "
    'config={"coefficients": …}'
)


def known_coefficients(model: nn.Module) -> Coefficients:
    """The polynomial for a model; an error that says how to fit one if there is none."""
    config: Any = model.config
    keys: dict[str, Any] = {}
    for known in (one for base in class_names(model) for one in BY_CLASS.get(base, ())):
        if all(config[key] == value for key, value in known.size.items()):
            return known
        keys |= {key: config[key] for key in known.size}
    of_size = f" of {_shown(keys)}" if keys else ""
    models = [f"{one.model} ({_shown(one.size)})" for group in BY_CLASS.values() for one in group]
    raise ConfigError(
        f"tea_cache: expected coefficients for a {type(model).__name__}{of_size}, got those of "
        f"{', '.join(models)} alone: {HOW_TO_FIT}"
    )


def _shown(size: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in size.items())


class TeaCacheState(BaseState):  # type: ignore[misc]  # diffusers has no types
    """What one context keeps from step to step, and of the step that runs."""

    def __init__(self) -> None:
        self.is_last_step = False
        self.should_compute = True
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.x: Tensor | None = None
        self.form: object = None
        self.entry: Streams = {}
        self.residual: Streams = {}
        self.accumulated = 0.0
        self.rel_l1 = math.nan


class CachedBlocks(nn.ModuleList):
    """A list of blocks that hands out TeaCache's calls while its transformer runs."""

    def __iter__(self) -> Iterator[Any]:
        steps, part = vars(self).get(_CALLS, (None, None))  # slices of the list have none
        if steps is None or steps.current is None:
            return super().__iter__()
        return iter([partial(steps.run_block, part, block) for block in self._modules.values()])


class TeaCacheStepHook(StepHook):
    """The hook on the transformer.

    pairs: where changes of the input and of the residual are noted, if they are to be fitted.
    """

    backend = "tea_cache"

    def __init__(
        self,
        component: str,
        denoising: Denoising,
        model: nn.Module,
        rel_l1_thresh: float,
        coefficients: Sequence[float],
        pairs: list[tuple[float, float]] | None = None,
    ) -> None:
        layout = layout_of(model)
        found = layout.blocks(model)
        blocks = {name: block for name, _, block in found}
        super().__init__(component, denoising, StateManager(TeaCacheState), blocks, layout)
        self.rel_l1_thresh, self.coefficients, self.pairs = rel_l1_thresh, coefficients, pairs
        self._first, self._last = found[0][2], found[-1][2]
        for part in layout.lists:
            blocks_of_part = model.get_submodule(part.name)
            self.patch.set(blocks_of_part, "__class__", CachedBlocks)
            self.patch.set(blocks_of_part, _CALLS, (self, part))

    def check_call(self, module: nn.Module) -> None:
        """Raise for another cache, too."""
        super().check_call(module)
        if getattr(module, "is_cache_enabled", False):
            raise ConfigError(
                "tea_cache: expected no other step cache, got one of diffusers that came later: "
                "call disable_cache"
            )

    def run_block(self, part: BlockList, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a block of a list, or not."""
        state: TeaCacheState = self.current
        streams = {name: read_argument(block, name, args, kwargs) for name in part.returns}
        if block is self._first:
            self._decide(state, self._modulated_input(block, args, kwargs), streams)
        if state.should_compute:
            out = block(*args, **kwargs)
            if block is self._last:
                self._keep(state, part, out)
            return out
        if block is self._last:
            entry = _entry(state, part)
            streams |= {name: entry[name] + x for name, x in state.residual.items()}
            state.entry = {}
        return tuple(streams.values()) if len(streams) > 1 else streams[part.returns[0]]

    def _decide(self, state: TeaCacheState, x: Tensor, entry: Streams) -> None:
        """Whether this step runs the blocks."""
        # What must be the same in the next step for this one to be of any use to it.
        streams: Mapping[str, Tensor | None] = {**entry, "x": x}  # some are not given
        form = {
            name: None if stream is None else (stream.shape, stream.dtype, stream.device)
            for name, stream in streams.items()
        }
        if form != state.form:
            state.reset()
        x_before, state.x, state.entry, state.form = state.x, x, entry, form
        has_cache = x_before is not None and bool(state.residual)
        if has_cache and (self.pairs is not None or not state.is_last_step):
            assert x_before is not None
            state.rel_l1 = relative_change(x, x_before)
            state.accumulated += abs(float(np.polyval(self.coefficients, state.rel_l1)))
        # NaN, from an input of zeros, is not below it.
        is_below = state.accumulated < self.rel_l1_thresh
        state.should_compute = not has_cache or state.is_last_step or not is_below
        if state.should_compute:
            state.accumulated = 0.0

    def _modulated_input(
        self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """What the block gives to its attention; nothing after that runs."""
        attention = block.get_submodule(self.layout.attention)

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Reached(read_argument(attention, self.layout.attention_argument, args, kwargs))

        with attention.register_forward_pre_hook(stop, with_kwargs=True, prepend=True):
            try:
                block.forward(*args, **kwargs)
            except _Reached as reached:
                x: Tensor = reached.args[0]
                return x.detach()
        raise UnsupportedError(
            f"tea_cache: expected {type(block).__name__} to call its {self.layout.attention}, got "
            "a block that did not"
        )

    def _keep(self, state: TeaCacheState, part: BlockList, out: Any) -> None:
        """Keep what the blocks have added; nothing follows the last step."""
        found = dict(zip(part.returns, out if isinstance(out, tuple) else (out,), strict=True))
        entry = _entry(state, part)
        residual = {name: (found[name] - entry[name]).detach() for name in self.layout.kept}
        if self.pairs is not None and state.residual:
            name = self.layout.kept[-1]
            change = relative_change(residual[name], state.residual[name])
            self.pairs.append((state.rel_l1, change))
        if state.is_last_step:
            state.reset()
        else:
            state.residual, state.entry = residual, {}


def _entry(state: TeaCacheState, part: BlockList) -> Streams:
    """What came into the first block, in the form that the blocks of the last list have."""
    if part.joined and all(name in state.entry for name in part.joined):
        return {part.returns[0]: torch.cat([state.entry[name] for name in part.joined], 1)}
    return state.entry


class _Reached(Exception):
    """The first block has come to its attention, with this input."""


def relative_change(x: Tensor, before: Tensor) -> float:
    """rel_l1 of two tensors; NaN or Inf if the one before is zero."""
    change = (x - before).abs().mean(dtype=torch.float32)
    return float(change / before.abs().mean(dtype=torch.float32))


def attach_tea_cache_(
    component: str,
    model: nn.Module,
    denoising: Denoising,
    rel_l1_thresh: float,
    coefficients: Sequence[float],
    pairs: list[tuple[float, float]] | None = None,
) -> StepHook:
    """Put TeaCache on a transformer; returns the hook."""
    steps = TeaCacheStepHook(component, denoising, model, rel_l1_thresh, coefficients, pairs)
    HookRegistry.check_if_exists_or_initialize(model).register_hook(steps, STEP_HOOK)
    return steps


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
