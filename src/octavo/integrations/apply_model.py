"""What a recipe says, done to one model in place, and undone: the parts of apply_ and restore_."""

from collections.abc import Mapping
from dataclasses import dataclass
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
from octavo.integrations.patch import check_patches, is_patched, undo_patches_
from octavo.patterns import Layer, match_layers
from octavo.recipe import Recipe

# The fields that octavo can do to a model by itself; the others belong to a pipeline.
MODEL_FIELDS = ("vision_attention", "attention", "kv_cache", "linear")
# What patches of a model are for, in the order in which they are undone.
FEATURES = ("step_graphs", "vision_graphs", "vision_attention", "kv_cache")


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
    if is_patched(model, "step_graphs"):
        raise UnsupportedError(
            "expected a transformer without graphs, got one that would replay what it did before: "
            "drop_step_graphs_ first"
        )
    skipped = skipped_layers(model, recipe)
    if recipe.attention is not None:
        from octavo.integrations.diffusers import attention

        chosen = attention.choose_layers(model, skipped)
        attention.check_scales(chosen, recipe.attention, read_scales(recipe, recipe.attention))
    if recipe.linear is None:
        return Preparation(model, recipe, skipped, None, None)
    if kept is None and is_diffusers_model(model):
        from octavo.integrations.diffusers.linear import kept_layers

        kept = kept_layers(model, recipe.included_layers)
    elif kept is None:
        match_layers(recipe.included_layers, [])  # nothing is kept: no pattern can match
        kept = {}
    plan = plan_linear(model, recipe.ignored_layers, kept, recipe.weight_only_layers)
    scales = read_scales(recipe, recipe.linear)
    check_linear(model, plan, recipe.linear, scales)
    return Preparation(model, recipe, skipped, plan, scales)


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
        from octavo.integrations.transformers import kv_cache, text

        changes.layers["kv_cache"] = kv_cache.attach(
            model,
            recipe.kv_cache,
            skip_layers=skipped,
            scales=read_scales(recipe),
            promote_every=recipe.promote_every,
        )
        changes.fused["kv_cache"] = kv_cache.find_fused(model)
        changes.left["kv_cache"] = text.find_others(model)


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
        from octavo.integrations.diffusers.linear import use_faster_forms_
        from octavo.integrations.diffusers.quantizer import note_quantized_

        changes.faster["linear"] = use_faster_forms_(model)
        note_quantized_(model, preparation.recipe)
        return
    from octavo.integrations.transformers.joint_projections import join_projections_

    changes.joint["linear"] = join_projections_(model)
    if any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        from octavo.integrations.transformers.quantizer import OctavoConfig

        # Its config is to say what its weights are: save_pretrained writes it.
        ignored, alone = preparation.recipe.ignored_layers, preparation.recipe.weight_only_layers
        config: Any = model.config
        config.quantization_config = OctavoConfig(settings, ignored, weight_only_layers=alone)


def apply_vision_(model: nn.Module, recipe: Recipe, *, vision_impl: str | None = None) -> Changes:
    """Do what `recipe` says about vision attention alone, as `apply_` does, if it says anything.

    An implementation that cannot run on the model's device is an error at once.
    """
    from octavo.integrations.transformers.vision import check_vision_impl

    changes = Changes({})
    if vision_impl is not None:
        check_impl_name(vision_impl, recipe)
    if recipe.vision_attention is None:
        return changes
    _apply_vision(model, recipe, skipped_layers(model, recipe), changes, vision_impl)
    try:
        check_vision_impl(model, vision_impl)
    except UnsupportedError:
        undo_patches_(model, "vision_attention")
        raise
    return changes


def check_impl_name(vision_impl: str, recipe: Recipe) -> None:
    """Raise unless the recipe has vision attention, and an implementation has this name."""
    from octavo.ops.select import impl_names

    if recipe.vision_attention is None:
        raise ConfigError(
            f"expected vision_attention for impl {vision_impl!r}, got a recipe without"
        )
    if vision_impl not in (names := impl_names("attention")):
        raise ConfigError(f"expected vision_impl, one of {', '.join(names)}; got {vision_impl!r}")


def _apply_vision(
    model: nn.Module, recipe: Recipe, skipped: frozenset[str], changes: Changes, impl: str | None
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


def check_restorable(model: nn.Module) -> None:
    """Raise if a model has linear layers whose plain weights are gone."""
    if converted := find_converted(model):
        raise UnsupportedError(
            f"expected linear layers with their own weights, got {len(converted)} that are FP8 "
            f"now, such as {converted[0]}, and cannot be restored: load the model again"
        )


def detach_(model: nn.Module) -> dict[str, list[str]]:
    """Undo what can be undone; the layers by field."""
    for feature in FEATURES:
        check_patches(model, feature)
    undone = {feature: undo_patches_(model, feature) for feature in FEATURES}
    if is_diffusers_model(model):
        from octavo.integrations.diffusers import attention

        undone["attention"] = attention.detach(model)
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
