"""The denoising loop as a transformer in it sees it: its blocks, and the place of each call.

A step cache must never carry anything from one generation into the next. A pipeline says nothing
when it begins, but its scheduler does: `set_timesteps` makes a new tensor of timesteps for each
generation, and `step_index` counts the steps. So a new tensor begins a new generation, also after
an interrupted one, and so does whatever looks like neither the same step nor the next one: an index
or a timestep that goes back, a timestep that moves while the index does not. To take a step for the
first of a generation is safe: it is computed.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedError
from octavo.integrations.patch import Patch
from octavo.internals import internals, require

with internals("diffusers"):
    from diffusers.hooks.hooks import CacheContext, ModelHook, StateManager

require(
    "diffusers.HookRegistry",
    "diffusers.hooks.hooks.ModelHook",
    "diffusers.hooks.hooks.StateManager",
    "torch.nn.Module._compiled_call_impl",
)

STEP_HOOK = "octavo_step_cache"
# The context of calls that a pipeline gives no name ("cond" and "uncond" are the usual ones).
ALL = "all"
COMPILED_WHOLE = (
    "step cache: expected a transformer that is not compiled as a whole, since each step decides "
    "what runs: compile its blocks, transformer.compile_repeated_blocks()"
)
_HIDDEN, _ENCODER = "hidden_states", "encoder_hidden_states"


@dataclass(frozen=True)
class BlockList:
    """One list of blocks: its name, and what a block returns, by the names of its arguments.

    joined: the arguments of the blocks before that the model joins along the tokens, in this order,
    for the first argument that these return.
    """

    name: str
    returns: tuple[str, ...]
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of one transformer class, in the order in which they run.

    kept: what the model reads after the last block. attention: the module of the first block that
    takes its modulated input, as `attention_argument`. time: the argument of the model that says
    the time; is_rising: it rises from step to step.
    """

    lists: tuple[BlockList, ...]
    kept: tuple[str, ...] = (_HIDDEN,)
    attention: str = "attn"
    attention_argument: str = _HIDDEN
    time: str = "timestep"
    is_rising: bool = False

    def blocks(self, model: nn.Module) -> list[tuple[str, BlockList, nn.Module]]:
        """All blocks of a model with their names and their list."""
        return [
            (f"{part.name}.{name}", part, block)
            for part in self.lists
            for name, block in model.get_submodule(part.name).named_children()
        ]


_TWO_STREAMS = BlockList("transformer_blocks", (_ENCODER, _HIDDEN))
_SINGLE = "single_transformer_blocks"
BY_CLASS: Mapping[str, BlockLayout] = {
    "FluxTransformer2DModel": BlockLayout((_TWO_STREAMS, BlockList(_SINGLE, (_ENCODER, _HIDDEN)))),
    "Flux2Transformer2DModel": BlockLayout(
        (_TWO_STREAMS, BlockList(_SINGLE, (_HIDDEN,), joined=(_ENCODER, _HIDDEN)))
    ),
    "QwenImageTransformer2DModel": BlockLayout((_TWO_STREAMS,)),
    "ZImageTransformer2DModel": BlockLayout(
        (BlockList("layers", ("x",)),),
        kept=("x",),
        attention="attention",
        time="t",
        is_rising=True,  # the pipeline gives 1 minus the time
    ),
    "WanTransformer3DModel": BlockLayout((BlockList("blocks", (_HIDDEN,)),), attention="attn1"),
    "HunyuanVideo15Transformer3DModel": BlockLayout(
        (BlockList("transformer_blocks", (_HIDDEN, _ENCODER)),)
    ),
    "Cosmos3OmniTransformer": BlockLayout(
        (BlockList("layers", ("und_seq", "gen_seq")),),
        kept=("und_seq", "gen_seq"),  # text is inside of the transformer
        attention="self_attn",
        attention_argument="gen_seq",
        time="vision_timesteps",
    ),
}


def class_names(model: nn.Module) -> list[str]:
    """The names of a model's class and of those that it extends, by which data is found."""
    return [base.__name__ for base in type(model).__mro__]


def find_layout(model: nn.Module) -> BlockLayout | None:
    """What is known of a model's blocks, by its class or a class that it extends."""
    return next((BY_CLASS[name] for name in class_names(model) if name in BY_CLASS), None)


def layout_of(model: nn.Module) -> BlockLayout:
    """`find_layout`, or an error that says which classes are known."""
    if (layout := find_layout(model)) is None:
        raise UnsupportedError(
            f"tea_cache: expected one of {', '.join(BY_CLASS)}, got {type(model).__name__}, whose "
            "blocks are not known"
        )
    return layout


def read_argument(
    module: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """An argument of a module's forward by its name; None if it was not given."""
    if name in kwargs:
        return kwargs[name]
    kind: Any = type(module)
    place = _parameter_places(kind).get(name, len(args))
    return args[place] if place < len(args) else None


@cache
def _parameter_places(kind: Any) -> dict[str, int]:
    parameters = list(inspect.signature(kind.forward).parameters)[1:]  # without self
    return {name: place for place, name in enumerate(parameters)}


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
        timesteps, step = scheduler.timesteps, scheduler.step_index
        if step is None:  # before the first step
            step = getattr(scheduler, "begin_index", None) or 0
        step = int(step)
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


class StepHook(ModelHook):  # type: ignore[misc]  # diffusers has no types
    """The hook on a transformer: gives the cache a state for each context and generation.

    states: of the cache, by context. blocks: those that steps may skip, by name. current: the state
    of the call that runs, None outside. patch: what else the cache changed in the transformer.
    """

    _is_stateful = True
    backend = ""

    def __init__(
        self,
        component: str,
        denoising: Denoising,
        states: StateManager,
        blocks: Mapping[str, nn.Module],
        layout: BlockLayout,
    ) -> None:
        super().__init__()
        self.component, self.denoising, self.states = component, denoising, states
        self.blocks, self.layout = dict(blocks), layout
        self.current: Any = None
        self.patch = Patch()
        self._generation = -1

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the transformer in its state."""
        self.check_call(module)
        named = self.states._context
        moment = self._moment(read_argument(module, self.layout.time, args, kwargs))
        call = self.denoising.enter(self.component, ALL if named is None else named.name, moment)
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
        return -value if self.layout.is_rising else value


def find_step_hook(model: nn.Module) -> StepHook | None:
    """The step cache's hook on a transformer, if it has one."""
    registry: Any = getattr(model, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(STEP_HOOK)


def hook_names(module: nn.Module) -> list[str]:
    """diffusers' hooks on a module in their order: its registry stays when they are gone."""
    registry: Any = getattr(module, "_diffusers_hook", None)
    return [] if registry is None else list(registry._hook_order)
