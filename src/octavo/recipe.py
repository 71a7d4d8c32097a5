"""Recipe: the one description of what is quantized and how.

A recipe is data: frozen, comparable, hashable, and the same in Python, JSON and TOML. What is not
quantized is None in Python and absent in a file. Where None must be written (weight-only linear
layers, one-level accumulation, a component to leave alone) a file says "none": TOML has no null.
"""

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from octavo.atomic import write_atomically
from octavo.brief import brief, unique_keys
from octavo.errors import ConfigError
from octavo.patterns import parse_pattern
from octavo.settings import Settings, Shorthands, read_none

# What a layer has in a scale file: a scale, one for each head, or a mean key of each head; None is
# for a q without a scale.
LayerEntry = Mapping[str, float | tuple[float, ...] | tuple[tuple[float, ...], ...] | None]
InlineScales = Mapping[str, Any]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Scale = Annotated[Finite, Field(gt=0)]
_SCALES: TypeAdapter[Any] = TypeAdapter(Scale | tuple[Scale, ...])
_MEAN: TypeAdapter[Any] = TypeAdapter(tuple[tuple[Finite, ...], ...])


def read_scales(value: object) -> str | InlineScales | None:
    """What `Recipe.scales` keeps of a value; ConfigError if it can be no scales."""
    if read_none(value) is None:
        return None
    if isinstance(value, str | os.PathLike) and (path := os.fsdecode(value)):
        return path
    if isinstance(value, Mapping) and value.keys() == {"octavo", "layers"}:  # a whole scale file
        header, layers = value["octavo"], read_scales(value["layers"])
        if isinstance(header, Mapping) and isinstance(layers, Mapping):
            return MappingProxyType({"octavo": MappingProxyType(dict(header)), "layers": layers})
    elif isinstance(value, Mapping) and value:
        return MappingProxyType({str(layer): _read_layer(layer, value[layer]) for layer in value})
    raise ConfigError(f"expected a path or {{layer: {{'q': 0.1, …}}}}, got {brief(value)}")


def _read_layer(layer: object, entry: object) -> LayerEntry:
    # Only what any scale must be: which keys a layer has is the business of octavo.calibration.
    scales: dict[str, Any] = {}
    try:
        for key, value in entry.items() if isinstance(entry, Mapping) else [("", None)]:
            if key == "q" and read_none(value) is None:  # recipes write None as "none"
                scales[key] = None
            elif key == "k_mean":
                expected = "expected k_mean to be a list of finite numbers for each head"
                scales[key] = _MEAN.validate_python(value)
            else:
                expected = "expected positive finite scales such as {'q': 0.1}"
                given = tuple(value) if isinstance(value, list) else value
                scales[str(key)] = _SCALES.validate_python(given, strict=True)
    except ValidationError:
        raise ConfigError(f"layer {brief(layer)}: {expected}, got {brief(entry)}") from None
    return MappingProxyType(scales)


def _read_patterns(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"expected a list of patterns, got {brief(value)}")
    return tuple(parse_pattern(text).text for text in value)


class AttentionSettings(Settings):
    """Attention on Q, K and V in e4m3; "static" scales are the recipe's, "dynamic" the data's."""

    granularity: Literal["tensor", "head"] = "tensor"
    scaling: Literal["dynamic", "static"] = "dynamic"


class Bf16Settings(Settings):
    """Attention in the model's own 16 bits, by the same fused path as in FP8; it has no scales."""

    shorthands: ClassVar[Shorthands] = {"bf16": {"dtype": "bf16"}}
    dtype: Literal["bf16"]


def _read_vision(value: object) -> AttentionSettings | Bf16Settings | None:
    match value:
        case "bf16" | Bf16Settings() | {"dtype": _}:
            return Bf16Settings.read(value)
    return AttentionSettings.read(value, other_words=("bf16",))


