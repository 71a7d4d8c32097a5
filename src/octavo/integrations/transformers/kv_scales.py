"""Where the scales of a decoder's keys and values come from: a scale file, or its checkpoint."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo.integrations.transformers import text
from octavo.recipe import KvCacheSettings


def find_kv_scales(
    model: nn.Module,
    names: list[str],
    settings: KvCacheSettings | None,
    scales: ScaleSet | None,
) -> dict[str, LayerScales]:
    """The scales that the settings ask for, by layer; none if they are 1.0 or made on the way."""
    if settings is None or settings.scaling in ("unit", "dynamic"):
        return {}
    if settings.scaling == "static":
        if scales is None:
            raise ConfigError("expected scales for scaling 'static', got none: Recipe(scales=…)")
        return kv_scales(scales, names)
    folder = _folder(model)
    found = None if folder is None else read_kv_scales(folder, list(text.find_layers(model)))
    return {} if found is None else kv_scales(found, names)


def _folder(model: Any) -> Path | None:
    """Where the model's checkpoint lies on this machine, if it came from one."""
    from transformers.utils.hub import cached_file

    name = model.config.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        file = cached_file(name, "config.json", local_files_only=True)
    except OSError:
        return None
    return None if file is None else Path(file).parent


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
