"""use_step_cache_ and drop_step_cache_: denoising steps that reuse the work of earlier ones."""

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from diffusers import HookRegistry
from pydantic import field_validator
from torch import nn

from octavo.brief import brief, list_names
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.diffusers.block_layouts import blocks_of, layout_of
from octavo.integrations.diffusers.denoising import (
    COMPILED_WHOLE,
    STEP_HOOK,
    Denoising,
    StepCounts,
    StepHook,
)
from octavo.integrations.diffusers.first_block_cache import (
    FirstBlockStepHook,
    attach_first_block_cache_,
    check_first_block_cache,
)
from octavo.integrations.diffusers.pipeline import find_transformers
from octavo.integrations.diffusers.step_graphs import has_step_graphs
from octavo.integrations.diffusers.tea_cache import (
    TeaCacheBlockHook,
    attach_tea_cache_,
    known_coefficients,
    put_forward_,
)
from octavo.internals import internals, require
from octavo.settings import Settings, Shorthands

with internals("diffusers"):
    from diffusers.hooks.group_offloading import _GROUP_OFFLOADING as GROUP_OFFLOADING

require("diffusers.HookRegistry", "torch.nn.Module._compiled_call_impl")


class TeaCacheSettings(Settings):
    """rel_l1_thresh: how much estimated change adds up before a step runs; 0 skips none.

    coefficients: of the polynomial, highest power first; for a pipeline with several transformers
    also one list for each by name. Left out, those that are known for the model.
    """

    shorthands: ClassVar[Shorthands] = {}
    rel_l1_thresh: float = 0.2
    coefficients: tuple[float, ...] | dict[str, tuple[float, ...]] | None = None

    @field_validator("rel_l1_thresh")
    @classmethod
    def _check_threshold(cls, value: float) -> float:
        return _checked_threshold(value)

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
    threshold: float = 0.05

    @field_validator("threshold")
    @classmethod
    def _check_threshold(cls, value: float) -> float:
        return _checked_threshold(value)


def _checked_threshold(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ConfigError(f"expected a finite number of 0 or more, got {value}")
    return value


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
    model: Any,
    backend: str,
    config: Mapping[str, Any] | None = None,
    *,
    scheduler: Any = None,
) -> StepCacheChanges:
    """Let a pipeline of diffusers skip work in steps that change little, in place.

    model: a pipeline, for all its transformers, or a transformer alone, with the scheduler that its
    denoising loop uses. backend: "tea_cache", or "first_block_cache", which is diffusers' own.
    config: {"rel_l1_thresh": 0.2, "coefficients": […]} or {"threshold": 0.05}. Whatever cannot work
    is an error, and nothing changes. FP8 layers may come before or after.
    """
    rules = check_step_cache(model, backend, config, scheduler=scheduler)
    settings = read_settings(backend, config)
    transformers = find_transformers(model)
    find_scheduler = scheduler_finder(model, scheduler)
    denoising = Denoising(find_scheduler)
    blocks = {}
    try:
        for name, part in transformers.items():
            if isinstance(settings, TeaCacheSettings):
                blocks[name] = attach_tea_cache_(
                    *(name, part, denoising),
                    rel_l1_thresh=settings.rel_l1_thresh,
                    coefficients=_coefficients(name, part, settings),
                )
            else:
                blocks[name] = attach_first_block_cache_(
                    name, part, denoising, threshold=settings.threshold
                )
    except Exception:
        for part in transformers.values():
            detach_step_cache_(part)
        raise
    return StepCacheChanges(backend, blocks, rules)


def check_step_cache(
    model: Any,
    backend: str,
    config: Mapping[str, Any] | None = None,
    *,
    scheduler: Any = None,
) -> dict[str, str]:
    """Raise whatever `use_step_cache_` would find wrong; nothing changes. Returns its rules."""
    settings = read_settings(backend, config)
    transformers = find_transformers(model)
    scheduler_finder(model, scheduler)
    for name, part in transformers.items():
        check_transformer(name, part, backend)
    return _rules(transformers, settings)


def drop_step_cache_(model: Any) -> StepCacheChanges:
    """Undo `use_step_cache_`; returns what was undone."""
    transformers = find_transformers(model)
    hooked = {name: part for name, part in transformers.items() if find_step_hook(part)}
    if not hooked:
        raise ConfigError("expected a model with a step cache, got one without")
    for name, part in hooked.items():
        _check_on_top(name, part)
    is_first_block = any(
        isinstance(find_step_hook(part), FirstBlockStepHook) for part in hooked.values()
    )
    backend = "first_block_cache" if is_first_block else "tea_cache"
    blocks = {name: detach_step_cache_(part) for name, part in hooked.items()}
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


