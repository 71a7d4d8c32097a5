"""A pipeline's transformers on inputs that they have had: what quantizing some layers changes.

Whole pictures would differ by more than the layers: after some steps, two runs draw other details.
Here every pass has the inputs of the plain run, so that its error is that of the layers alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.diffusers.pipeline import find_transformers
from octavo.integrations.diffusers.steps import Prompt, Run, Steps, counted_steps
from octavo.integrations.fused_layers import shards_of
from octavo.integrations.linear import LinearPlan, put_linear_
from octavo.internals import internals
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.recipe import LinearSettings

with internals("torch"):
    from torch.utils._pytree import tree_flatten, tree_map

# A plain transformer differs from itself by less, on any device.
MAX_FLOOR = 1e-3


@dataclass(frozen=True)
class Pass:
    """One pass of a transformer: its inputs, and what it made of them, flat and in float32."""

    component: str
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor


class Replay:
    """The passes of a pipeline's transformers at some steps of some prompts."""

    def __init__(self, pipe: Any, passes: Sequence[Pass]) -> None:
        self.modules = find_transformers(pipe)
        self.passes = list(passes)

    def errors(self, components: Sequence[str]) -> dict[int, float]:
        """The error of these transformers as they are now, by step: relative RMS of the result."""
        squares: dict[int, list[float]] = {}
        for one in self.passes:
            if one.component in components:
                error = relative_rms(self._run(one), one.result)
                squares.setdefault(one.step, []).append(error**2)
        return {step: math.sqrt(sum(x) / len(x)) for step, x in squares.items()}

    def check(self) -> float:
        """The error of the plain transformers against themselves, which must be none or small."""
        floor = overall(self.errors(list(self.modules)))
        if not floor <= MAX_FLOOR:
            raise UnsupportedError(
                "expected transformers that make the same of the same inputs, got a difference of "
                f"{floor:.3g}: turn dropout off"
            )
        return floor

    def _run(self, one: Pass) -> Tensor:
        module = self.modules[one.component]
        with torch.no_grad():
            return flat(module(*_copied(one.args), **_copied(one.kwargs)))


def overall(errors: Mapping[int, float]) -> float:
    """The error of all steps: the root of the mean square."""
    if not errors:
        return math.nan
    return math.sqrt(sum(x**2 for x in errors.values()) / len(errors))


def record(
    pipe: Any,
    prompts: Sequence[Prompt],
    run: Run,
    num_timesteps: int,
    on_step: Callable[[int], None] = lambda num_steps: None,
) -> Replay:
    """Run a pipeline as it is, and keep the passes of its transformers at some of the steps.

    The steps are spread evenly from the first to the last; on_step: called with the number of
    steps so far.
    """
    if num_timesteps < 1:
        raise ConfigError(f"expected num_timesteps from 1 on, got {num_timesteps}")
    calls, num_steps = run.calls(pipe, prompts), run.num_steps(pipe)
    chosen = spread_evenly(num_steps, num_timesteps)
    passes: list[Pass] = []
    num_done = 0

    def step_done(steps: Steps) -> None:
        on_step(num_done + min(steps.index, num_steps))

    with counted_steps(pipe, step_done) as steps, _Recorder(pipe, passes, steps, chosen).hooked():
        for call in calls:
            steps.start()
            call()
            num_done += num_steps
    return Replay(pipe, passes)


def spread_evenly(num_steps: int, num_chosen: int) -> set[int]:
    """`num_chosen` of the steps, the first and the last included if there are two or more."""
    if num_chosen >= num_steps:
        return set(range(num_steps))
    if num_chosen == 1:
        return {num_steps // 2}
    return {round(i * (num_steps - 1) / (num_chosen - 1)) for i in range(num_chosen)}


class _Recorder:
    """Keeps the passes of a pipeline's transformers at the chosen steps."""

    def __init__(self, pipe: Any, passes: list[Pass], steps: Steps, chosen: set[int]) -> None:
        self.modules = find_transformers(pipe)
        self.passes, self.steps, self.chosen = passes, steps, chosen
        self.inputs: tuple[Any, Any] = ((), {})

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, passes are kept."""
        hooks = []
        try:
            for name, module in self.modules.items():
                after = partial(self._after, name)
                hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                hooks.append(module.register_forward_hook(after, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.steps.index in self.chosen:  # copied now: some are written to later
            self.inputs = (_copied(args), _copied(kwargs))

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self.steps.index in self.chosen:
            self.passes.append(Pass(name, self.steps.index, *self.inputs, flat(result)))


def _copied(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def flat(result: Any) -> Tensor:
    """Everything that a transformer gives, in one row of float32 numbers."""
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    parts = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    if not parts:
        raise UnsupportedError("expected a transformer that gives tensors, got none")
    return torch.cat([x.detach().float().flatten() for x in parts])


@contextmanager
def quantized(
    module: nn.Module, plan: LinearPlan, names: Sequence[str], settings: LinearSettings
) -> Iterator[None]:
    """Some layers of a model in FP8, weight-only where the plan says so; then as they were."""
    plain = {name: module.get_submodule(name) for name in names}
    try:
        for name, layer in plain.items():
            assert isinstance(layer, nn.Linear)
            own = plan.settings_of(name, settings)
            shards = shards_of(module, name, layer, own)
            made = Fp8Linear.from_linear(layer, own, shards=shards, name=name)
            put_linear_(module, plan.chosen[name], made)
        yield
    finally:
        for name, layer in plain.items():
            assert isinstance(layer, nn.Linear)
            put_linear_(module, plan.chosen[name], layer)
