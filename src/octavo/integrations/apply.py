"""apply_, quantize_ and restore_: what a recipe says, done to a model in place, and undone."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from octavo.calibration.scale_file import ScaleSet, load_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.changes import Changes
from octavo.integrations.linear import (
    LinearPlan,
    check_linear,
    find_converted,
    plan_linear,
    quantize_linear_,
)
from octavo.patterns import Layer, match_layers
from octavo.recipe import LinearSettings, Recipe

# The fields that octavo can do to a model by itself; the others belong to a pipeline.
MODEL_FIELDS = ("vision_attention", "attention", "kv_cache", "linear")


@dataclass(frozen=True)
class Preparation:
    """What was found out about a model before anything in it changes.

    skipped: the attention layers that skip_layers matches. plan: of linear layers, if they are
    quantized; scales: theirs, if static.
    """

    model: nn.Module
    recipe: Recipe
    skipped: frozenset[str]
    plan: LinearPlan | None
    scales: ScaleSet | None


def apply_(model: Any, recipe: Recipe, *, vision_impl: str | None = None) -> Changes:
    """Do what `recipe` says to a model or a diffusers pipeline, in place; returns what was changed.

    A field that octavo cannot do to this model is an error, and the model stays as it was; FP8
    vision attention on a GPU without FP8 is one, too. Linear layers are replaced one by one and
    cannot be restored. vision_impl: the implementation of vision attention by name, such as
    "reference"; left out, the fastest that can.
    """
    if vision_impl is not None:
        _check_vision_impl(vision_impl, recipe)
    if not isinstance(model, nn.Module):
        from octavo.integrations.diffusers.pipeline import apply_pipeline_

        return apply_pipeline_(model, recipe)
    preparation = prepare(model, recipe)
    changes = Changes({})
    try:
        apply_attention_(preparation, changes, vision_impl)
        apply_linear_(preparation, changes)  # last: it cannot be undone
    except Exception:
        if changes.layers:
            detach_(model)
        raise
    return changes


def prepare(
    model: nn.Module, recipe: Recipe, *, kept: Mapping[str, str] | None = None
) -> Preparation:
    """Raise whatever `apply_` would find wrong; nothing changes.

    kept: linear layers that stay, with the reason; left out, what is known of the model's class.
    """
    fields = recipe.settings()
    if unknown := sorted(fields.keys() - set(MODEL_FIELDS)):
        raise UnsupportedError(
            f"expected a recipe for {', '.join(MODEL_FIELDS)}, got {', '.join(unknown)}"
        )
    if not fields:
        raise ConfigError("expected a recipe that changes something, got an empty one")
    if recipe.attention is not None and not is_diffusers_model(model):
        raise UnsupportedError(
            "attention: expected a transformer of diffusers, or its pipeline, got "
            f"{type(model).__name__}; towers of vision models have vision_attention"
        )
    if is_diffusers_model(model):
        from octavo.integrations.diffusers.step_graphs import has_step_graphs

        if has_step_graphs(model):
            raise UnsupportedError(
                "expected a transformer without graphs, got one that would replay what it did "
                "before: drop_step_graphs_ first"
            )
    skipped = skipped_layers(model, recipe)
    if recipe.attention is not None:
        from octavo.integrations.diffusers import attention

        chosen = attention.choose_layers(model, skipped)
        attention.check_scales(chosen, recipe.attention, read_scales(recipe, recipe.attention))
    if recipe.linear is None:
        return Preparation(model, recipe, skipped, None, None)
    if kept is None:
        kept = _kept_layers(model, recipe)
    plan = plan_linear(model, recipe.ignored_layers, kept, recipe.weight_only_layers)
    scales = read_scales(recipe, recipe.linear)
    check_linear(model, plan, recipe.linear, scales)
    return Preparation(model, recipe, skipped, plan, scales)


def _kept_layers(model: nn.Module, recipe: Recipe) -> Mapping[str, str]:
    if is_diffusers_model(model):
        from octavo.integrations.diffusers.defaults import kept_layers

        return kept_layers(model, recipe.included_layers)
    match_layers(recipe.included_layers, [])
    return MappingProxyType({})


def is_diffusers_model(model: object) -> bool:
    """Whether a model's class is one of diffusers, or extends one."""
    return any(base.__module__.startswith("diffusers.") for base in type(model).__mro__)


