"""The scales that a recipe brings: the path of a file, its content, or numbers by layer."""

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from octavo.brief import brief
from octavo.errors import ConfigError
from octavo.settings import read_none

# What a layer has in a scale file: a scale, one for each head, or a mean key of each head; None is
# for a q without a scale.
LayerEntry = Mapping[str, float | tuple[float, ...] | tuple[tuple[float, ...], ...] | None]
InlineScales = Mapping[str, Any]


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
    for key, value in entry.items() if isinstance(entry, Mapping) else [("", None)]:
        if key == "k_mean":
            scales[key] = _read_mean(layer, value)
            continue
        if key == "q" and read_none(value) is None:  # recipes write None as "none"
            scales[key] = None
            continue
        numbers = value if isinstance(value, list | tuple) else (value,)
        if not all(type(n) in (int, float) and 0 < n <= sys.float_info.max for n in numbers):
            expected = "expected positive finite scales such as {'q': 0.1}"
            raise ConfigError(f"layer {brief(layer)}: {expected}, got {brief(entry)}")
        scales[str(key)] = tuple(map(float, numbers)) if numbers is value else float(numbers[0])
    return MappingProxyType(scales)


def _read_mean(layer: object, value: object) -> tuple[tuple[float, ...], ...]:
    rows: list[Any] = list(value) if isinstance(value, list | tuple) else [None]
    numbers: list[Any] = [
        n for row in rows for n in (row if isinstance(row, list | tuple) else [None])
    ]
    if not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in numbers):
        expected = "expected k_mean to be a list of finite numbers for each head"
        raise ConfigError(f"layer {brief(layer)}: {expected}, got {brief(value)}")
    return tuple(tuple(map(float, row)) for row in rows)
