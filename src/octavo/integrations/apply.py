"""apply_, quantize_ and restore_: what a recipe says, done to a model in place, and undone."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.apply_model import (
    apply_attention_,
    apply_linear_,
    check_impl_name,
    check_restorable,
    detach_,
    prepare,
)
from octavo.integrations.changes import Changes
from octavo.recipe import ComponentRecipe, LinearSettings, Recipe


def apply_(model: Any, recipe: Recipe, *, vision_impl: str | None = None) -> Changes:
    """Do what `recipe` says to a model or a diffusers pipeline, in place; returns what was changed.

    A field that octavo cannot do to this model is an error, and the model stays as it was; FP8
    vision attention on a GPU without FP8 is one, too. Linear layers are replaced one by one and
    cannot be restored. vision_impl: the implementation of vision attention by name, such as
    "reference"; left out, the fastest that can.
    """
    if vision_impl is not None:
        check_impl_name(vision_impl, recipe)
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
    if isinstance(config, Recipe):
        if any(patterns.values()) or scales is not None:
            names = f"{', '.join(patterns)} and scales"
            raise ConfigError(f"expected {names} in the recipe, got them beside")
        if list(config.settings()) != ["linear"]:
            got = ", ".join(config.settings()) or "an empty one"
            raise ConfigError(f"expected a recipe for linear alone, got {got}: use apply_")
        return apply_(model, config)
    if isinstance(config, Mapping):
        config = dict(config)
        if twice := [name for name, given in patterns.items() if given and name in config]:
            raise ConfigError(f"expected {twice[0]} once, got them in the config and beside")
        patterns = {name: config.pop(name, None) or given for name, given in patterns.items()}
    given = scales.to_dict() if isinstance(scales, ScaleSet) else scales
    recipe = Recipe(linear=config, **patterns, scales=given)
    if recipe.linear is None:
        raise ConfigError(f"expected 'fp8' or settings of linear layers, got {config}")
    return apply_(model, recipe)


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


def split_linear(recipe: Recipe) -> tuple[Recipe | None, Recipe]:
    """What a recipe says of a model's linear layers, None if nothing; and the rest of it."""
    if recipe.linear is None:
        return None, recipe
    fields = ("linear", "ignored_layers", "weight_only_layers")
    scales = recipe.scales if recipe.linear.scaling == "static" else None
    linear = Recipe(**{name: getattr(recipe, name) for name in fields}, scales=scales)
    without = {"linear": None, "ignored_layers": (), "weight_only_layers": ()}
    # Scales that nothing else takes would be refused.
    others = ComponentRecipe(
        **{n: getattr(recipe, n) for n in ComponentRecipe.model_fields} | without
    )
    return linear, recipe.replace(**without, scales=recipe.scales if others.is_static else None)


def quantized_twin(model: nn.Module, recipe: Recipe) -> tuple[Any, Changes]:
    """A model with linear layers as the recipe says, and what was changed; `model` stays as it is.

    All other parameters and buffers are the same tensors in both.
    """
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return twin, apply_(twin, recipe)
