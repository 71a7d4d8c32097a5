"""FP8 linear layers beside a model whose own weights must stay."""

import copy
from typing import Any

from torch import nn

from octavo.integrations.apply import apply_
from octavo.integrations.changes import Changes
from octavo.recipe import ComponentRecipe, Recipe


def split_linear(recipe: Recipe) -> tuple[Recipe | None, Recipe]:
    """What a recipe says of a model's linear layers, None if nothing; and the rest of it."""
    if recipe.linear is None:
        return None, recipe
    patterns = ("ignored_layers", "weight_only_layers")
    own = {name: getattr(recipe, name) for name in ("linear", *patterns)}
    scales = recipe.scales if recipe.linear.scaling == "static" else None
    linear = Recipe(**own, scales=scales)
    without = {"linear": None, **dict.fromkeys(patterns, ())}
    others = {name: getattr(recipe, name) for name in ComponentRecipe.model_fields} | without
    # Scales that nothing else takes would be refused.
    scales = recipe.scales if ComponentRecipe(**others).is_static else None
    return linear, recipe.replace(**without, scales=scales)


def quantized_twin(model: nn.Module, recipe: Recipe) -> tuple[Any, Changes]:
    """A model with linear layers as the recipe says, and what was changed; `model` stays as it is.

    All other parameters and buffers are the same tensors in both.
    """
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return twin, apply_(twin, recipe)
