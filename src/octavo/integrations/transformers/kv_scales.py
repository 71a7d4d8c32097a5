"""Where the scales of a decoder's keys and values come from: a scale file, or its checkpoint."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo.integrations.checkpoints.linear_layers import kv_scale_names
from octavo.integrations.transformers import text
from octavo.integrations.transformers.model_files import find_weights, read_dtypes
from octavo.recipe import KvCacheSettings


def find_kv_scales(
    model: nn.Module,
    names: list[str],
    settings: KvCacheSettings | None,
    scales: ScaleSet | None,
) -> dict[str, LayerScales]:
    """The scales that the settings ask for, by layer; none if they are 1.0 or made on the way.

    Scales made on the way may need the means of keys: then layers are here for their k_mean.
    """
    if settings is None:
        return {}
    if settings.scaling == "static" or settings.center_keys:
        if scales is None:
            raise ConfigError(
                "expected scales for scaling 'static' or center_keys, got none: Recipe(scales=…)"
            )
        found = kv_scales(scales, names)
        check_keys(settings, scales.header.rotate_keys, found)
        return found
    if settings.scaling in ("unit", "dynamic"):
        return {}
    folder = _folder(model)
    brought = None if folder is None else read_kv_scales(folder, list(text.find_layers(model)))
    if brought is not None and settings.rotate_keys:
        raise ConfigError(
            "rotate_keys: expected a model without scales of keys, got a checkpoint with some, "
            "which are for keys as they are: calibrate with octavo calibrate --kv --rotate-keys, "
            "and set scaling='static'"
        )
    return {} if brought is None else kv_scales(brought, names)


def brings_kv_scales(model: nn.Module) -> bool:
    """Whether the checkpoint that a model came from has scales for an FP8 cache."""
    folder = _folder(model)
    return folder is not None and bool(kv_scale_names(read_dtypes(find_weights(str(folder)))))


def check_keys(
    settings: KvCacheSettings, is_rotated: bool, layers: Mapping[str, LayerScales]
) -> None:
    """Raise ConfigError unless scales were found on keys such as the settings store.

    is_rotated: whether the file's keys were. Scales per token are found on the way, and means are
    taken before keys are rotated: then only the means must be there.
    """
    problems = []
    if settings.scaling == "static" and settings.rotate_keys != is_rotated:
        problems.append(_difference("rotate_keys", "rotated", settings.rotate_keys))
    for name, scales in layers.items():
        if settings.center_keys != (scales.k_mean is not None):
            problem = _difference("center_keys", "centered", settings.center_keys)
            problems.append(f"{name}: {problem}")
            break
    if problems:
        raise ConfigError("; ".join(problems))


def _difference(setting: str, done: str, is_asked: bool) -> str:
    option = f"--{setting.replace('_', '-')}"
    if is_asked:
        return (
            f"{setting} is set: expected a scale file of {done} keys, got one of keys that were "
            f"not: octavo calibrate --kv {option} makes one"
        )
    return (
        f"{setting} is not set: expected a scale file of keys that were not {done}, got one of "
        f"{done} keys: set {setting}, or calibrate without {option}"
    )


def _folder(model: Any) -> Path | None:
    """Where the model's checkpoint lies on this machine, if it came from one."""
    from transformers.utils import cached_file

    name = model.config.name_or_path
    if not name or Path(name).exists():
        return Path(name) if name and Path(name).is_dir() else None  # a GGUF file has no scales
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
