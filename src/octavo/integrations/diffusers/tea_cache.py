"""TeaCache: steps that change little reuse what a transformer's blocks added in an earlier one.

The rule: x is the modulated input of the first block, rel_l1 = |x - x_before|.mean() /
|x_before|.mean(), and |polynomial(rel_l1)| estimates the change of the output. The estimates add up
until they reach rel_l1_thresh; below it the blocks are skipped, and what they added when they last
ran is added again. The first and the last step of a generation always run.

The parts are hooks of one name on diffusers' registry, on the transformer (denoising.py) and on its
blocks: the first block decides, the others pass on what they get, the last returns what came into
the first plus the residual. So whatever the model does before and after its blocks stays as it is.

x is what the first block gives to its attention. The block is run up to there, no further: this
needs no formula of ours for any model, and costs a norm.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import HookRegistry
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.diffusers.block_layouts import (
    BlockLayout,
    BlockList,
    blocks_of,
    class_names,
    layout_of,
    read_argument,
)
from octavo.integrations.diffusers.denoising import STEP_HOOK, Denoising, StepHook
from octavo.internals import internals, require


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
    name = type(model).__name__
    found = next((BY_CLASS[base] for base in class_names(model) if base in BY_CLASS), ())
    if not found:
        models = [known.model for group in BY_CLASS.values() for known in group]
        raise ConfigError(
            f"tea_cache: expected coefficients for {name}, got none; known are those of "
            f"{', '.join(models)}: {HOW_TO_FIT}"
        )
    config: Any = model.config
    for known in found:
        if all(config[key] == value for key, value in known.size.items()):
            return known
    size = {key: config[key] for known in found for key in known.size}
    models = [f"{known.model} ({_shown(known.size)})" for known in found]
    raise ConfigError(
        f"tea_cache: expected coefficients for a {name} of {_shown(size)}, got those of "
        f"{', '.join(models)} alone: {HOW_TO_FIT}"
    )


def evaluate(coefficients: Sequence[float], x: float) -> float:
    """The value of a polynomial, highest power first."""
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def _shown(size: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in size.items())


with internals("diffusers"):
    from diffusers.hooks.hooks import BaseState, ModelHook, StateManager

require("diffusers.hooks.hooks.ModelHook", "torch.nn.Module._compiled_call_impl")

Streams = Mapping[str, Tensor]


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


class TeaCacheStepHook(StepHook):
    """The hook on the transformer."""

    def check_call(self, module: nn.Module) -> None:
        """Take compiled blocks' calls over: what decides must not be compiled with the block."""
        super().check_call(module)
        if getattr(module, "is_cache_enabled", False):
            raise ConfigError(
                "tea_cache: expected no other step cache, got one of diffusers that came later: "
                "call disable_cache"
            )
        for block in self.blocks:
            registry = HookRegistry.check_if_exists_or_initialize(block)
            registry.get_hook(STEP_HOOK).adopt_compiled_(block)


