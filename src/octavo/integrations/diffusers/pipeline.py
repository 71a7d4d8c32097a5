"""apply_ and restore_ for pipelines of diffusers: each component by what the recipe says of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn

from octavo.brief import list_names
from octavo.calibration.component_scales import of_component
from octavo.calibration.scale_file import ScaleSet, load_scales
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.apply import (
    Preparation,
    apply_attention_,
    apply_linear_,
    check_restorable,
    detach_,
    prepare,
)
from octavo.integrations.changes import Changes
from octavo.integrations.diffusers import attention, defaults
from octavo.integrations.diffusers.defaults import kept_layers, kept_of
from octavo.layers.linear import Fp8Linear
from octavo.patterns import Layer, match_layers, parse_pattern
from octavo.recipe import LINEAR_PATTERNS, Recipe

# What a recipe is for unless it names components: pipelines have one or two of each.
TRANSFORMER = "transformer"
TEXT_ENCODER = "text_encoder"
PIPELINE_FIELDS = frozenset({"attention", "linear", "text_encoder"})
PATTERN_FIELDS = ("skip_layers", *LINEAR_PATTERNS)


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


def component_recipes(pipe: Any, recipe: Recipe) -> dict[str, Recipe]:
    """What the recipe says about each component that it changes."""
    modules = find_components(pipe)
    _check_fields(recipe)
    for name, part in recipe.components.items():
        if name not in modules and (part is not None or name not in pipe.components):
            raise ConfigError(
                f"components: expected one of {list_names(list(modules))}, got {name!r}"
            )
    recipes = {}
    for name in modules:
        if name in recipe.components or name.startswith(TRANSFORMER) or is_text_encoder(name):
            own = recipe.for_component(name, is_text_encoder=is_text_encoder(name))
            if not own.is_empty:
                recipes[name] = own
    for field, prefix in (("linear", TRANSFORMER), ("attention", TRANSFORMER)):
        _check_reached(recipe, field, prefix, modules)
    _check_reached(recipe, "text_encoder", TEXT_ENCODER, modules)
    if not recipes:
        raise ConfigError("expected a recipe that changes something, got an empty one")
    shared = [name for name in recipes if name not in recipe.components]
    return recipes | _share_patterns({name: recipes[name] for name in shared}, modules)


def _check_fields(recipe: Recipe) -> None:
    fields = {name.rpartition(".")[2] for name in recipe.settings()}
    if unknown := sorted(fields - PIPELINE_FIELDS):
        raise UnsupportedError(
            f"expected a recipe for {', '.join(sorted(PIPELINE_FIELDS))} of a pipeline, got "
            f"{', '.join(unknown)}"
        )


def _check_reached(
    recipe: Recipe, field: str, prefix: str, modules: Mapping[str, nn.Module]
) -> None:
    """Raise if a field of the recipe is about components that the pipeline does not have."""
    reached = [n for n in modules if n.startswith(prefix) and n not in recipe.components]
    if getattr(recipe, field) is not None and not reached:
        raise ConfigError(
            f"{field}: expected a pipeline with a {prefix} that components leave to it, got the "
            f"models {list_names(list(modules))}"
        )


def _share_patterns(
    recipes: Mapping[str, Recipe], modules: Mapping[str, nn.Module]
) -> dict[str, Recipe]:
    """The recipes with those patterns alone that match in their component.

    Patterns outside of `components` hold for several of them; each must match in at least one.
    """
    shared = dict(recipes)
    for field in PATTERN_FIELDS:
        layers = {name: _layers(field, name, modules[name], own) for name, own in recipes.items()}
        everywhere = [layer for found in layers.values() for layer in found]
        patterns = list(dict.fromkeys(p for own in recipes.values() for p in getattr(own, field)))
        match_layers(patterns, everywhere)
        for name, own in shared.items():
            fitting = _fitting(getattr(own, field), layers[name])
            shared[name] = own.replace(**{field: fitting})
    return shared


def _layers(field: str, component: str, module: nn.Module, own: Recipe) -> list[Layer]:
    """The layers of one component that a field's patterns can match."""
    if field == "skip_layers":
        return attention.as_patterns_see(module) if own.attention is not None else []
    if own.linear is None:
        return []
    is_encoder = is_text_encoder(component)
    layers = defaults.as_patterns_see(module, is_text_encoder=is_encoder)
    if field == "included_layers":
        optional = kept_of(module, is_text_encoder=is_encoder).optional
        hits = [parse_pattern(text).matches for text in optional]
        layers = [layer for layer in layers if any(hit(layer) for hit in hits)]
    return layers


def _fitting(patterns: Sequence[str], layers: Sequence[Layer]) -> list[str]:
    matchers: list[tuple[str, Callable[[Layer], bool]]]
    matchers = [(text, parse_pattern(text).matches) for text in patterns]
    return [text for text, matches in matchers if any(map(matches, layers))]


def _with_scales(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes with the scales of their own component in place of those of the pipeline."""
    read = cache(load_scales)
    own = dict(recipes)
    for name, recipe in recipes.items():
        if recipe.scales is not None:
            is_path = isinstance(recipe.scales, str)
            scales = read(recipe.scales) if is_path else ScaleSet.from_dict(recipe.scales)
            own[name] = recipe.replace(scales=of_component(scales, name).to_dict())
    return own


def _prepare_all(pipe: Any, recipe: Recipe) -> dict[str, Preparation]:
    modules = find_components(pipe)
    recipes = _with_scales(component_recipes(pipe, recipe))
    return {name: _prepare(name, modules[name], own) for name, own in recipes.items()}


def _prepare(name: str, module: nn.Module, own: Recipe) -> Preparation:
    with naming(name):
        return prepare(module, own, kept=kept_in(name, module, own))


def kept_in(component: str, module: nn.Module, own: Recipe) -> dict[str, str]:
    """The linear layers of a component that stay by its defaults, with the reason."""
    is_encoder = is_text_encoder(component)
    return kept_layers(module, own.included_layers, is_text_encoder=is_encoder)


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
        for kind in ("layers", "fused", "weight_only", "left", "faster"):
            fields = getattr(changes, kind)
            getattr(joined, kind).update({f"{name}.{key}": fields[key] for key in fields})
    return joined
