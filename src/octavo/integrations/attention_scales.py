"""The static scales of an attention layer, from a scale file's entry to tensors."""

import torch

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
