"""Launches of Triton's kernels, all through one function that can be listened to.

Triton looks at every argument of every launch to find what a kernel was compiled to. `octavo.ops`
listens to the launches of a call that repeats, and launches the compiled kernels itself from then
on (octavo.ops.playback).
"""

from collections.abc import Callable
from typing import Any

from octavo.internals import internals, require
from octavo.kernels.listening import Launch, listener

with internals("triton"):
    from triton import knobs
    from triton.runtime import driver

require("triton.compiler.CompiledKernel", "triton.runtime.jit.JITFunction")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), by Triton."""
    compiled = kernel[grid](*args, **options)
    if (tell := listener()) is None:
        return
    if compiled is None:  # by the interpreter, or a hook of Triton's kept it from compiling
        tell(None)
        return
    others = (options[name] for name in kernel.arg_names[len(args) :])
    tell(Launch(compiled, (*grid, 1, 1)[:3], (*args, *others)))


def stream_getter() -> Callable[[int], int]:
    """Triton's function from a GPU's index to its current stream."""
    getter: Callable[[int], int] = driver.active.get_current_stream
    return getter


def has_hooks() -> bool:
    """Whether somebody, such as a profiler, wants Triton to tell of each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # Either a chain of hooks, which may be empty, or a single one.
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))
