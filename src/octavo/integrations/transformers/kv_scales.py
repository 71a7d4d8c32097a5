"""Which scales of a scale file are those of a decoder's attention layers."""

import re
from collections.abc import Iterable

from octavo.calibration.scale_file import LayerScales, ScaleSet


def kv_scales(scales: ScaleSet, names: Iterable[str]) -> dict[str, LayerScales]:
    """The scales of these layers, by the model's names; CheckpointError if one has none.

    Files may have vLLM's names. A file for vision attention is refused.
    """
    scales.require_kind("kv_cache")
    found = {name: _name_in(scales, name) for name in names}
    scales.require(found.values())
    return {name: scales.layers[other] for name, other in found.items()}


def vllm_name(name: str) -> str:
    """What vLLM calls a decoder's attention layer.

    It attends in a module inside, and puts the text model of vision-language models elsewhere.
    """
    return re.sub(r"^model\.language_model\.", "language_model.model.", name) + ".attn"


def _name_in(scales: ScaleSet, name: str) -> str:
    names = (name, f"{name}.attn", vllm_name(name))
    return next((other for other in names if other in scales.layers), name)