class TeaCacheBlockHook(ModelHook):  # type: ignore[misc]  # diffusers has no types
    """The hook on a block.

    steps: the transformer's. pairs: where changes of the input and the residual are noted, if they
    are to be fitted.
    """

    def __init__(
        self,
        steps: StepHook,
        layout: BlockLayout,
        part: BlockList,
        *,
        is_first: bool,
        is_last: bool,
        rel_l1_thresh: float,
        coefficients: Sequence[float],
        pairs: list[tuple[float, float]] | None = None,
    ) -> None:
        super().__init__()
        self.steps, self.layout, self.part = steps, layout, part
        self.is_first, self.is_last = is_first, is_last
        self.rel_l1_thresh, self.coefficients, self.pairs = rel_l1_thresh, coefficients, pairs
        self._compiled: Callable[..., Any] | None = None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the block, or not."""
        state: TeaCacheState | None = self.steps.current
        if state is None:  # the block alone was called
            return self._run(module, args, kwargs)
        streams = self._read_streams(module, args, kwargs)
        if self.is_first:
            self._decide(state, module, streams, args, kwargs)
        if not state.should_compute:
            return self._written(streams | self._reuse(state) if self.is_last else streams)
        out = self._run(module, args, kwargs)
        if self.is_last:
            self._keep(state, out)
        return out

    def adopt_compiled_(self, module: nn.Module) -> None:
        """Call a compiled block from inside the hook, not the other way round."""
        if module._compiled_call_impl is not None:
            self._compiled = module._compiled_call_impl
            module._compiled_call_impl = None

    def give_back_compiled_(self, module: nn.Module) -> None:
        """Undo `adopt_compiled_`."""
        if self._compiled is not None and module._compiled_call_impl is None:
            module._compiled_call_impl = self._compiled

    def _run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._compiled is None:
            return self.fn_ref.original_forward(*args, **kwargs)
        # Without the hook, which is another in each block: all blocks share what is compiled once.
        hooked = module.__dict__["forward"]
        put_forward_(module, self.fn_ref.original_forward)
        try:
            return self._compiled(*args, **kwargs)
        finally:
            module.__dict__["forward"] = hooked

    def _decide(
        self,
        state: TeaCacheState,
        module: nn.Module,
        entry: Streams,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Whether this step runs the blocks."""
        x = self._modulated_input(module, args, kwargs)
        if (form := _form({**entry, "x": x})) != state.form:
            state.reset()
        x_before, state.x, state.entry, state.form = state.x, x, entry, form
        has_cache = x_before is not None and bool(state.residual)
        if has_cache and (self.pairs is not None or not state.is_last_step):
            assert x_before is not None
            state.rel_l1 = relative_change(x, x_before)
            state.accumulated += abs(evaluate(self.coefficients, state.rel_l1))
        # NaN, from an input of zeros, is not below it.
        is_below = state.accumulated < self.rel_l1_thresh
        state.should_compute = not has_cache or state.is_last_step or not is_below
        if state.should_compute:
            state.accumulated = 0.0

    def _modulated_input(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """What the block gives to its attention; nothing after that runs."""
        attention = module.get_submodule(self.layout.attention)

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Reached(read_argument(attention, self.layout.attention_argument, args, kwargs))

        with attention.register_forward_pre_hook(stop, with_kwargs=True, prepend=True):
            try:
                self.fn_ref.original_forward(*args, **kwargs)
            except _Reached as reached:
                return reached.x.detach()
        raise UnsupportedError(
            f"tea_cache: expected {type(module).__name__} to call its {self.layout.attention}, got "
            "a block that did not"
        )

    def _read_streams(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        return {name: read_argument(module, name, args, kwargs) for name in self.part.returns}

    def _written(self, streams: Streams) -> Any:
        """Streams as the block returns them."""
        out = tuple(streams[name] for name in self.part.returns)
        return out if len(out) > 1 else out[0]

    def _entry(self, state: TeaCacheState) -> dict[str, Tensor]:
        """What came into the first block, in the form that the last one has."""
        joined = self.part.joined
        if joined and all(name in state.entry for name in joined):
            return {self.part.returns[0]: torch.cat([state.entry[name] for name in joined], 1)}
        return dict(state.entry)

    def _reuse(self, state: TeaCacheState) -> dict[str, Tensor]:
        entry = self._entry(state)
        state.entry = {}
        return {name: entry[name] + x for name, x in state.residual.items()}

    def _keep(self, state: TeaCacheState, out: Any) -> None:
        """Keep what the blocks have added; nothing follows the last step."""
        found = dict(zip(self.part.returns, out if isinstance(out, tuple) else (out,), strict=True))
        entry = self._entry(state)
        residual = {name: (found[name] - entry[name]).detach() for name in self.layout.kept}
        if self.pairs is not None and state.residual:
            name = self.layout.kept[-1]
            change = relative_change(residual[name], state.residual[name])
            self.pairs.append((state.rel_l1, change))
        if state.is_last_step:
            state.reset()
        else:
            state.residual, state.entry = residual, {}


def put_forward_(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Set a module's forward, as an attribute of its own only if it is not that of its class."""
    if getattr(forward, "__func__", None) is type(module).forward:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


class _Reached(Exception):
    """The first block has come to its attention."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


def relative_change(x: Tensor, before: Tensor) -> float:
    """rel_l1 of two tensors; NaN or Inf if the one before is zero."""
    change = (x - before).abs().mean(dtype=torch.float32)
    return float(change / before.abs().mean(dtype=torch.float32))


def _form(streams: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """What must be the same in the next step for this one to be of any use to it."""
    return {n: None if x is None else (x.shape, x.dtype, x.device) for n, x in streams.items()}


def attach_tea_cache_(
    component: str,
    model: nn.Module,
    denoising: Denoising,
    *,
    rel_l1_thresh: float,
    coefficients: Sequence[float],
    pairs: list[tuple[float, float]] | None = None,
) -> list[str]:
    """Put TeaCache's hooks on a transformer and its blocks; returns the names of the blocks."""
    layout = layout_of(model)
    blocks = blocks_of(model, layout)
    steps = TeaCacheStepHook(
        component,
        denoising,
        StateManager(TeaCacheState),
        [block for _, _, block in blocks],
        layout.time,
        layout.is_rising,
    )
    registry = HookRegistry.check_if_exists_or_initialize(model)
    registry.register_hook(steps, STEP_HOOK)
    for place, (_, part, block) in enumerate(blocks):
        hook = TeaCacheBlockHook(
            steps,
            layout,
            part,
            is_first=place == 0,
            is_last=place == len(blocks) - 1,
            rel_l1_thresh=rel_l1_thresh,
            coefficients=coefficients,
            pairs=pairs,
        )
        HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, STEP_HOOK)
    registry.invalidate_child_registries_cache()
    return [name for name, _, _ in blocks]
