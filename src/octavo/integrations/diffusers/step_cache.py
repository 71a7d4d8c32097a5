"""use_step_cache_, drop_step_cache_ and fit_tea_cache: steps that reuse the work of earlier ones.

FirstBlockCache is diffusers' own, whose hooks fail in the middle of a generation where a model's
blocks are not what they expect: this is checked here beforehand. A hook on the transformer
(denoising.py) keeps its generations apart; diffusers forgets the last one only at its end, so that
an interrupted one would go on in the next.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from diffusers import FirstBlockCacheConfig, HookRegistry
from pydantic import AfterValidator, field_validator
from torch import nn

from octavo.brief import brief, list_names
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.diffusers.call import Prompt, Run
from octavo.integrations.diffusers.denoising import (
    COMPILED_WHOLE,
    STEP_HOOK,
    BlockLayout,
    Denoising,
    StepCounts,
    StepHook,
    find_layout,
    find_step_hook,
    hook_names,
    layout_of,
)
from octavo.integrations.diffusers.pipeline import find_transformers, naming
from octavo.integrations.diffusers.step_graphs import has_step_graphs
from octavo.integrations.diffusers.tea_cache import (
    attach_tea_cache_,
    fit_polynomial,
    known_coefficients,
)
from octavo.internals import internals, require
from octavo.settings import Settings, Shorthands

with internals("diffusers"):
    from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
    from diffusers.hooks._helpers import TransformerBlockRegistry
    from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK
    from diffusers.hooks.group_offloading import _GROUP_OFFLOADING as GROUP_OFFLOADING

require("diffusers.HookRegistry", "torch.nn.Module._compiled_call_impl")


def _checked_threshold(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ConfigError(f"expected a finite number of 0 or more, got {value}")
    return value


Threshold = Annotated[float, AfterValidator(_checked_threshold)]


class TeaCacheSettings(Settings):
    """rel_l1_thresh: how much estimated change adds up before a step runs; 0 skips none.

    coefficients: of the polynomial, highest power first; for a pipeline with several transformers
    also one list for each by name. Left out, those that are known for the model.
    """

    shorthands: ClassVar[Shorthands] = {}
    rel_l1_thresh: Threshold = 0.2
    coefficients: tuple[float, ...] | dict[str, tuple[float, ...]] | None = None

    @field_validator("coefficients")
    @classmethod
    def _check_coefficients(cls, value: Any) -> Any:
        for part in value.values() if isinstance(value, dict) else (value,):
            if part is not None and (not part or not all(map(math.isfinite, part))):
                raise ConfigError(f"expected finite numbers, at least one, got {brief(part)}")
        return value


class FirstBlockCacheSettings(Settings):
    """threshold: how much the first block's residual may change before a step runs."""

    shorthands: ClassVar[Shorthands] = {}
    threshold: Threshold = 0.05


BACKENDS: Mapping[str, type[TeaCacheSettings | FirstBlockCacheSettings]] = {
    "first_block_cache": FirstBlockCacheSettings,
    "tea_cache": TeaCacheSettings,
}


@dataclass(frozen=True)
class StepCacheChanges:
    """What was changed: the blocks of each transformer that a step may skip, and by which rule."""

    backend: str
    blocks: Mapping[str, list[str]]
    rules: Mapping[str, str]

    def __str__(self) -> str:
        return "\n".join(
            f"{name}.{self.backend}: {len(blocks)} blocks, {self.rules[name]}"
            for name, blocks in self.blocks.items()
        )


def use_step_cache_(
    model: Any, backend: str, config: Mapping[str, Any] | None = None, *, scheduler: Any = None
) -> StepCacheChanges:
    """Let a pipeline of diffusers skip work in steps that change little, in place.

    model: a pipeline, for all its transformers, or a transformer alone, with the scheduler that its
    denoising loop uses. backend: "tea_cache", or "first_block_cache", which is diffusers' own.
    config: {"rel_l1_thresh": 0.2, "coefficients": […]} or {"threshold": 0.05}. Whatever cannot work
    is an error, and nothing changes. FP8 layers may come before or after.
    """
    planned = check_step_cache(model, backend, config, scheduler=scheduler)
    try:
        blocks = {name: list(attach().blocks) for name, (_, attach) in planned.items()}
    except Exception:
        _detach_all_(find_transformers(model).values())
        raise
    return StepCacheChanges(backend, blocks, {name: rule for name, (rule, _) in planned.items()})