def read_settings(
    backend: str, config: Mapping[str, Any] | None = None
) -> TeaCacheSettings | FirstBlockCacheSettings:
    """The settings of a step cache; an error for a backend or a key that there is not."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend: expected one of {', '.join(BACKENDS)}, got {brief(backend)}")
    try:
        settings = BACKENDS[backend].read(config)
    except ConfigError as error:
        raise ConfigError(f"{backend}: {error}") from None
    return BACKENDS[backend]() if settings is None else settings


def find_step_hook(model: nn.Module) -> StepHook | None:
    """The step cache's hook on a transformer, if it has one."""
    registry: Any = getattr(model, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(STEP_HOOK)


def scheduler_finder(model: Any, scheduler: Any) -> Callable[[], Any]:
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


def check_transformer(name: str, model: Any, backend: str) -> None:
    """Raise whatever is wrong with a transformer; nothing changes."""
    if find_step_hook(model) is not None or getattr(model, "is_cache_enabled", False):
        raise ConfigError(
            f"{name}: expected a transformer without a step cache, got one that has one: call "
            "drop_step_cache_ (or, if it is diffusers' own, disable_cache) first"
        )
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise UnsupportedError(f"{name}: {COMPILED_WHOLE}")
    if is_offloaded(model):
        raise UnsupportedError(
            f"{name}: expected weights that are not offloaded yet, since offloading would remove "
            "the step cache: call use_step_cache_ first"
        )
    if has_step_graphs(model):
        raise UnsupportedError(
            f"{name}: expected a transformer without graphs, which replay each step whole: call "
            "drop_step_graphs_ first"
        )
    if getattr(model, "_parallel_config", None) is not None:
        raise UnsupportedError(
            f"{name}: expected a transformer on one device, got a parallel one, whose parts would "
            "each decide for themselves"
        )
    try:
        if backend == "first_block_cache":
            check_first_block_cache(model)
        elif not blocks_of(model, layout_of(model)):
            raise UnsupportedError("tea_cache: expected blocks, got none")
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None


def is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate or diffusers moves weights to the device when they are needed."""
    for part in model.modules():
        registry: Any = getattr(part, "_diffusers_hook", None)
        is_in_group = registry is not None and GROUP_OFFLOADING in registry.hooks
        if is_in_group or hasattr(part, "_hf_hook"):
            return True
    return False


def _rules(
    transformers: Mapping[str, nn.Module], settings: TeaCacheSettings | FirstBlockCacheSettings
) -> dict[str, str]:
    """By which rule each transformer's steps are skipped, in words."""
    if isinstance(settings, FirstBlockCacheSettings):
        return dict.fromkeys(transformers, f"threshold {settings.threshold}")
    given = settings.coefficients
    if isinstance(given, dict) and given.keys() != transformers.keys():
        raise ConfigError(
            f"tea_cache: expected coefficients for {', '.join(transformers)}, got them for "
            f"{', '.join(given) or 'none'}"
        )
    rules = {}
    for name, part in transformers.items():
        origin = "as given"
        if given is None:
            try:
                origin = f"of {known_coefficients(part).model}"
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        rules[name] = f"rel_l1_thresh {settings.rel_l1_thresh}, coefficients {origin}"
    return rules


def _coefficients(name: str, model: nn.Module, settings: TeaCacheSettings) -> tuple[float, ...]:
    given = settings.coefficients
    if given is None:
        return known_coefficients(model).values
    return given[name] if isinstance(given, dict) else given


def _check_on_top(name: str, model: nn.Module) -> None:
    """Raise if other hooks came after ours: they would break, or bring ours back."""
    if is_offloaded(model):
        raise UnsupportedError(
            f"{name}: expected weights that are not offloaded, got some that are: call "
            "pipe.remove_all_hooks() first"
        )
    for part in model.modules():
        registry: Any = getattr(part, "_diffusers_hook", None)
        if registry is not None and STEP_HOOK in registry.hooks:
            later = registry._hook_order[registry._hook_order.index(STEP_HOOK) + 1 :]
            if later:
                raise UnsupportedError(
                    f"{name}: expected no hooks that came after the step cache, got "
                    f"{list_names(later)} on {type(part).__name__}: remove them first"
                )


def detach_step_cache_(model: Any) -> list[str]:
    """Remove the hooks of a step cache; the names of the blocks that had one."""
    steps = find_step_hook(model)
    if steps is None:
        return []
    names = {id(part): name for name, part in model.named_modules()}
    blocks = [names[id(block)] for block in steps.blocks]
    for block in steps.blocks:
        hook = HookRegistry.check_if_exists_or_initialize(block).get_hook(STEP_HOOK)
        if isinstance(hook, TeaCacheBlockHook):
            hook.give_back_compiled_(block)
    registry = HookRegistry.check_if_exists_or_initialize(model)
    registry.remove_hook(STEP_HOOK, recurse=True)
    registry.invalidate_child_registries_cache()
    if isinstance(steps, FirstBlockStepHook):
        model.disable_cache()
    for part in (model, *steps.blocks):
        put_forward_(part, part.forward)  # diffusers leaves an attribute
    return blocks