class KvCacheSettings(Settings):
    """A KV cache in FP8.

    scaling: "checkpoint" takes the scales that came with the weights, and 1.0 with a warning where
    there are none; "static" takes the recipe's; "unit" is 1.0; "dynamic" stores the scale of each
    token and head beside its page. Granularity "token" is always dynamic and no other is: a page
    keeps the scale it was written with, so that of a whole tensor or head cannot follow the data.
    rotate_keys: keys and queries are multiplied by one Hadamard matrix, which spreads large
    channels over all; their products stay. center_keys: the mean key of each head, from the
    recipe's scales, is taken off every key, which softmax does not see. Both leave less for FP8 to
    round. Static scales must have been found on such keys.
    """

    shorthands: ClassVar[Shorthands] = {"fp8": {}, "fp8_e5m2": {"format": "e5m2"}}
    format: Literal["e4m3", "e5m2"] = "e4m3"
    granularity: Literal["tensor", "head", "token"] = "tensor"
    scaling: Literal["checkpoint", "static", "unit", "dynamic"] = "checkpoint"
    rotate_keys: StrictBool = False
    center_keys: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _default_scaling(cls, fields: dict[str, Any]) -> dict[str, Any]:
        is_token = fields.get("granularity") == "token"
        return {"scaling": "dynamic", **fields} if is_token else fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.granularity == "token") != (self.scaling == "dynamic"):
            got = f"got {self.granularity!r} and {self.scaling!r}"
            raise ConfigError(f"granularity 'token' and scaling 'dynamic' go together, {got}")
        if self.center_keys and self.scaling in ("checkpoint", "unit"):
            raise ConfigError(
                "center_keys takes the means of the recipe's scales: expected scaling 'static' or "
                f"'dynamic', got {self.scaling!r}"
            )
        return self


class LinearSettings(Settings):
    """Linear layers with e4m3 weights and, unless `activation` is None, e4m3 activations.

    activation: left out, "tensor" with static scaling, "block 1x128" with block weights, else
    "token". scaling is that of the activations: "static" scales are the recipe's, one for each
    layer, and need activation "tensor". Weights are quantized once, by their own amax. vLLM's words
    are understood as well: method, activation_scheme (scaling), weight_block_size (weight).
    """

    format: Literal["e4m3"] = "e4m3"
    weight: Literal["channel", "tensor", "block 128x128"] = "channel"
    activation: Annotated[
        Literal["token", "tensor", "block 1x128"] | None, BeforeValidator(read_none)
    ] = "token"
    scaling: Literal["dynamic", "static"] = "dynamic"

    @model_validator(mode="before")
    @classmethod
    def _read_words(cls, fields: dict[str, Any]) -> dict[str, Any]:
        fields = _translate_linear(fields)
        by_weight = "block 1x128" if fields.get("weight") == "block 128x128" else "token"
        is_static = fields.get("scaling") == "static"
        return {"activation": "tensor" if is_static else by_weight, **fields}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scaling == "static" and self.activation != "tensor":
            raise ConfigError(
                f"scaling 'static' needs activation 'tensor', got {self.activation!r}; "
                "set activation='tensor' or scaling='dynamic'"
            )
        return self

    def weight_only(self) -> "LinearSettings":
        """Those of layers whose weight alone is quantized: in blocks if these are, else by channel.

        One scale for all of a weight would be the worst choice where quality is the reason.
        """
        weight = "channel" if self.weight == "tensor" else self.weight
        return LinearSettings(format=self.format, weight=weight, activation=None)


