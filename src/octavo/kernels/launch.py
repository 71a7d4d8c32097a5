"""Launches that Triton need not look at twice.

To find what a kernel was compiled to, Triton looks at every argument of every launch. For kernels
with many arguments that takes the host longer than all else it does for them, and a model that is
not replayed from CUDA graphs waits for the host. The compiled kernel is the same again where the
tensors have the same dtypes and alignments, and everything else the same values.
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

_KNOWN: dict[tuple[Any, ...], Any] = {}


class Copied(NamedTuple):
    """A tensor that the copy engine reads in tiles of the shape `block`, aligned as it wants."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any
    padding: str = "zero"

    def key(self) -> tuple[Any, ...]:
        """What the compiled kernel depends on."""
        return self.base.dtype, *self.shape, *self.strides, *self.block, self.layout

    def checked(self) -> TensorDescriptor:
        """As Triton compiles it, which looks at all of it."""
        return TensorDescriptor(self.base, self.shape, self.strides, self.block, self.layout)


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """kernel[grid](**arguments), where each argument has a name, options too."""
    if not isinstance(kernel, JITFunction):  # but one of the interpreter
        kernel[grid](**arguments)
        return
    key = (id(kernel), torch.cuda.current_device(), *arguments, *map(_key, arguments.values()))
    compiled = _KNOWN.get(key)
    if compiled is not None:
        x, y, z = (*grid, 1, 1)[:3]
        compiled[x, y, z](*(arguments[name] for name in kernel.arg_names))
        return
    if len(_KNOWN) >= MAX_KNOWN:
        _KNOWN.clear()
    given = {name: x.checked() if type(x) is Copied else x for name, x in arguments.items()}
    _KNOWN[key] = kernel[grid](**given)


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT == 0
    return x.key() if type(x) is Copied else x
