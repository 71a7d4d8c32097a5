"""A small tensor on its way to the host, without waiting for its device."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy on the host of what a tensor holds now; numbers of a GPU arrive later."""

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = x
        if x.is_cuda:
            self._copy = x.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether `tolist` has nothing to wait for."""
        return self._event is None or self._event.query()

    def tolist(self) -> Any:
        """The numbers, in lists."""
        return self._copy.tolist()


def is_capturing() -> bool:
    """Whether what runs now is recorded in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