def apply_attention_(
    preparation: Preparation, changes: Changes, vision_impl: str | None = None
) -> None:
    """Do what the recipe says about attention of any kind, noting it in `changes`."""
    model, recipe, skipped = preparation.model, preparation.recipe, preparation.skipped
    if recipe.vision_attention is not None:
        _apply_vision(model, recipe, skipped, changes, vision_impl)
    if recipe.attention is not None:
        from octavo.integrations.diffusers import attention

        changes.layers["attention"] = attention.attach(
            model,
            recipe.attention,
            skip_layers=skipped,
            scales=read_scales(recipe, recipe.attention),
            promote_every=recipe.promote_every,
        )
        changes.fused["attention"] = attention.find_fused(model)
        changes.left["attention"] = attention.find_others(model)
    if recipe.kv_cache is not None:
        _apply_kv_cache(model, recipe, skipped, changes)


def apply_linear_(preparation: Preparation, changes: Changes) -> None:
    """Do what the recipe says about linear layers, noting it in `changes`."""
    model, plan, settings = preparation.model, preparation.plan, preparation.recipe.linear
    if plan is None or settings is None:
        return
    changes.layers["linear"] = quantize_linear_(model, plan, settings, preparation.scales)
    changes.left["linear"] = plan.left
    if plan.weight_only:
        changes.weight_only["linear"] = [n for n in plan.chosen if n in plan.weight_only]
    if is_diffusers_model(model):
        from octavo.integrations.diffusers.plain_layers import use_faster_forms_
        from octavo.integrations.diffusers.quantizer import note_quantized_

        changes.faster["linear"] = use_faster_forms_(model)
        note_quantized_(model, preparation.recipe)
    else:
        _note_for_saving(model, preparation.recipe)


def _note_for_saving(model: Any, recipe: Recipe) -> None:
    """Have a transformers model's config say what its weights are: save_pretrained writes it."""
    if any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        from octavo.integrations.transformers.quantizer import OctavoConfig

        assert recipe.linear is not None
        model.config.quantization_config = OctavoConfig(
            *(recipe.linear, recipe.ignored_layers),
            weight_only_layers=recipe.weight_only_layers,
        )


def quantize_(
    model: Any,
    config: str | Mapping[str, Any] | LinearSettings | Recipe = "fp8",
    *,
    ignored_layers: Sequence[str] = (),
    weight_only_layers: Sequence[str] = (),
    scales: str | os.PathLike[str] | Mapping[str, Any] | ScaleSet | None = None,
) -> Changes:
    """Replace a model's linear layers by FP8 ones, in place; returns what was changed, and not.

    config: "fp8", a recipe's settings of linear layers, those in the words of vLLM ({"method":
    "fp8", "activation_scheme": …, "weight_block_size": …, "ignored_layers": […]}), or a whole
    Recipe for linear layers alone. ignored_layers: patterns of layers to leave; weight_only_layers:
    patterns of layers whose weight alone is quantized; one that matches nothing is an error. Both
    may be in the config instead. scales: for static activations, as `calibrate_linear` finds them,
    or `calibrate_pipeline` those of a pipeline.
    """
    patterns = {"ignored_layers": ignored_layers, "weight_only_layers": weight_only_layers}
    return apply_(model, _linear_recipe(config, patterns, scales))


def _linear_recipe(config: Any, patterns: Mapping[str, Sequence[str]], scales: Any) -> Recipe:
    if isinstance(config, Recipe):
        if any(patterns.values()) or scales is not None:
            names = f"{', '.join(patterns)} and scales"
            raise ConfigError(f"expected {names} in the recipe, got them beside")
        if list(config.settings()) != ["linear"]:
            got = ", ".join(config.settings()) or "an empty one"
            raise ConfigError(f"expected a recipe for linear alone, got {got}: use apply_")
        return config
    if isinstance(config, Mapping):
        config = dict(config)
        if twice := [name for name, given in patterns.items() if given and name in config]:
            raise ConfigError(f"expected {twice[0]} once, got them in the config and beside")
        patterns = {name: config.pop(name, None) or given for name, given in patterns.items()}
    if isinstance(scales, ScaleSet):
        scales = scales.to_dict()
    recipe = Recipe(linear=config, **patterns, scales=scales)
    if recipe.linear is None:
        raise ConfigError(f"expected 'fp8' or settings of linear layers, got {config}")
    return recipe


def apply_vision_(model: nn.Module, recipe: Recipe, *, vision_impl: str | None = None) -> Changes:
    """Do what `recipe` says about vision attention alone, as `apply_` does, if it says anything.

    An implementation that cannot run on the model's device is an error at once.
    """
    from octavo.integrations.transformers import vision
    from octavo.integrations.transformers.vision_impl import check_vision_impl

    changes = Changes({})
    if vision_impl is not None:
        _check_vision_impl(vision_impl, recipe)
    if recipe.vision_attention is None:
        return changes
    _apply_vision(model, recipe, skipped_layers(model, recipe), changes, vision_impl)
    try:
        check_vision_impl(model, vision_impl)
    except UnsupportedError:
        vision.detach(model)
        raise
    return changes


