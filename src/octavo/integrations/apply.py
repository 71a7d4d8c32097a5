"""apply_ and restore_: what a recipe says, done to a model in place, and undone."""

from dataclasses import dataclass, field

from torch import nn

from octavo.calibration.scale_file import ScaleSet, load_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.recipe import Recipe


@dataclass(frozen=True)
class Changes:
    """What was changed in a model: the layers that each field of a recipe reached.

    fused: those of them whose whole forward was replaced, not only the attention in it.
    """

    layers: dict[str, list[str]]
    fused: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for name, layers in self.layers.items():
            num_fused = len(self.fused.get(name, ()))
            fused = f", {num_fused} of them fused" if num_fused else ""
            lines.append(f"{name}: {len(layers)} layers{fused}")
        return "\n".join(lines) or "nothing was changed"


def apply_(model: nn.Module, recipe: Recipe) -> Changes:
    """Do what `recipe` says to a model, in place; returns what was changed.

    A field that octavo cannot do to this model is an error, and the model stays as it was.
    """
    if unknown := sorted(recipe.settings().keys() - {"vision_attention"}):
        raise UnsupportedError(f"expected a recipe for vision_attention, got {', '.join(unknown)}")
    if recipe.vision_attention is None:
        raise ConfigError("expected a recipe that changes something, got an empty one")
    from octavo.integrations.transformers import vision

    names = vision.attach(
        model,
        recipe.vision_attention,
        skip_layers=recipe.skip_layers,
        scales=_scales(recipe),
        promote_every=recipe.promote_every,
    )
    return Changes({"vision_attention": names}, {"vision_attention": vision.find_fused(model)})


def restore_(model: nn.Module) -> Changes:
    """Undo `apply_`; returns what was undone."""
    from octavo.integrations.transformers import vision

    names = vision.detach(model)
    if not names:
        raise ConfigError("expected a model that apply_ has changed, got one as it was made")
    return Changes({"vision_attention": names})


def _scales(recipe: Recipe) -> ScaleSet | None:
    if recipe.scales is None:
        return None
    if isinstance(recipe.scales, str):
        return load_scales(recipe.scales)
    return ScaleSet.from_dict({name: dict(entry) for name, entry in recipe.scales.items()})
