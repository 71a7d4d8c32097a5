"""What the programs for the GPU share: compiling without a launch, and a limit for a launch."""

import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / ".carry")]
HANG = 3  # exit status


def compilers(num_processes):
    """Processes that compile: none ever launches, so that none can hang."""
    return ProcessPoolExecutor(num_processes, get_context("spawn"), _only_compile)


def _only_compile():
    """Let launches of this process compile, into Triton's cache on the disk."""
    import importlib

    for name in ("octavo.kernels.attention.gluon_sm90", "old_attention.gluon_sm90"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        module.launch = lambda kernel, grid, **arguments: kernel.warmup(grid=grid, **arguments)


@contextmanager
def at_most(seconds, what):
    """End the process, and say why, unless the block is done in time: a hung kernel never is."""

    def end():
        print(f"HANG {what}: not done after {seconds} s", flush=True)
        os._exit(HANG)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
