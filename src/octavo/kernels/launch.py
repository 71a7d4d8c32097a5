"""Launches that Triton need not look at twice.

To find what a kernel was compiled to, Triton looks at every argument of every launch. With many
arguments that costs the host time, for which a model waits that no CUDA graph replays. The compiled
kernel is the same again where the tensors have the same dtypes and alignments, and everything else
the same values.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

# What Triton asks of a pointer, in bytes.
ALIGNMENT = 16
# Prompts of any length are different launches: at some point all are forgotten.
MAX_KNOWN = 4096

_KNOWN: dict[tuple[Any, ...], tuple[Any, list[Any], list[int]]] = {}


class Fixed(dict[str, Any]):
    """Arguments that are no tensors, and options: whoever makes them keeps them for calls alike.

    Nobody compares them, which would cost what they save: only the same object is the same.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class Copied(NamedTuple):
    """A tensor that the copy engine reads in tiles of the shape `block`, aligned as it wants.

    Of a tensor and a block, the layout is always the same.
    """

    base: Tensor
    shape: list[int]
    strides: list[int]
    block: tuple[int, ...]
    layout: Any
    padding: str = "zero"

    def checked(self) -> TensorDescriptor:
        """As Triton compiles it, which looks at all of it."""
        return TensorDescriptor(self.base, self.shape, self.strides, list(self.block), self.layout)


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: Mapping[str, Tensor | Copied | None], fixed: Fixed
) -> None:
    """kernel[grid](**tensors, **fixed)."""
    if not isinstance(kernel, JITFunction):  # but one of the interpreter
        kernel[grid](**tensors, **fixed)
        return
    key = (id(kernel), torch.cuda.current_device(), fixed, *tensors, *map(_trait, tensors.values()))
    known = _KNOWN.get(key)
    if known is None:
        if len(_KNOWN) >= MAX_KNOWN:
            _KNOWN.clear()
        given = {name: x.checked() if isinstance(x, Copied) else x for name, x in tensors.items()}
        compiled, names = kernel[grid](**given, **fixed), kernel.arg_names
        arguments = [fixed.get(name) for name in names]
        _KNOWN[key] = compiled, arguments, [names.index(name) for name in tensors]
        return
    compiled, arguments, places = known
    arguments = arguments.copy()
    for place, x in zip(places, tensors.values(), strict=True):
        arguments[place] = x
    compiled[(*grid, 1, 1)[:3]](*arguments)


def _trait(x: Tensor | Copied | None) -> Any:
    """What the compiled kernel depends on."""
    if x is None:
        return None
    if isinstance(x, Copied):
        return x.base.dtype, x.block
    return x.dtype, x.data_ptr() % ALIGNMENT == 0
