"""What vLLM and vllm-omni call quantization of a pipeline, as a recipe."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.brief import brief, list_names
from octavo.errors import ConfigError
from octavo.integrations.diffusers.pipeline import TRANSFORMER, is_text_encoder
from octavo.recipe import LinearSettings, Recipe

DEFAULT = "default"
PATTERNS = ("ignored_layers", "weight_only_layers")
# Words of one config; a mapping with none of them is by component.
WORDS = frozenset(LinearSettings.model_fields) | {
    *("method", "activation_scheme", "weight_block_size", *PATTERNS),
}


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
        return _by_component(config, components, attention, scales)
    fields = _linear(config)
    return Recipe(attention=attention, scales=scales, **fields)


def _linear(config: object) -> dict[str, Any]:
    """The fields of a recipe that one config means."""
    if not isinstance(config, Mapping):
        return {} if config is None else {"linear": config}
    words = dict(config)
    patterns = {name: words.pop(name, None) or () for name in PATTERNS}
    return {"linear": words, **patterns}


def _by_component(
    config: Mapping[str, Any], components: Sequence[str], attention: Any, scales: Any
) -> Recipe:
    if not config:
        raise ConfigError("quantization_config: expected what to quantize, got an empty mapping")
    for name in config:
        if name != DEFAULT and not any(part.startswith(name) for part in components):
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
        fields = _linear(config[max(names, key=len) if names else DEFAULT])
        if is_transformer and attention is not None:
            fields["attention"] = attention
        recipes[part] = fields or None
    transformers = [part for part in components if part.startswith(TRANSFORMER)]
    has_others = any(part not in recipes for part in transformers) or not transformers
    return Recipe(components=recipes, attention=attention if has_others else None, scales=scales)
