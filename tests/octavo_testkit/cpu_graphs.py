"""Graphs on a CPU: the operations of a step on the very tensors that they had, to be done again.

As with a CUDA graph, no Python runs in a replay: numbers that the host knew at the capture, tensors
that were replaced since and branches that were taken stay as they were.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.integrations.transformers.cache_rooms import KEPT_FRACTION


class Tape(TorchDispatchMode):
    """Records each operation with its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # An alias of an argument has been written to already.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(step, device, pool):
    """What `decode_graphs.record` does, on a CPU."""
    tape = Tape()
    with tape:
        result = step()
    return tape.replay, result, pool


def use_cpu_graphs(monkeypatch, module, kept_bytes=2**40):
    """Let a module's graphs be captured on a CPU.

    kept_bytes: what rooms without a cache may keep.
    """
    total = kept_bytes * KEPT_FRACTION
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(module, "try_step", lambda step, device: step())
    monkeypatch.setattr(module, "memory_of", lambda device: (2**50, total))
