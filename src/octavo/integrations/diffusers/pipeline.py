"""apply_ and restore_ for pipelines of diffusers: each component by what the recipe says of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from octavo.brief import brief, list_names
from octavo.calibration.scale_file import ScaleSet, load_scales, of_component
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.apply_model import (
    Preparation,
    apply_attention_,
    apply_linear_,
    check_restorable,
    detach_,
    prepare,
)
from octavo.integrations.changes import Changes
from octavo.integrations.diffusers import attention, linear
from octavo.integrations.linear import LinearPlan, plan_linear
from octavo.layers.linear import Fp8Linear
from octavo.patterns import Layer, match_layers, parse_pattern
from octavo.recipe import LINEAR_PATTERNS, LinearSettings, Recipe

# What a recipe is for unless it names components: pipelines have one or two of each.
TRANSFORMER = "transformer"
TEXT_ENCODER = "text_encoder"
# The fields of a recipe for a pipeline, and the components that each is about.
ABOUT = {"attention": TRANSFORMER, "linear": TRANSFORMER, "text_encoder": TEXT_ENCODER}
# The word of vLLM and vllm-omni for "all components that have no config of their own".
DEFAULT = "default"
PATTERNS = ("ignored_layers", "weight_only_layers")
# Words of one config; a mapping with none of them is by component.
WORDS = frozenset(LinearSettings.model_fields) | {
    *("method", "activation_scheme", "weight_block_size", *PATTERNS),
}


def apply_pipeline_(pipe: Any, recipe: Recipe) -> Changes:
    """Do what `recipe` says to a pipeline's components, in place; returns what was changed.

    linear and attention are about its transformers, text_encoder about its text encoders, and
    components about those that it names. Anything wrong with one of them is found before any
    changes.
    """
    modules = find_components(pipe)
    prepared = _prepare_all(pipe, recipe)
    found = {name: Changes({}) for name in prepared}
    try:
        for name, preparation in prepared.items():
            apply_attention_(preparation, found[name])
        for name, preparation in prepared.items():  # last: they cannot be undone
            apply_linear_(preparation, found[name])
    except Exception:
        for name in prepared:
            detach_(modules[name])
        raise
    return _joined(found)


def check_recipe(pipe: Any, recipe: Recipe) -> None:
    """Raise whatever `apply_pipeline_` would find wrong; nothing changes."""
    _prepare_all(pipe, recipe)


def restore_pipeline_(pipe: Any) -> Changes:
    """Undo `apply_pipeline_`; an error, before anything changes, if linear layers are FP8."""
    modules = find_components(pipe)
    for module in modules.values():
        check_restorable(module)
    undone = {name: Changes(detach_(module)) for name, module in modules.items()}
    joined = _joined(undone)
    if not joined.layers:
        raise ConfigError("expected a pipeline that apply_ has changed, got one as it was made")
    return joined


def find_components(pipe: Any) -> dict[str, nn.Module]:
    """The models of a pipeline by name."""
    components = getattr(pipe, "components", None)
    if not isinstance(components, Mapping):
        raise ConfigError(
            f"expected a torch module or a pipeline of diffusers, got {type(pipe).__name__}"
        )
    return {name: part for name, part in components.items() if isinstance(part, nn.Module)}


def check_plain(pipe: Any) -> None:
    """Raise if linear layers are in FP8 already: such a pipeline is nothing to compare with."""
    for component, module in find_components(pipe).items():
        found = [name for name, part in module.named_modules() if isinstance(part, Fp8Linear)]
        if found:
            raise ConfigError(
                f"expected a pipeline with plain linear layers to compare with, got {len(found)} "
                f"in FP8, such as {component}.{found[0]}: load one that was not saved in FP8"
            )


def find_transformers(model: Any) -> dict[str, nn.Module]:
    """The transformers of a pipeline by name, or a transformer alone."""
    if isinstance(model, nn.Module):
        return {TRANSFORMER: model}
    modules = find_components(model)
    found = {name: part for name, part in modules.items() if name.startswith(TRANSFORMER)}
    if not found:
        raise ConfigError(
            f"expected a pipeline with a transformer, got {type(model).__name__} with the models "
            f"{list_names(list(modules)) or 'none'}"
        )
    return found


def is_text_encoder(name: str) -> bool:
    """Whether a component is a text encoder, by its name."""
    return name.startswith(TEXT_ENCODER)


@dataclass(frozen=True)
class Part:
    """One component of a pipeline that a recipe changes, and what the recipe says about it."""

    name: str
    module: nn.Module
    recipe: Recipe

    @property
    def kept(self) -> dict[str, str]:
        """The linear layers that stay by the component's defaults, with the reason."""
        included, is_encoder = self.recipe.included_layers, is_text_encoder(self.name)
        return linear.kept_layers(self.module, included, is_text_encoder=is_encoder)

    def plan_linear(self) -> LinearPlan:
        """Which linear layers are quantized."""
        own = self.recipe
        return plan_linear(self.module, own.ignored_layers, self.kept, own.weight_only_layers)

    def layers(self, field: str) -> list[Layer]:
        """The layers that a field's patterns can match."""
        if field == "skip_layers":
            has_attention = self.recipe.attention is not None
            return attention.as_patterns_see(self.module) if has_attention else []
        if self.recipe.linear is None:
            return []
        is_encoder = is_text_encoder(self.name)
        layers = linear.as_patterns_see(self.module, is_text_encoder=is_encoder)
        if field == "included_layers":
            optional = linear.kept_of(self.module, is_text_encoder=is_encoder).optional
            hits = [parse_pattern(text).matches for text in optional]
            layers = [layer for layer in layers if any(hit(layer) for hit in hits)]
        return layers


