"""A linear layer that multiplies a single token at the speed at which its weight is read."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from octavo import ops


class OneTokenLinear(nn.Linear):
    """What nn.Linear computes; a single token by `ops.matvec`, which has no tile to fill with it.

    A layer becomes one, and stops to be one, by its class: weights stay where they are.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features]; returns [..., out_features]."""
        if math.prod(input.shape[:-1]) == 1:
            return ops.matvec(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


def take_single_tokens(module: nn.Module) -> list[nn.Linear]:
    """Turn the plain linear layers inside, `module` too, into OneTokenLinear; returns which."""
    # Not of a subclass, which may compute something else.
    found = [part for part in module.modules() if type(part) is nn.Linear]
    for part in found:
        part.__class__ = OneTokenLinear
    return found


def give_single_tokens_back(layers: list[nn.Linear]) -> None:
    """Turn layers into plain ones again."""
    for layer in layers:
        layer.__class__ = nn.Linear
