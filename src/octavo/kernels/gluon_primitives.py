"""Functions of Gluon under one name, whichever version of Triton is installed."""

from octavo.internals import internals, require

with internals("triton"):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma

require(
    "triton.experimental.gluon.language", "triton.experimental.gluon.language.nvidia.hopper.tma"
)

# Waits for all threads of the program; `thread_barrier` is its name in Triton 3.6.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Copies a tile by TMA; `async_copy_global_to_shared` is its name in Triton 3.6 and 3.7.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