def check_step_cache(
    model: Any, backend: str, config: Mapping[str, Any] | None = None, *, scheduler: Any = None
) -> dict[str, tuple[str, Callable[[], StepHook]]]:
    """Raise whatever `use_step_cache_` would find wrong; nothing changes.

    Returns, for each transformer, the rule that skips its steps, in words, and what puts it there.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend: expected one of {', '.join(BACKENDS)}, got {brief(backend)}")
    with naming(backend):
        settings = BACKENDS[backend].read(config) or BACKENDS[backend]()
    transformers = find_transformers(model)
    denoising = Denoising(_scheduler_finder(model, scheduler))
    for name, part in transformers.items():
        with naming(name):
            _check_transformer(part, backend)
    planned: dict[str, tuple[str, Callable[[], StepHook]]] = {}
    if isinstance(settings, FirstBlockCacheSettings):
        for name, part in transformers.items():
            attach = partial(_attach_first_block_cache_, name, part, denoising, settings.threshold)
            planned[name] = (f"threshold {settings.threshold}", attach)
        return planned
    given, threshold = settings.coefficients, settings.rel_l1_thresh
    if isinstance(given, dict) and given.keys() != transformers.keys():
        raise ConfigError(
            f"tea_cache: expected coefficients for {', '.join(transformers)}, got them for "
            f"{', '.join(given) or 'none'}"
        )
    for name, part in transformers.items():
        values, origin = given[name] if isinstance(given, dict) else given, "as given"
        if values is None:
            with naming(name):
                known = known_coefficients(part)
            values, origin = known.values, f"of {known.model}"
        planned[name] = (
            f"rel_l1_thresh {threshold}, coefficients {origin}",
            partial(attach_tea_cache_, name, part, denoising, threshold, values),
        )
    return planned


def drop_step_cache_(model: Any) -> StepCacheChanges:
    """Undo `use_step_cache_`; returns what was undone."""
    transformers = find_transformers(model)
    blocks, backend = {}, ""
    for name, part in transformers.items():
        if (hook := find_step_hook(part)) is not None:
            blocks[name], backend = list(hook.blocks), hook.backend
            if _is_offloaded(part):
                raise UnsupportedError(
                    f"{name}: expected weights that are not offloaded, got some that are: call "
                    "pipe.remove_all_hooks() first"
                )
            names = hook_names(part)
            if later := names[names.index(STEP_HOOK) + 1 :]:  # they would break, or bring ours back
                raise UnsupportedError(
                    f"{name}: expected no hooks that came after the step cache, got "
                    f"{list_names(later)} on {type(part).__name__}: remove them first"
                )
    if not blocks:
        raise ConfigError("expected a model with a step cache, got one without")
    _detach_all_(transformers.values())
    return StepCacheChanges(backend, blocks, dict.fromkeys(blocks, "as they were"))


def count_cached_steps(model: Any) -> dict[str, dict[str, StepCounts]]:
    """How many steps of the last generation ran and were skipped, by transformer and context.

    A context is what a pipeline calls a call of a step: "cond" and "uncond"; "all" without a name.
    """
    found = {}
    for name, part in find_transformers(model).items():
        if (hook := find_step_hook(part)) is None:
            raise ConfigError(f"{name}: expected a transformer with a step cache, got one without")
        found[name] = dict(hook.denoising.counts.get(hook.component, {}))
    return found


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
    denoising = Denoising(_scheduler_finder(pipe, None))
    for name, part in transformers.items():
        with naming(name):
            _check_transformer(part, "tea_cache")
    run = Run(num_inference_steps=num_inference_steps, seed=seed, call_options=options)
    calls = run.calls(pipe, prompts)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in transformers}
    try:
        for name, part in transformers.items():
            attach_tea_cache_(name, part, denoising, 0, (0.0,), pairs[name])
        for call in calls:
            call()
    finally:
        _detach_all_(transformers.values())
    return {name: fit_polynomial(pairs[name], name) for name in pairs}


def _scheduler_finder(model: Any, scheduler: Any) -> Callable[[], Any]:
    """How to find the scheduler: a pipeline may be given another one at any time."""
    if isinstance(model, nn.Module):
        if scheduler is None:
            raise ConfigError(
                "step cache: expected the scheduler of the denoising loop with a transformer alone "
                "(use_step_cache_(transformer, backend, config, scheduler=…)), got none"
            )
        _check_scheduler(scheduler)
        return lambda: scheduler
    if scheduler is not None:
        raise ConfigError("step cache: expected the pipeline's own scheduler, got another beside")
    scheduler = getattr(model, "scheduler", None)
    _check_scheduler(scheduler)
    pipeline = weakref.ref(model)  # its transformer holds this: no cycle, memory is freed at once

    def find() -> Any:
        living = pipeline()
        if living is None or living.scheduler is scheduler:
            return scheduler
        _check_scheduler(living.scheduler)
        return living.scheduler

    return find


def _check_scheduler(scheduler: Any) -> None:
    if not (hasattr(scheduler, "step_index") and hasattr(scheduler, "timesteps")):
        raise UnsupportedError(
            "step cache: expected a scheduler that counts its steps (timesteps, step_index), got "
            f"{type(scheduler).__name__}"
        )


def _check_transformer(model: Any, backend: str) -> None:
    """Raise whatever is wrong with a transformer; nothing changes."""
    if find_step_hook(model) is not None or getattr(model, "is_cache_enabled", False):
        raise ConfigError(
            "expected a transformer without a step cache, got one that has one: call "
            "drop_step_cache_ (or, if it is diffusers' own, disable_cache) first"
        )
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise UnsupportedError(COMPILED_WHOLE)
    if _is_offloaded(model):
        raise UnsupportedError(
            "expected weights that are not offloaded yet, since offloading would remove the step "
            "cache: call use_step_cache_ first"
        )
    if has_step_graphs(model):
        raise UnsupportedError(
            "expected a transformer without graphs, which replay each step whole: call "
            "drop_step_graphs_ first"
        )
    if getattr(model, "_parallel_config", None) is not None:
        raise UnsupportedError(
            "expected a transformer on one device, got a parallel one, whose parts would each "
            "decide for themselves"
        )
    if backend == "first_block_cache":
        _check_not_compiled(_first_block_cache_blocks(model))
    elif not layout_of(model).blocks(model):
        raise UnsupportedError("tea_cache: expected blocks, got none")


def _is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate or diffusers moves weights to the device when they are needed."""
    return any(
        hasattr(part, "_hf_hook") or GROUP_OFFLOADING in hook_names(part)
        for part in model.modules()
    )