def _translate_linear(fields: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's words for linear layers in octavo's; both for one thing must say the same."""
    own = {k: x for k, x in fields.items() if k not in ("activation_scheme", "weight_block_size")}
    if (method := own.pop("method", "fp8")) != "fp8":
        raise ConfigError(f"method: expected 'fp8', got {brief(method)}")
    scheme = fields.get("activation_scheme")
    said: dict[str, Any] = {} if scheme is None else {"scaling": scheme}
    if (size := read_none(fields.get("weight_block_size"))) is not None:
        if not isinstance(size, list | tuple) or list(size) != [128, 128]:
            raise ConfigError(f"weight_block_size: expected [128, 128] or None, got {brief(size)}")
        said["weight"] = "block 128x128"
    for key, value in said.items():
        if own.setdefault(key, value) != value:
            raise ConfigError(f"{key}: got {brief(own[key])} and {brief(value)}: say it once")
    return own


VisionAttention = Annotated[AttentionSettings | Bf16Settings | None, PlainValidator(_read_vision)]
Attention = Annotated[AttentionSettings | None, PlainValidator(AttentionSettings.read)]
KvCache = Annotated[KvCacheSettings | None, PlainValidator(KvCacheSettings.read)]
Linear = Annotated[LinearSettings | None, PlainValidator(LinearSettings.read)]
Patterns = Annotated[tuple[str, ...], PlainValidator(_read_patterns)]
Tiles = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Quantized = AttentionSettings | KvCacheSettings | LinearSettings
# The fields with patterns of linear layers.
LINEAR_PATTERNS = ("ignored_layers", "included_layers", "weight_only_layers")


class ComponentRecipe(Settings):
    """What is quantized in one component of a pipeline, and which of its layers are not."""

    shorthands: ClassVar[Shorthands] = {}
    vision_attention: VisionAttention = None
    attention: Attention = None
    kv_cache: KvCache = None
    linear: Linear = None
    skip_layers: Patterns = ()
    ignored_layers: Patterns = ()
    included_layers: Patterns = ()
    weight_only_layers: Patterns = ()

    def settings(self) -> dict[str, Quantized | Bf16Settings]:
        """The settings of everything that the recipe changes, by field."""
        return {name: value for name, value in self if isinstance(value, Quantized | Bf16Settings)}

    def quantized(self) -> dict[str, Quantized]:
        """The settings of everything that is quantized, by field."""
        return {n: part for n, part in self.settings().items() if isinstance(part, Quantized)}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is changed: the baseline."""
        return not self.settings()

    @property
    def is_static(self) -> bool:
        """Whether something takes its scales, or the means of its keys, from the recipe."""
        return any(
            settings.scaling == "static" or getattr(settings, "center_keys", False)
            for settings in self.quantized().values()
        )

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        fields = self.quantized().keys()
        if self.skip_layers and not fields & {"vision_attention", "attention", "kv_cache"}:
            raise ConfigError("skip_layers needs quantized attention or kv_cache, got neither")
        for name in LINEAR_PATTERNS:
            if getattr(self, name) and not fields & {"linear", "text_encoder"}:
                raise ConfigError(f"{name} needs quantized linear layers, got none; set linear")
        return self


class Recipe(ComponentRecipe):
    """What is quantized and how; the defaults quantize nothing.

    vision_attention: attention of vision encoders. attention: that of diffusion transformers and
    other encoders. kv_cache: a language model's cache and the attention over it. linear: linear
    layers. text_encoder: linear layers of a pipeline's text encoders. Each is None, "fp8" (kv_cache
    also "fp8_e5m2", vision_attention also "bf16", which quantizes nothing) or its settings.
    skip_layers, ignored_layers: patterns (octavo.patterns) of attention and linear layers to leave.
    included_layers: those of linear layers to quantize although the model's defaults leave them.
    weight_only_layers: those of linear layers whose weight alone is quantized, also where the
    model's defaults leave them; of diffusion transformers, "modulation" is all of that kind.
    components: what holds for single components in place of all the fields above; None is nothing.
    promote_every: tiles between additions to the FP32 sum (two-level accumulation); None is never.
    scales: the path of a scale file, its content, or {layer: {"q": …, "k": …, "v": …}}, of linear
    layers {layer: {"input": …}}, for scaling "static" and the means of center_keys.
    margin: what calibration multiplies scales by before it saves them.
    """

    text_encoder: Linear = None
    components: Annotated[
        Mapping[str, Annotated[ComponentRecipe | None, PlainValidator(ComponentRecipe.read)]],
        AfterValidator(MappingProxyType),
    ] = Field(default_factory=lambda: MappingProxyType({}))
    promote_every: Annotated[Tiles | None, BeforeValidator(read_none)] = 1
    scales: Annotated[str | InlineScales | None, PlainValidator(read_scales)] = None
    margin: Scale = 1.5

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**fields)  # type checkers would derive one that refuses "fp8"

    def settings(self) -> dict[str, Quantized | Bf16Settings]:
        """The settings of everything that the recipe changes, by field or component.field."""
        components = {
            f"{name}.{field}": settings
            for name, component in self.components.items()
            for field, settings in (component.settings() if component else {}).items()
        }
        return {**super().settings(), **components}

    @model_validator(mode="after")
    def _check_scales(self) -> Self:
        if self.is_static and self.scales is None:
            raise ConfigError("scaling 'static' or center_keys needs scales, got none; set scales")
        if self.scales is not None and not self.is_static:
            raise ConfigError(
                "scales are given, but nothing has scaling 'static' or center_keys; set one"
            )
        return self

    def for_component(self, name: str, *, is_text_encoder: bool = False) -> "Recipe":
        """What this recipe says about one component, as a recipe without components."""
        own = {field: getattr(self, field) for field in ComponentRecipe.model_fields}
        if name in self.components:
            own = dict(self.components[name] or ())
        elif is_text_encoder:
            patterns = {field: getattr(self, field) for field in LINEAR_PATTERNS}
            own = {"linear": self.text_encoder, **patterns}
        if own.get("linear") is None:
            own |= dict.fromkeys(LINEAR_PATTERNS, ())
        scales = self.scales if ComponentRecipe(**own).is_static else None
        return Recipe(**own, promote_every=self.promote_every, scales=scales, margin=self.margin)

    def replace(self, **changes: Any) -> "Recipe":
        """This recipe with other values in the named fields."""
        return Recipe(**{**dict(self), **changes})

    def describe(self) -> str:
        """One line for each thing that is changed, in the recipe's own words."""
        lines = [f"{field}: {settings}" for field, settings in self.settings().items()]
        for prefix, part in [("", self), *((f"{n}.", c) for n, c in self.components.items())]:
            for field in ("skip_layers", *LINEAR_PATTERNS):
                if patterns := getattr(part, field, ()):
                    lines.append(f"{prefix}{field}: {', '.join(patterns)}")
        if lines and self.promote_every != 1:
            lines.append(f"promote_every: {self.promote_every}")
        if isinstance(self.scales, str):
            lines.append(f"scales: {self.scales}")
        elif self.scales is not None:
            lines.append(f"scales: of {len(self.scales.get('layers', self.scales))} layers")
        return "\n".join(lines) or "nothing is quantized"

    __str__ = describe

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """The recipe that a JSON object describes."""
        return cls._decode(text, "JSON")

    @classmethod
    def from_toml(cls, text: str) -> "Recipe":
        """The recipe that a TOML document describes."""
        return cls._decode(text, "TOML")

    @classmethod
    def _decode(cls, text: str, language: str) -> "Recipe":
        from_json = partial(json.loads, object_pairs_hook=unique_keys)
        try:
            document = (tomllib.loads if language == "TOML" else from_json)(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"expected a recipe in {language}: {str(error)[:200]}") from None
        if not isinstance(document, dict):
            raise ConfigError(f"expected a recipe as an object, got {brief(document)}")
        return cls(**document)

    def to_json(self) -> str:
        """This recipe as a JSON object, which `from_json` reads."""
        return json.dumps(_plain(self), indent=2) + "\n"

    def to_toml(self) -> str:
        """This recipe as a TOML document, which `from_toml` reads."""
        return tomli_w.dumps(_plain(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Recipe":
        """The recipe in a .json or .toml file."""
        language = _language(path)
        try:
            return cls._decode(Path(path).read_text("utf-8"), language)
        except (OSError, ValueError) as error:  # a ConfigError is a ValueError
            raise ConfigError(f"{path}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this recipe to a .json or .toml file, atomically."""
        text = self.to_toml() if _language(path) == "TOML" else self.to_json()
        write_atomically(path, text.encode())

    # Mapping proxies cannot be hashed, copied or pickled; the text form can.
    def __hash__(self) -> int:
        return hash(self.to_json())

    def __deepcopy__(self, memo: object = None) -> "Recipe":
        return self

    def __reduce__(self) -> tuple[Callable[[str], "Recipe"], tuple[str]]:
        return Recipe.from_json, (self.to_json(),)


def _plain(value: Any) -> Any:
    """`value` in the types that JSON and TOML share."""
    match value:
        case None:
            return "none"
        case Settings():
            return {name: _plain(field) for name, field in value.written_fields()}
        case Mapping():
            return {key: _plain(value[key]) for key in sorted(value)}
        case tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def _language(path: str | os.PathLike[str]) -> str:
    if (suffix := Path(path).suffix) not in (".json", ".toml"):
        raise ConfigError(f"expected a file name that ends in .json or .toml, got {path}")
    return suffix[1:].upper()
