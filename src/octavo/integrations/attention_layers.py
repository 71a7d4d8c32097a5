"""What FP8 attention needs of a module that it serves: its device, and its static scales."""

from itertools import chain

import torch
from torch import nn

from octavo.calibration.scale_file import LayerScales
from octavo.errors import ConfigError
from octavo.numerics.qkv import QkvScales
from octavo.recipe import AttentionSettings


def as_tensors(scales: LayerScales, settings: AttentionSettings, name: str) -> QkvScales:
    """A scale file's entry as tensors, one scale for each tensor or head as the settings say."""
    if scales.q is None:
        raise ConfigError(f"{name}: expected scales for q, k and v, got none for q")
    if settings.granularity == "tensor":
        scales = scales.per_tensor()
    parts = [torch.tensor(x, dtype=torch.float32) for x in (scales.q, scales.k, scales.v)]
    if settings.granularity == "head" and any(part.dim() == 0 for part in parts):
        raise ConfigError(f"{name}: expected scales per head, got one for all heads")
    return QkvScales(*parts)


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first weight; FP8 ones are buffers."""
    first = next(chain(module.parameters(), module.buffers()), None)
    if first is None:
        raise ConfigError(f"expected weights in {type(module).__name__}, got none")
    return first.device