def _detach_all_(transformers: Iterable[Any]) -> None:
    """Remove the step caches of these transformers, if they have some."""
    for model in transformers:
        if (steps := find_step_hook(model)) is None:
            continue
        steps.patch.undo()
        registry = HookRegistry.check_if_exists_or_initialize(model)
        registry.remove_hook(STEP_HOOK, recurse=False)
        if isinstance(steps, FirstBlockStepHook):
            model.disable_cache()
        for part in (model, *steps.blocks.values()):  # diffusers leaves an attribute
            if getattr(part.forward, "__func__", None) is type(part).forward:
                vars(part).pop("forward", None)


class FirstBlockStepHook(StepHook):
    """The hook on a transformer with diffusers' FirstBlockCache."""

    backend = "first_block_cache"

    def check_call(self, module: nn.Module) -> None:
        """Raise for compiled blocks: diffusers' hooks would be compiled with them."""
        super().check_call(module)
        _check_not_compiled(self.blocks)


def _check_not_compiled(blocks: Mapping[str, nn.Module]) -> None:
    if any(block._compiled_call_impl is not None for block in blocks.values()):
        raise UnsupportedError(
            "first_block_cache: expected blocks that are not compiled, got compiled ones: use "
            "tea_cache with them"
        )


def _first_block_cache_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that diffusers' FirstBlockCache takes, in its order; an error if it would fail."""
    blocks = {
        f"{name}.{index}": block
        for name, part in model.named_children()
        if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS and isinstance(part, nn.ModuleList)
        for index, block in enumerate(part)
    }
    if (reason := _first_block_problem(model, blocks)) is not None:
        raise UnsupportedError(
            f"first_block_cache: expected a transformer that diffusers can do it to, got "
            f"{type(model).__name__}: {reason}; use tea_cache"
        )
    return blocks


def _first_block_problem(model: nn.Module, blocks: Mapping[str, nn.Module]) -> str | None:
    """Why diffusers cannot do it; None if it can."""
    if not hasattr(model, "enable_cache"):
        return "it has no enable_cache"
    returns = set()
    for name, block in blocks.items():
        kind = type(block)
        try:
            metadata = TransformerBlockRegistry.get(kind)
        except ValueError:
            return f"its blocks ({kind.__name__}) are not in diffusers' registry"
        has_encoder = metadata.return_encoder_hidden_states_index is not None
        needed = ("hidden_states", "encoder_hidden_states")[: 1 + has_encoder]
        missing = [n for n in needed if n not in inspect.signature(kind.forward).parameters]
        if missing:
            return f"its block {name} ({kind.__name__}) takes no {missing[0]}"
        returns.add(has_encoder)
    if len(returns) > 1:
        return "its first blocks return two tensors and its last ones one"
    return f"it has {len(blocks)} blocks, and at least two are needed" if len(blocks) < 2 else None


def _attach_first_block_cache_(
    component: str, model: Any, denoising: Denoising, threshold: float
) -> StepHook:
    """Let diffusers put its hooks on the blocks; returns the hook on the transformer."""
    blocks = _first_block_cache_blocks(model)
    model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    first = HookRegistry.check_if_exists_or_initialize(next(iter(blocks.values())))
    states = first.get_hook(_FBC_LEADER_BLOCK_HOOK).state_manager
    layout = find_layout(model) or BlockLayout(())
    steps = FirstBlockStepHook(component, denoising, states, blocks, layout)
    HookRegistry.check_if_exists_or_initialize(model).register_hook(steps, STEP_HOOK)
    return steps