def find_parts(pipe: Any, recipe: Recipe) -> list[Part]:
    """The components that a recipe changes."""
    modules = find_components(pipe)
    fields = {name.rpartition(".")[2] for name in recipe.settings()}
    if unknown := sorted(fields - ABOUT.keys()):
        raise UnsupportedError(
            f"expected a recipe for {', '.join(sorted(ABOUT))} of a pipeline, got "
            f"{', '.join(unknown)}"
        )
    for name, part in recipe.components.items():
        if name not in modules and (part is not None or name not in pipe.components):
            raise ConfigError(
                f"components: expected one of {list_names(list(modules))}, got {name!r}"
            )
    parts = []
    for name, module in modules.items():
        if name in recipe.components or name.startswith(tuple(ABOUT.values())):
            own = recipe.for_component(name, is_text_encoder=is_text_encoder(name))
            if not own.is_empty:
                parts.append(Part(name, module, own))
    for field, prefix in ABOUT.items():
        reached = [n for n in modules if n.startswith(prefix) and n not in recipe.components]
        if getattr(recipe, field) is not None and not reached:
            raise ConfigError(
                f"{field}: expected a pipeline with a {prefix} that components leave to it, got "
                f"the models {list_names(list(modules))}"
            )
    if not parts:
        raise ConfigError("expected a recipe that changes something, got an empty one")
    own_patterns = _share_patterns([part for part in parts if part.name not in recipe.components])
    return [own_patterns.get(part.name, part) for part in parts]


def _share_patterns(parts: Sequence[Part]) -> dict[str, Part]:
    """Components with those patterns alone that match in them, by name.

    Patterns outside of `components` hold for several of them; each must match in at least one.
    """
    fitting: dict[str, dict[str, list[str]]] = {part.name: {} for part in parts}
    for field in ("skip_layers", *LINEAR_PATTERNS):
        layers = {part.name: part.layers(field) for part in parts}
        patterns = [text for part in parts for text in getattr(part.recipe, field)]
        match_layers(list(dict.fromkeys(patterns)), sum(layers.values(), []))
        for part in parts:
            fitting[part.name][field] = [
                text
                for text in getattr(part.recipe, field)
                if any(map(parse_pattern(text).matches, layers[part.name]))
            ]
    return {
        part.name: Part(part.name, part.module, part.recipe.replace(**fitting[part.name]))
        for part in parts
    }


