"""What `--additional-config '{"octavo": {…}}'` says of linear layers, and what that means for each.

vLLM fuses projections of one input (q_proj, k_proj and v_proj become qkv_proj). A pattern may name
the fused layer or all of its parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from pydantic import PlainValidator, model_validator

from octavo.brief import brief, list_names
from octavo.errors import ConfigError
from octavo.integrations.linear import SENSITIVE_NAMES, layer_index
from octavo.integrations.vllm.names import QUANTIZATION
from octavo.layers.linear import ALIGNMENT
from octavo.patterns import Layer, match_layers, parse_pattern
from octavo.recipe import LinearSettings, Patterns
from octavo.settings import Settings, Shorthands

KEY = "octavo"


def _read_linear(value: object) -> LinearSettings:
    settings = LinearSettings.read(value)
    if settings is None:
        raise ConfigError(
            f"expected 'fp8' or settings, got {brief(value)}: to leave all linear layers alone, "
            f"leave --quantization {QUANTIZATION} out"
        )
    if settings.scaling == "static":
        raise ConfigError(
            "scaling 'static' is not supported inside vLLM, whose fused layers have names that "
            "octavo's scale files do not know: use scaling 'dynamic'"
        )
    return settings


class PluginSettings(Settings):
    """How `--quantization octavo` quantizes linear layers: the words are those of a recipe."""

    shorthands: ClassVar[Shorthands] = {}
    linear: Annotated[LinearSettings, PlainValidator(_read_linear)] = LinearSettings()
    ignored_layers: Patterns = ()
    weight_only_layers: Patterns = ()

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        if both := sorted({*self.ignored_layers} & {*self.weight_only_layers}):
            raise ConfigError(
                "expected a pattern in ignored_layers or in weight_only_layers, got in both: "
                f"{list_names(both)}"
            )
        return self


def read_settings(vllm_config: Any) -> PluginSettings:
    """The settings in a VllmConfig; ConfigError for unknown keys, or for some that nobody reads."""
    additional = vllm_config.additional_config
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    if given is None:
        return PluginSettings()
    if not isinstance(given, Mapping):
        keys = ", ".join(PluginSettings.model_fields)
        raise ConfigError(
            f"--additional-config: {KEY}: expected an object with the keys {keys}, got "
            f"{brief(given)}"
        )
    try:
        settings = PluginSettings(**given)
    except ConfigError as error:
        raise ConfigError(f"--additional-config: {KEY}: {error}") from None
    if given and vllm_config.model_config.quantization != QUANTIZATION:
        raise ConfigError(
            f"--additional-config has settings of {KEY} for linear layers, which need "
            f"--quantization {QUANTIZATION}"
        )
    return settings


@dataclass
class LinearChoice:
    """Which linear layers of a model are quantized, and how: asked as vLLM makes each of them.

    settings: of each quantized layer, by name. left: the others, with the reason.
    """

    given: PluginSettings
    settings: dict[str, LinearSettings] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _parts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def choose(
        self, name: str, parts: Sequence[str], sizes: tuple[int, int]
    ) -> LinearSettings | None:
        """The settings of a layer, or None if it stays as it is.

        parts: the last components of the names that a fused layer has in the checkpoint. sizes: its
        inputs and outputs.
        """
        parent, _, leaf = name.rpartition(".")
        self._parts[name] = tuple(f"{parent}.{part}" if parent else part for part in parts)
        self.settings.pop(name, None)
        self.left.pop(name, None)
        is_ignored = self._is_matched(name, "ignored_layers")
        is_weight_only = self._is_matched(name, "weight_only_layers")
        if is_ignored and is_weight_only:
            raise ConfigError(
                f"{name}: expected a layer in ignored_layers or in weight_only_layers, got in both"
            )
        if is_ignored:
            reason: str | None = "ignored_layers"
        elif min(sizes) < ALIGNMENT:
            reason = f"small: {sizes[0]} to {sizes[1]}"
        else:
            reason = None if is_weight_only else SENSITIVE_NAMES.get(leaf)
        if reason is not None:
            self.left[name] = reason
            return None
        linear = self.given.linear
        self.settings[name] = linear.weight_only() if is_weight_only else linear
        return self.settings[name]

    def check(self) -> None:
        """Raise if a pattern has matched none of the layers that were asked about."""
        layers = [_layer(name) for name in self._all_names()]
        for patterns in (self.given.ignored_layers, self.given.weight_only_layers):
            match_layers(patterns, layers)

    def _all_names(self) -> Iterable[str]:
        for name, parts in self._parts.items():
            yield name
            yield from parts

    def _is_matched(self, name: str, key: str) -> bool:
        """Whether patterns match a layer; an error if they match some of its parts alone."""
        patterns = [parse_pattern(text) for text in getattr(self.given, key)]

        def is_matched(one: str) -> bool:
            return any(pattern.matches(_layer(one)) for pattern in patterns)

        parts = self._parts[name]
        matched = [part for part in parts if is_matched(part)]
        if is_matched(name) or (parts and len(matched) == len(parts)):
            return True
        if matched:
            others = [part for part in parts if part not in matched]
            raise ConfigError(
                f"{key} matches {list_names(matched)} but not {list_names(others)}, which vLLM "
                f"fuses into one layer, {name}: name all of them or none"
            )
        return False


def _layer(name: str) -> Layer:
    return Layer(name, layer_index(name))
