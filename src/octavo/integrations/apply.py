"""apply_, quantize_ and restore_: what a recipe says, done to a model in place, and undone."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from octavo.brief import list_names
from octavo.calibration.scale_file import ScaleSet, load_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.linear import (
    check_linear,
    find_converted,
    plan_linear,
    quantize_linear_,
)
from octavo.patterns import Layer, match_layers
from octavo.recipe import LinearSettings, Recipe

# Up to so many layers that stay for one reason have a line of their own.
NUM_LEFT_LINES = 3


@dataclass(frozen=True)
class Changes:
    """What was changed in a model: the layers that each field of a recipe reached.

    fused: those of them whose whole forward was replaced, not only the attention in it. left: the
    layers that stay as they are, with the reason: of a kind that the field can do nothing to, or
    left alone on purpose.
    """

    layers: dict[str, list[str]]
    fused: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, dict[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for name, layers in self.layers.items():
            num_fused = len(self.fused.get(name, ()))
            fused = f", {num_fused} of them fused" if num_fused else ""
            lines.append(f"{name}: {len(layers)} layers{fused}")
            lines += _left_lines(name, self.left.get(name, {}))
        return "\n".join(lines) or "nothing was changed"


def _left_lines(name: str, left: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for layer, reason in left.items():
        by_reason.setdefault(reason, []).append(layer)
    lines = []
    for reason, layers in by_reason.items():
        if len(layers) <= NUM_LEFT_LINES:
            lines += [f"{name}: {layer} stays as it is ({reason})" for layer in layers]
        else:
            kept = f"{len(layers)} layers stay as they are ({reason})"
            lines.append(f"{name}: {kept}: {list_names(layers)}")
    return lines


def apply_(model: nn.Module, recipe: Recipe, *, vision_impl: str | None = None) -> Changes:
    """Do what `recipe` says to a model, in place; returns what was changed.

    A field that octavo cannot do to this model is an error, and the model stays as it was; FP8
    vision attention on a GPU without FP8 is one, too. Linear layers are replaced one by one and
    cannot be restored. vision_impl: the implementation of vision attention by name, such as
    "reference"; left out, the fastest that can.
    """
    fields = recipe.settings()
    if vision_impl is not None:
        _check_vision_impl(vision_impl, recipe)
    if unknown := sorted(fields.keys() - {"vision_attention", "kv_cache", "linear"}):
        raise UnsupportedError(
            f"expected a recipe for vision_attention, kv_cache and linear, got {', '.join(unknown)}"
        )
    if not fields:
        raise ConfigError("expected a recipe that changes something, got an empty one")
    skipped = skipped_layers(model, recipe)
    plan = None
    if recipe.linear is not None:
        plan = plan_linear(model, recipe.ignored_layers)
        scales = read_scales(recipe, recipe.linear)
        check_linear(model, plan, recipe.linear, scales)
    changes = Changes({})
    try:
        if recipe.vision_attention is not None:
            _apply_vision(model, recipe, skipped, changes, vision_impl)
        if recipe.kv_cache is not None:
            _apply_kv_cache(model, recipe, skipped, changes)
        if plan is not None and recipe.linear is not None:  # last: it cannot be undone
            changes.layers["linear"] = quantize_linear_(model, plan, recipe.linear, scales)
            changes.left["linear"] = plan.left
            _note_for_saving(model, recipe)
    except Exception:
        if changes.layers:
            _detach(model)
        raise
    return changes


def _note_for_saving(model: Any, recipe: Recipe) -> None:
    """Have a transformers model's config say what its weights are: save_pretrained writes it."""
    if any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        from octavo.integrations.transformers.quantizer import OctavoConfig

        assert recipe.linear is not None
        model.config.quantization_config = OctavoConfig(recipe.linear, recipe.ignored_layers)


def quantize_(
    model: nn.Module,
    config: str | Mapping[str, Any] | LinearSettings | Recipe = "fp8",
    *,
    ignored_layers: Sequence[str] = (),
    scales: str | os.PathLike[str] | Mapping[str, Any] | ScaleSet | None = None,
) -> Changes:
    """Replace a model's linear layers by FP8 ones, in place; returns what was changed, and not.

    config: "fp8", a recipe's settings of linear layers, those in the words of vLLM ({"method":
    "fp8", "activation_scheme": …, "weight_block_size": …, "ignored_layers": […]}), or a whole
    Recipe for linear layers alone. ignored_layers: patterns of layers to leave; one that matches
    nothing is an error. scales: for static activations, as `calibrate_linear` finds them.
    """
    return apply_(model, _linear_recipe(config, ignored_layers, scales))


def _linear_recipe(config: Any, ignored_layers: Sequence[str], scales: Any) -> Recipe:
    if isinstance(config, Recipe):
        if ignored_layers or scales is not None:
            raise ConfigError("expected ignored_layers and scales in the recipe, got them beside")
        if list(config.settings()) != ["linear"]:
            got = ", ".join(config.settings()) or "an empty one"
            raise ConfigError(f"expected a recipe for linear alone, got {got}: use apply_")
        return config
    if isinstance(config, Mapping):
        config = dict(config)
        if ignored_layers and "ignored_layers" in config:
            raise ConfigError("expected ignored_layers once, got them in the config and beside")
        ignored_layers = config.pop("ignored_layers", None) or ignored_layers
    if isinstance(scales, ScaleSet):
        scales = scales.to_dict()
    recipe = Recipe(linear=config, ignored_layers=ignored_layers, scales=scales)
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
    from octavo.integrations.transformers import text, vision

    layers: list[Layer] = []
    if recipe.vision_attention is not None:
        found = vision.find_layers(model)
        layers += [Layer(name, index) for index, name in enumerate(found)]
    if recipe.kv_cache is not None:
        layers += text.as_patterns_see(model)
    return frozenset(layer.name for layer in match_layers(recipe.skip_layers, layers))


def restore_(model: nn.Module) -> Changes:
    """Undo `apply_`, and `use_graphs_` with it; returns what was undone.

    Linear layers in FP8 are an error: their plain weights are gone.
    """
    if converted := find_converted(model):
        raise UnsupportedError(
            f"expected linear layers with their own weights, got {len(converted)} that are FP8 "
            f"now, such as {converted[0]}, and cannot be restored: load the model again"
        )
    undone = _detach(model)
    if not undone:
        raise ConfigError("expected a model that apply_ has changed, got one as it was made")
    return Changes(undone)


def _detach(model: nn.Module) -> dict[str, list[str]]:
    """Undo what can be undone; the layers by field."""
    from octavo.integrations.transformers import graphed_vision, kv_cache, vision

    graphed = graphed_vision.find_graphed(model)
    undone = {"vision_attention": vision.detach(model), "kv_cache": kv_cache.detach(model)}
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
