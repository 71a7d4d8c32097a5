"""What a device can do: the only place that asks."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """A device as kernels and selection see it; `capability` is None for a CPU."""

    type: str
    name: str
    capability: tuple[int, int] | None = None
    num_sms: int = 0
    memory_bytes: int = 0

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it; for a GPU, the current one."""
        return torch.device(self.type)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one program may have; of a CPU's interpreter, as on Hopper."""
        match self.capability:
            case (8, 0) | (8, 7):
                return 163 * 1024
            case (8 | 12, _):
                return 99 * 1024
        return 227 * 1024

    @property
    def has_dependents(self) -> bool:
        """Whether a kernel can start while the one before it ends, and wait for its results."""
        return self.capability is not None and self.capability >= (9, 0)

    @property
    def gpu(self) -> str | None:
        """The GPU's name, as records carry it."""
        return self.name if self.type == "cuda" else None


CPU = Device(type="cpu", name="CPU")


@cache
def _describe_cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        type="cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
    )


def describe(device: torch.device | str) -> Device:
    """What octavo knows about a torch device."""
    device = torch.device(device)
    if device.type == "cpu":
        return CPU
    if device.type == "cuda":
        is_current = device.index is None  # plain "cuda" has no index
        return _describe_cuda(torch.cuda.current_device() if is_current else device.index)
    return Device(type=device.type, name=device.type)


def default_device() -> Device:
    """The current CUDA device, or the CPU where torch can use none."""
    return describe("cuda" if torch.cuda.is_available() else "cpu")
