"""AmaxHistory: the largest values of the last passes, for dynamic scales."""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.numerics.buffers import Float32Buffers
from octavo.numerics.formats import E4M3, Fp8Format
from octavo.numerics.granularity import Granularity, PerTensor
from octavo.numerics.scales import amax_to_scale, count_nonfinite, finite_amax

HISTORY_LENGTH = 16


class AmaxRing(NamedTuple):
    """The tensors of a history: what an op or a kernel updates in place."""

    values: Tensor  # [length, *shape] float32
    num_passes: Tensor  # [] int64: values pushed so far; the next goes to num_passes % length
    num_nonfinite: Tensor  # [] int64: NaN and Inf values seen so far

    def push(self, amax: Tensor, num_nonfinite: Tensor | int = 0) -> None:
        """Record one pass: its amax, and how many NaN or Inf values its input had.

        An amax that is itself NaN or Inf counts as one more and is recorded as 0.
        """
        if amax.shape != self.values.shape[1:]:
            raise ConfigError(
                f"expected an amax of shape {list(self.values.shape[1:])}, got {list(amax.shape)}"
            )
        amax = amax.to(torch.float32).abs()  # a float64 beyond float32 is Inf here
        is_finite = torch.isfinite(amax)
        clean = torch.where(is_finite, amax, 0.0)
        slot = torch.remainder(self.num_passes, len(self.values)).unsqueeze(0)
        self.values.index_copy_(0, slot, clean.unsqueeze(0))
        self.num_passes.add_(1)
        self.num_nonfinite.add_(num_nonfinite + (~is_finite).sum())

    def observe(self, x: Tensor, granularity: Granularity = PerTensor()) -> None:
        """Record one pass over `x`: its finite amax and its count of NaN and Inf."""
        self.push(finite_amax(x, granularity), count_nonfinite(x))

    def amax(self) -> Tensor:
        """The largest value of the passes in the ring; zero before the first."""
        return self.values.amax(dim=0)


class AmaxHistory(Float32Buffers):
    """The last `length` amax values of one tensor, kept with their counters on the device.

    Nothing in `observe`, `push` or `amax` waits for the device or keeps state in Python, so all can
    be captured in a CUDA graph and go on counting when it is replayed. The current pass is part of
    the history: push first, then ask. The buffers are persistent and keep their dtypes under
    `.to(dtype)`.

    shape: of one amax value: () per tensor, (num_heads,) per head.
    """

    values: Tensor
    num_passes: Tensor
    num_nonfinite: Tensor

    def __init__(self, shape: tuple[int, ...] = (), length: int = HISTORY_LENGTH) -> None:
        super().__init__()
        if length < 1:
            raise ConfigError(f"history length must be at least 1, got {length}")
        self.register_buffer("values", torch.zeros(length, *shape, dtype=torch.float32))
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_nonfinite", torch.zeros((), dtype=torch.int64))

    @property
    def ring(self) -> AmaxRing:
        """The buffers, as ops take them."""
        return AmaxRing(self.values, self.num_passes, self.num_nonfinite)

    @torch.no_grad()
    def push(self, amax: Tensor, num_nonfinite: Tensor | int = 0) -> None:
        """Record one pass; see `AmaxRing.push`."""
        self.ring.push(amax, num_nonfinite)

    @torch.no_grad()
    def observe(self, x: Tensor, granularity: Granularity = PerTensor()) -> None:
        """Record one pass over `x`: its finite amax and its count of NaN and Inf."""
        self.ring.observe(x, granularity)

    def amax(self) -> Tensor:
        """The largest value of the last `length` passes; zero before the first."""
        return self.ring.amax()

    def scale(self, fmt: Fp8Format = E4M3, *, margin: float = 1.0) -> Tensor:
        """The dynamic scale: `amax_to_scale` of the history."""
        return amax_to_scale(self.amax(), fmt, margin=margin)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything seen so far."""
        for buffer in self.ring:
            buffer.zero_()
