"""Where the weights of a module are."""

from itertools import chain

import torch
from torch import nn

from octavo.errors import ConfigError


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first weight; FP8 ones are buffers."""
    first = next(chain(module.parameters(), module.buffers()), None)
    if first is None:
        raise ConfigError(f"expected weights in {type(module).__name__}, got none")
    return first.device
