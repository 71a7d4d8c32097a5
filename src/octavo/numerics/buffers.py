"""Buffers that stay float32 when a model changes its dtype."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Float32Buffers(nn.Module):
    """A module whose float32 buffers move with a model but are never rounded.

    `model.to(torch.bfloat16)` rounds every floating-point buffer it finds; seen as integers, these
    only move.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Self:
        buffers = {name: x for name, x in self._buffers.items() if x is not None}
        kept = {name: x for name, x in buffers.items() if x.dtype == torch.float32}
        self._buffers.update({name: x.view(torch.int32) for name, x in kept.items()})
        try:
            super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._buffers.update(kept)
            raise
        for name in kept:
            moved = self._buffers[name]
            assert moved is not None
            self._buffers[name] = moved.view(torch.float32)
        return self
