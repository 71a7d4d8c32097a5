"""Buffers that stay float32, or FP8, when a model changes its dtype."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from octavo.internals import require
from octavo.numerics.formats import FORMATS

require("torch.nn.Module._apply", "torch.nn.Module._buffers")

# The integers of the same size, which a change of dtype leaves alone.
_INTEGERS = {torch.float32: torch.int32, **{fmt.dtype: torch.uint8 for fmt in FORMATS.values()}}


class Float32Buffers(nn.Module):
    """A module whose float32 and FP8 buffers move with a model but are never rounded.

    `model.to(torch.bfloat16)` rounds every floating-point buffer it finds; seen as integers, these
    only move.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Self:
        buffers = {name: x for name, x in self._buffers.items() if x is not None}
        kept = {name: x for name, x in buffers.items() if x.dtype in _INTEGERS}
        self._buffers.update({name: x.view(_INTEGERS[x.dtype]) for name, x in kept.items()})
        try:
            super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._buffers.update(kept)
            raise
        for name, x in kept.items():
            moved = self._buffers[name]
            assert moved is not None
            self._buffers[name] = moved.view(x.dtype)
        return self
