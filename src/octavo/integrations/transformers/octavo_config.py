"""OctavoConfig: what transformers keeps about FP8 linear layers in a model's config.json."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from octavo.brief import brief
from octavo.calibration.scale_file import ScaleSet, load_scales
from octavo.errors import ConfigError
from octavo.patterns import parse_pattern
from octavo.recipe import LinearSettings

METHOD = "octavo"


@register_quantization_config(METHOD)
class OctavoConfig(QuantizationConfigMixin):
    """FP8 linear layers, for `from_pretrained(…, quantization_config=OctavoConfig(…))`.

    linear: "fp8" or the settings that `Recipe.linear` has. ignored_layers: patterns of layers to
    leave as they are; weight_only_layers: of layers whose weight alone is quantized. scales: for
    static activations, a scale file, its path or its content, as `calibrate_linear` finds them; a
    saved model has them in its weights.
    """

    quant_method = METHOD

    def __init__(
        self,
        linear: str | Mapping[str, Any] | LinearSettings = "fp8",
        ignored_layers: Sequence[str] = (),
        scales: str | os.PathLike[str] | Mapping[str, Any] | ScaleSet | None = None,
        *,
        weight_only_layers: Sequence[str] = (),
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ConfigError(f"expected quant_method {METHOD}, got {brief(quant_method)}")
        settings = LinearSettings.read(linear)
        if settings is None:
            raise ConfigError(f"expected 'fp8' or settings of linear layers, got {brief(linear)}")
        if scales is not None and settings.scaling != "static":
            raise ConfigError("scales are given, but scaling is not 'static'; set it")
        self.linear = settings
        self.ignored_layers = _read_patterns(ignored_layers)
        self.weight_only_layers = _read_patterns(weight_only_layers)
        self.scales = scales

    def read_scales(self) -> ScaleSet | None:
        """The scales of static activations, from their file if it is one."""
        scales = self.scales
        if scales is None or isinstance(scales, ScaleSet):
            return scales
        if isinstance(scales, Mapping):
            return ScaleSet.from_dict(scales)
        return load_scales(scales)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON has it; scales only until a model has them in its weights."""
        linear = self.linear.model_dump()
        document: dict[str, Any] = {"quant_method": METHOD, "linear": linear}
        document["ignored_layers"] = list(self.ignored_layers)
        if self.weight_only_layers:  # an octavo that does not know them can read the others
            document["weight_only_layers"] = list(self.weight_only_layers)
        if self.scales is not None:
            scales = self.scales
            is_path = isinstance(scales, str | os.PathLike)
            found = self.read_scales()
            assert found is not None
            document["scales"] = os.fsdecode(scales) if is_path else found.to_dict()  # type: ignore[arg-type]
        return copy.deepcopy(document)

    def __iter__(self) -> Any:
        return iter(self.to_dict().items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OctavoConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def _read_patterns(texts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(texts, str):
        raise ConfigError(f"expected a list of patterns, got {brief(texts)}")
    return tuple(parse_pattern(text).text for text in texts)