def _prepare_all(pipe: Any, recipe: Recipe) -> dict[str, Preparation]:
    read = cache(load_scales)
    prepared = {}
    for part in find_parts(pipe, recipe):
        own = part.recipe
        if (scales := own.scales) is not None:  # of the whole pipeline
            found = read(scales) if isinstance(scales, str) else ScaleSet.from_dict(scales)
            own = own.replace(scales=of_component(found, part.name).to_dict())
        with naming(part.name):
            prepared[part.name] = prepare(part.module, own, kept=part.kept)
    return prepared


@contextmanager
def naming(component: str) -> Iterator[None]:
    """Errors inside say which component they are about."""
    try:
        yield
    except (CheckpointError, ConfigError, UnsupportedError) as error:
        raise type(error)(f"{component}: {error}") from None


def _joined(found: Mapping[str, Changes]) -> Changes:
    """The changes of all components, as component.field."""
    joined = Changes({})
    for name, changes in found.items():
        for kind in ("layers", "fused", "weight_only", "joint", "left", "faster"):
            fields = getattr(changes, kind)
            getattr(joined, kind).update({f"{name}.{key}": fields[key] for key in fields})
    return joined


def make_recipe(
    config: str | Mapping[str, Any] | None,
    components: Sequence[str],
    *,
    attention: Any = None,
    scales: Any = None,
) -> Recipe:
    """The recipe for a pipeline with these components.

    config: "fp8", {"method": "fp8", "activation_scheme": …, "weight_block_size": …,
    "ignored_layers": […], "weight_only_layers": […]} for its transformers, or {component: one of
    these or None}, where the longest name that a component's begins with counts, and "default"
    holds for the transformers and text encoders that none does. attention: of its transformers.
    scales: of static activations.
    """
    if isinstance(config, Mapping) and not config.keys() & WORDS:
        return _recipe_by_component(config, components, attention, scales)
    fields = _recipe_fields(config)
    return Recipe(attention=attention, scales=scales, **fields)


def _recipe_fields(config: object) -> dict[str, Any]:
    """The fields of a recipe that one config means."""
    if not isinstance(config, Mapping):
        return {} if config is None else {"linear": config}
    words = dict(config)
    patterns = {name: words.pop(name, None) or () for name in PATTERNS}
    return {"linear": words, **patterns}


def _recipe_by_component(
    config: Mapping[str, Any], components: Sequence[str], attention: Any, scales: Any
) -> Recipe:
    if not config:
        raise ConfigError("quantization_config: expected what to quantize, got an empty mapping")
    for name in config.keys() - {DEFAULT}:
        if not any(part.startswith(name) for part in components):
            raise ConfigError(
                f"quantization_config: expected components such as {list_names(components)}, or "
                f"words such as {list_names(sorted(WORDS))}; got {brief(name)}"
            )
    recipes: dict[str, Any] = {}
    for part in components:
        names = [name for name in config if name != DEFAULT and part.startswith(name)]
        is_transformer = part.startswith(TRANSFORMER)
        if not names and (DEFAULT not in config or not (is_transformer or is_text_encoder(part))):
            continue
        fields = _recipe_fields(config[max(names, key=len) if names else DEFAULT])
        if is_transformer and attention is not None:
            fields["attention"] = attention
        recipes[part] = fields or None
    transformers = [part for part in components if part.startswith(TRANSFORMER)]
    has_others = any(part not in recipes for part in transformers) or not transformers
    return Recipe(components=recipes, attention=attention if has_others else None, scales=scales)
