"""Launches that Triton need not look at twice.

To find what a kernel was compiled to, Triton looks at every argument of every launch. With many
arguments that costs the host time, for which a model waits that no CUDA graph replays. The compiled
kernel is the same again where the tensors have the same dtypes and alignments, and everything else
the same values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.internals import internals, require

with internals("triton"):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import JITFunction

require(
    "triton.compiler.CompiledKernel",
    "triton.experimental.gluon.nvidia.hopper.TensorDescriptor",
    "triton.runtime.jit.JITFunction",
)

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


def unchecked_descriptor(x: Tensor, block: tuple[int, ...], layout: Any) -> TensorDescriptor:
    """A tensor descriptor for TMA, which copies x in tiles of the shape `block`.

    `launch` has Triton check the descriptors of a first launch only: later ones differ in their
    pointers alone, and the checks would cost the host more than the launch does.
    """
    descriptor = object.__new__(TensorDescriptor)
    # Fields that other versions of Triton add have their defaults in the class.
    vars(descriptor).update(
        base=x,
        shape=list(x.shape),
        strides=list(x.stride()),
        block_shape=list(block),
        layout=layout,
    )
    return descriptor


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Mapping[str, Tensor | TensorDescriptor | None],
    fixed: Fixed,
) -> None:
    """kernel[grid](**tensors, **fixed)."""
    if not isinstance(kernel, JITFunction):  # but one of the interpreter
        kernel[grid](**tensors, **fixed)
        return
    key = (id(kernel), torch.cuda.current_device(), fixed, *tensors, *map(_trait, tensors.values()))
    known = _KNOWN.get(key)
    if known is None:
        _launch_first(key, kernel, grid, tensors, fixed)
        return
    compiled, arguments, places = known
    arguments = arguments.copy()
    for place, x in zip(places, tensors.values(), strict=True):
        arguments[place] = x
    compiled[(*grid, 1, 1)[:3]](*arguments)


def _launch_first(
    key: tuple[Any, ...],
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Mapping[str, Tensor | TensorDescriptor | None],
    fixed: Fixed,
) -> None:
    """Launch by Triton, which checks every argument, and remember what the kernel became."""
    for x in tensors.values():
        if isinstance(x, TensorDescriptor):
            x.__post_init__()
    compiled, names = kernel[grid](**tensors, **fixed), kernel.arg_names
    if compiled is None:  # a hook of Triton's kept it from compiling
        return
    if len(_KNOWN) >= MAX_KNOWN:
        _KNOWN.clear()
    arguments = [fixed.get(name) for name in names]
    _KNOWN[key] = compiled, arguments, [names.index(name) for name in tensors]


def _trait(x: Tensor | TensorDescriptor | None) -> Any:
    """What the compiled kernel depends on."""
    if x is None:
        return None
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape
    return x.dtype, x.data_ptr() % ALIGNMENT == 0
