"""Capturing a CUDA graph of work that has run before, without harm to what cannot be captured."""

import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch

from octavo.internals import internals
from octavo.layers.saturation import is_capturing

with internals("torch"):
    from torch._C import _len_torch_dispatch_stack

DEVICES = ("cuda",)


class NotCapturedError(Exception):
    """Why a step is not captured; may_pass: another one may be."""

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


def allows_replay(devices: Collection[str]) -> bool:
    """Whether nobody records, differentiates or casts what runs now on these kinds of devices."""
    if torch.is_grad_enabled() or is_capturing() or _len_torch_dispatch_stack():
        return False
    return not any(torch.is_autocast_enabled(device) for device in devices)


def try_step(step: Callable[[], Any], device: torch.device) -> None:
    """Take a step without a graph: NotCapturedError if it waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told, torch.cuda.device(device):
        warnings.simplefilter("always")
        # An error would reach other threads, too.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if any("synchronizing CUDA" in str(one.message) for one in told):
        raise NotCapturedError("a step waits for the device, which no graph can")


def record(
    step: Callable[[], Any], device: torch.device, pool: Any
) -> tuple[Callable[[], Any], Any, Any]:
    """Capture a step: what replays it, its result, and the pool of its memory."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        # Other threads may go on calling CUDA meanwhile.
        options: dict[str, Any] = {"pool": pool, "capture_error_mode": "thread_local"}
        with torch.cuda.device(device), torch.cuda.graph(graph, **options):
            result = step()
    except RuntimeError as error:
        _clean_up(stream)
        raise NotCapturedError(f"a capture failed: {str(error).partition(chr(10))[0]}") from error
    return graph.replay, result, graph.pool()


def _clean_up(stream: torch.cuda.Stream) -> None:
    """After a capture that failed: torch leaves its own stream current, and its generator in it."""
    torch.cuda.set_stream(stream)
    # Until another capture has ended, random numbers are refused. Where this one fails, too, greedy
    # search goes on, and sampling says so.
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=stream.device)
    torch.cuda.set_stream(stream)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on a device, and all that it has."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused, total
