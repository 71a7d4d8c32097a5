"""apply_ and restore_: what a recipe says, done to a model in place, and undone."""

from dataclasses import dataclass, field

from torch import nn

from octavo.calibration.scale_file import ScaleSet, load_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.patterns import Layer, match_layers
from octavo.recipe import Recipe


@dataclass(frozen=True)
class Changes:
    """What was changed in a model: the layers that each field of a recipe reached.

    fused: those of them whose whole forward was replaced, not only the attention in it. left: the
    layers of a kind that the field can do nothing to, with that kind.
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
            for layer, kind in self.left.get(name, {}).items():
                lines.append(f"{name}: {layer} stays as it is ({kind})")
        return "\n".join(lines) or "nothing was changed"


def apply_(model: nn.Module, recipe: Recipe, *, vision_impl: str | None = None) -> Changes:
    """Do what `recipe` says to a model, in place; returns what was changed.

    A field that octavo cannot do to this model is an error, and the model stays as it was; FP8
    vision attention on a GPU without FP8 is one, too. vision_impl: the implementation of vision
    attention by name, such as "reference"; left out, the fastest that can.
    """
    fields = recipe.settings()
    if vision_impl is not None:
        _check_vision_impl(vision_impl, recipe)
    if unknown := sorted(fields.keys() - {"vision_attention", "kv_cache"}):
        raise UnsupportedError(
            f"expected a recipe for vision_attention and kv_cache, got {', '.join(unknown)}"
        )
    if not fields:
        raise ConfigError("expected a recipe that changes something, got an empty one")
    skipped = skipped_layers(model, recipe)
    changes = Changes({})
    try:
        if recipe.vision_attention is not None:
            _apply_vision(model, recipe, skipped, changes, vision_impl)
        if recipe.kv_cache is not None:
            _apply_kv_cache(model, recipe, skipped, changes)
    except Exception:
        if changes.layers:
            restore_(model)
        raise
    return changes


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
        scales=read_scales(recipe),
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
    """Undo `apply_`, and `use_graphs_` with it; returns what was undone."""
    from octavo.integrations.transformers import graphed_vision, kv_cache, vision

    graphed = graphed_vision.find_graphed(model)
    undone = {"vision_attention": vision.detach(model), "kv_cache": kv_cache.detach(model)}
    if graphed:
        undone["vision_graphs"] = graphed_vision.drop_graphs_(model)
    undone = {name: layers for name, layers in undone.items() if layers}
    if not undone:
        raise ConfigError("expected a model that apply_ has changed, got one as it was made")
    return Changes(undone)


def read_scales(recipe: Recipe) -> ScaleSet | None:
    """The scales that a recipe brings, from their file if it names one."""
    if recipe.scales is None:
        return None
    if isinstance(recipe.scales, str):
        return load_scales(recipe.scales)
    return ScaleSet.from_dict(recipe.scales)