def _check_vision_impl(vision_impl: str, recipe: Recipe) -> None:
    from octavo.ops.select import impl_names

    if recipe.vision_attention is None:
        raise ConfigError(
            f"expected vision_attention for impl {vision_impl!r}, got a recipe without"
        )
    if vision_impl not in (names := impl_names("attention")):
        raise ConfigError(f"expected vision_impl, one of {', '.join(names)}; got {vision_impl!r}")


def _apply_vision(
    model: nn.Module,
    recipe: Recipe,
    skipped: frozenset[str],
    changes: Changes,
    impl: str | None,
) -> None:
    from octavo.integrations.transformers import vision

    assert recipe.vision_attention is not None
    changes.layers["vision_attention"] = vision.attach(
        model,
        recipe.vision_attention,
        skip_layers=skipped,
        scales=read_scales(recipe, recipe.vision_attention),
        promote_every=recipe.promote_every,
        impl=impl,
    )
    changes.fused["vision_attention"] = vision.find_fused(model)


def _apply_kv_cache(
    model: nn.Module, recipe: Recipe, skipped: frozenset[str], changes: Changes
) -> None:
    from octavo.integrations.transformers import kv_cache, text

    changes.layers["kv_cache"] = kv_cache.attach(
        model,
        recipe.kv_cache,
        skip_layers=skipped,
        scales=read_scales(recipe),
        promote_every=recipe.promote_every,
    )
    changes.left["kv_cache"] = text.find_others(model)


def skipped_layers(model: nn.Module, recipe: Recipe) -> frozenset[str]:
    """The names of the layers that skip_layers matches, of all attention that the recipe is for."""
    layers: list[Layer] = []
    if recipe.vision_attention is not None:
        from octavo.integrations.transformers import vision

        found = vision.find_layers(model)
        layers += [Layer(name, index) for index, name in enumerate(found)]
    if recipe.attention is not None:
        from octavo.integrations.diffusers import attention

        layers += attention.as_patterns_see(model)
    if recipe.kv_cache is not None:
        from octavo.integrations.transformers import text

        layers += text.as_patterns_see(model)
    return frozenset(layer.name for layer in match_layers(recipe.skip_layers, layers))


def restore_(model: Any) -> Changes:
    """Undo `apply_`, and `use_graphs_` and `use_step_graphs_` with it; returns what was undone.

    Linear layers in FP8 are an error: their plain weights are gone.
    """
    if not isinstance(model, nn.Module):
        from octavo.integrations.diffusers.pipeline import restore_pipeline_

        return restore_pipeline_(model)
    check_restorable(model)
    undone = detach_(model)
    if not undone:
        raise ConfigError("expected a model that apply_ has changed, got one as it was made")
    return Changes(undone)


def check_restorable(model: nn.Module) -> None:
    """Raise if a model has linear layers whose plain weights are gone."""
    if converted := find_converted(model):
        raise UnsupportedError(
            f"expected linear layers with their own weights, got {len(converted)} that are FP8 "
            f"now, such as {converted[0]}, and cannot be restored: load the model again"
        )


def detach_(model: nn.Module) -> dict[str, list[str]]:
    """Undo what can be undone; the layers by field."""
    from octavo.integrations.transformers import graphed_vision, kv_cache, vision

    graphed = graphed_vision.find_graphed(model)
    undone = {"vision_attention": vision.detach(model), "kv_cache": kv_cache.detach(model)}
    if is_diffusers_model(model):
        from octavo.integrations.diffusers import attention, step_graphs

        undone["attention"] = attention.detach(model)
        if step_graphs.has_step_graphs(model):
            undone["step_graphs"] = step_graphs.drop_step_graphs_(model)
    if graphed:
        undone["vision_graphs"] = graphed_vision.drop_graphs_(model)
    return {name: layers for name, layers in undone.items() if layers}


def read_scales(recipe: Recipe, part: Any = None) -> ScaleSet | None:
    """The scales that a recipe brings, from their file if it names one.

    part: the settings that they are for; None unless those are static.
    """
    if recipe.scales is None or (part is not None and getattr(part, "scaling", "") != "static"):
        return None
    if isinstance(recipe.scales, str):
        return load_scales(recipe.scales)
    return ScaleSet.from_dict(recipe.scales)
