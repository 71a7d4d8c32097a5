"""Keys and values beyond the range of their scales: counted on the device, told without waiting."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from octavo.brief import list_names
from octavo.layers.decoder_attention import DecoderAttention
from octavo.layers.saturation import HostCopy, is_capturing

# Passes between two looks at the counters; the first is at the second pass, after the prompt.
EVERY = 64


def read_saturation(model: nn.Module) -> dict[str, tuple[int, int]]:
    """How many (keys, values) of each layer with uncalibrated scales saturated; waits for them."""
    found = find_counting(model)
    if not found:
        return {}
    counts = torch.stack([layer.saturated for layer in found.values()]).tolist()
    return {name: (keys, values) for name, (keys, values) in zip(found, counts, strict=True)}


def find_counting(model: nn.Module) -> dict[str, DecoderAttention]:
    """The layers that count what saturates in their cache, by name."""
    return {
        module.name: module
        for module in model.modules()
        if isinstance(module, DecoderAttention) and module.counts_saturation
    }


@dataclass
class Watch:
    """Looks at a decoder's counters now and then, and warns once of layers that saturate."""

    num_passes: int = 0
    pending: tuple[list[str], HostCopy] | None = None
    warned: set[str] = field(default_factory=set)

    def look(self, decoder: nn.Module) -> None:
        """Before a pass: tell what the last look found, and begin another if it is time."""
        if torch.compiler.is_compiling() or is_capturing():
            return
        if self.pending is not None and self.pending[1].is_ready:
            names, counts = self.pending
            self.pending = None
            self._tell(names, counts)
        is_time = self.pending is None and self.num_passes % EVERY == 1
        if is_time and (layers := find_counting(decoder)):
            counted = torch.stack([layer.saturated for layer in layers.values()])
            self.pending = (list(layers), HostCopy(counted))
        self.num_passes += 1

    def _tell(self, names: list[str], counts: HostCopy) -> None:
        found = {
            name: row
            for name, row in zip(names, counts.tolist(), strict=True)
            if any(row) and name not in self.warned
        }
        if not found:
            return
        self.warned |= found.keys()
        num_keys, num_values = (sum(row[i] for row in found.values()) for i in (0, 1))
        warnings.warn(
            f"{num_keys} keys and {num_values} values lie beyond the range of the KV cache's "
            f"scales and were cut, in {list_names(list(found))}: answers may be wrong. Calibrate "
            "(octavo calibrate MODEL --kv --data TEXT), use granularity='token', or skip these "
            "layers",
            stacklevel=2,
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy looks for itself: events stay with the process that made them."""
        return {**vars(self), "pending": None}
