"""Where a denoising loop is: which generation, which step, and which call of the step.

A step cache must never carry anything from one generation into the next. A pipeline says nothing
when it begins, but its scheduler does: `set_timesteps` makes a new tensor of timesteps for each
generation, and `step_index` counts the steps. So a new generation begins with a new tensor, also
after one that was interrupted. What else does not look like the same or the next step begins a new
one, too: an index or a timestep that goes back, a timestep that moves while the index does not. To
take a step for the first of a generation is safe: it is computed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedError
from octavo.integrations.diffusers.block_layouts import read_argument
from octavo.internals import internals, require

with internals("diffusers"):
    from diffusers.hooks.hooks import CacheContext, ModelHook, StateManager

require(
    "diffusers.hooks.hooks.ModelHook",
    "diffusers.hooks.hooks.StateManager",
    "torch.nn.Module._compiled_call_impl",
)

STEP_HOOK = "octavo_step_cache"
# The context of calls that a pipeline gives no name ("cond" and "uncond" are the usual ones).
ALL = "all"


@dataclass(frozen=True)
class StepCounts:
    """How many steps of a generation ran a transformer's blocks, and how many reused them."""

    computed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        return f"{self.skipped} of {self.computed + self.skipped} steps skipped"


@dataclass(frozen=True)
class Call:
    """One call of a transformer: its generation, its context and whether the step is the last."""

    generation: int
    context: str
    is_last_step: bool


class Denoising:
    """The place in a denoising loop, shared by all transformers of a pipeline."""

    def __init__(self, find_scheduler: Callable[[], Any]) -> None:
        self._find_scheduler = find_scheduler
        self._timesteps: object = None
        self._step = -1
        self._moment = 0.0
        self._num_calls: Counter[tuple[str, str]] = Counter()
        self._generation = 0
        self.counts: dict[str, dict[str, StepCounts]] = {}

    def enter(self, component: str, context: str, moment: float | None) -> Call:
        """Note a call of a transformer.

        moment: the time that it was called with, falling from step to step; None if there is none.
        A second call of a step has a context of its own: pipelines without contexts make one call
        with the prompt and one without.
        """
        scheduler = self._find_scheduler()
        timesteps, step = scheduler.timesteps, _step_of(scheduler)
        if moment is None:
            moment = self._moment
        is_same = step == self._step and moment == self._moment
        is_next = step > self._step and moment <= self._moment
        is_new = timesteps is not self._timesteps or not (is_same or is_next)
        if is_new:
            self._generation += 1
            self.counts = {}
        if is_new or is_next:
            self._num_calls.clear()
        self._timesteps, self._step, self._moment = timesteps, step, moment
        self._num_calls[component, context] += 1
        if (number := self._num_calls[component, context]) > 1:
            context = f"{context} {number}"
        return Call(self._generation, context, step >= len(timesteps) - 1)

    def count(self, component: str, call: Call, *, is_computed: bool) -> None:
        """Note what became of a call."""
        counts = self.counts.setdefault(component, {})
        old = counts.get(call.context, StepCounts())
        counts[call.context] = StepCounts(
            old.computed + is_computed, old.skipped + (not is_computed)
        )

    def forget(self) -> None:
        """Whatever comes next begins a generation."""
        self._timesteps = None


def _step_of(scheduler: Any) -> int:
    """The index of the step that a scheduler will do next; it is unset before the first."""
    if scheduler.step_index is not None:
        return int(scheduler.step_index)
    return int(getattr(scheduler, "begin_index", None) or 0)


class StepHook(ModelHook):  # type: ignore[misc]  # diffusers has no types
    """The hook on a transformer: gives the cache a state for each context and generation.

    states: of the cache, by context. current: the state of the call that runs, None outside.
    """

    _is_stateful = True

    def __init__(
        self,
        component: str,
        denoising: Denoising,
        states: StateManager,
        blocks: Sequence[nn.Module],
        time_argument: str,
        is_rising: bool = False,
    ) -> None:
        super().__init__()
        self.component, self.denoising, self.states = component, denoising, states
        self.blocks = tuple(blocks)
        self.current: Any = None
        self._time_argument, self._is_rising = time_argument, is_rising
        self._generation = -1

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the transformer in its state."""
        self.check_call(module)
        named = self.states._context
        time = read_argument(module, self._time_argument, args, kwargs)
        call = self.denoising.enter(
            self.component, ALL if named is None else named.name, self._moment(time)
        )
        if call.generation != self._generation:
            self.states.reset()
            self._generation = call.generation
        self.states.set_context(CacheContext(call.context))
        self.current = state = self.states.get_state()
        state.is_last_step = call.is_last_step
        try:
            out = self.fn_ref.original_forward(*args, **kwargs)
        except BaseException:
            self.states.reset()
            self.denoising.forget()
            raise
        finally:
            self.current = None
            self.states.set_context(named)
        self.denoising.count(self.component, call, is_computed=state.should_compute)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepHook":
        # diffusers' hooks keep the forward of the module that they are on: the copy would run it.
        raise UnsupportedError("expected a model without a step cache to copy: drop_step_cache_")

    def check_call(self, module: nn.Module) -> None:
        """Raise for what no step cache can do."""
        if module.training and torch.is_grad_enabled():
            raise UnsupportedError(
                "step cache: expected inference, got training with gradients: call drop_step_cache_"
            )
        if module._compiled_call_impl is not None:
            raise UnsupportedError(COMPILED_WHOLE)

    def reset_state(self, module: nn.Module) -> nn.Module:
        """diffusers calls it at the end of a pipeline that was not interrupted."""
        self.states.reset()
        return module

    def _moment(self, time: Tensor | None) -> float | None:
        if not isinstance(time, Tensor) or time.numel() == 0:
            return None
        value = float(time.max())  # of frames that are given in a video, it is 0
        return -value if self._is_rising else value


COMPILED_WHOLE = (
    "step cache: expected a transformer that is not compiled as a whole, since each step decides "
    "what runs: compile its blocks, transformer.compile_repeated_blocks()"
)
