"""How many values share one scale.

| granularity | tensor                    | scale shape          |
| ----------- | ------------------------- | -------------------- |
| tensor      | any                       | []                   |
| head        | [..., heads, head_dim]    | [heads]              |
| token       | [..., width]              | [...]                |
| channel     | [..., out, in]            | [..., out]           |
| block RxC   | [..., rows, columns]      | [..., ⌈rows/R⌉, ⌈columns/C⌉] |

In a KV cache [tokens, heads, head_dim], `token` means per token and head. `token` and `channel`
have the same shape rule; the word says whether the rows are activations or a weight's outputs.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError

Shape = tuple[int, ...]


class Granularity(ABC):
    """How many values share one scale; the subclasses are the choices."""

    min_dims = 0

    @abstractmethod
    def scale_shape(self, shape: Shape) -> Shape:
        """The shape of the scale of a tensor of this shape."""

    @abstractmethod
    def reduce_max(self, magnitude: Tensor) -> Tensor:
        """The largest value of each group; zero for groups that are empty."""

    @abstractmethod
    def expand(self, scale: Tensor, shape: Shape) -> Tensor:
        """`scale` as a tensor that broadcasts against a tensor of this shape."""

    def check(self, shape: Shape) -> None:
        """Raise if a tensor of this shape cannot have this granularity."""
        if len(shape) < self.min_dims:
            raise ConfigError(
                f"granularity {self} needs a tensor of {self.min_dims} or more dimensions, "
                f"got shape {list(shape)}"
            )


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the whole tensor."""

    def scale_shape(self, shape: Shape) -> Shape:
        return ()

    def reduce_max(self, magnitude: Tensor) -> Tensor:
        return magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())

    def expand(self, scale: Tensor, shape: Shape) -> Tensor:
        return scale

    def __str__(self) -> str:
        return "tensor"


@dataclass(frozen=True)
class PerHead(Granularity):
    """One scale for each head of a tensor [..., heads, head_dim]."""

    min_dims = 2

    def scale_shape(self, shape: Shape) -> Shape:
        self.check(shape)
        return (shape[-2],)

    def reduce_max(self, magnitude: Tensor) -> Tensor:
        self.check(magnitude.shape)
        if magnitude.numel() == 0:
            return magnitude.new_zeros(magnitude.shape[-2])
        return magnitude.amax(dim=(*range(magnitude.dim() - 2), -1))

    def expand(self, scale: Tensor, shape: Shape) -> Tensor:
        return scale.unsqueeze(-1)

    def __str__(self) -> str:
        return "head"


@dataclass(frozen=True)
class _PerRow(Granularity):
    """One scale for each vector along the last dimension."""

    min_dims = 1

    def scale_shape(self, shape: Shape) -> Shape:
        self.check(shape)
        return tuple(shape[:-1])

    def reduce_max(self, magnitude: Tensor) -> Tensor:
        self.check(magnitude.shape)
        if magnitude.shape[-1] == 0:
            return magnitude.new_zeros(magnitude.shape[:-1])
        return magnitude.amax(dim=-1)

    def expand(self, scale: Tensor, shape: Shape) -> Tensor:
        return scale.unsqueeze(-1)


@dataclass(frozen=True)
class PerToken(_PerRow):
    """One scale for each token: a row of activations, or a token's head in a KV cache."""

    def __str__(self) -> str:
        return "token"


@dataclass(frozen=True)
class PerChannel(_PerRow):
    """One scale for each output channel of a weight [..., out, in]."""

    def __str__(self) -> str:
        return "channel"


@dataclass(frozen=True)
class PerBlock(Granularity):
    """One scale for each block of `rows` × `columns` of the last two dimensions.

    Blocks at the edges may be partial.
    """

    rows: int
    columns: int
    min_dims = 2

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ConfigError(f"expected a block of at least 1x1, got {self.rows}x{self.columns}")

    def scale_shape(self, shape: Shape) -> Shape:
        self.check(shape)
        *outer, rows, columns = shape
        return (*outer, -(-rows // self.rows), -(-columns // self.columns))

    def reduce_max(self, magnitude: Tensor) -> Tensor:
        num_rows, num_columns = self.scale_shape(magnitude.shape)[-2:]
        pad_rows = num_rows * self.rows - magnitude.shape[-2]
        pad_columns = num_columns * self.columns - magnitude.shape[-1]
        padded = torch.nn.functional.pad(magnitude, (0, pad_columns, 0, pad_rows))
        if padded.numel() == 0:
            return magnitude.new_zeros(self.scale_shape(magnitude.shape))
        outer = magnitude.shape[:-2]
        blocks = padded.reshape(*outer, num_rows, self.rows, num_columns, self.columns)
        return blocks.amax(dim=(-3, -1))

    def expand(self, scale: Tensor, shape: Shape) -> Tensor:
        rows = torch.arange(shape[-2], device=scale.device) // self.rows
        columns = torch.arange(shape[-1], device=scale.device) // self.columns
        return scale[..., rows[:, None], columns]

    def __str__(self) -> str:
        return f"block {self.rows}x{self.columns}"


_PLAIN: dict[str, Granularity] = {
    str(choice): choice for choice in (PerTensor(), PerHead(), PerToken(), PerChannel())
}


def parse_granularity(text: str) -> Granularity:
    """The granularity whose str() is `text`, such as "tensor", "head" or "block 128x128"."""
    if text in _PLAIN:
        return _PLAIN[text]
    if block := re.fullmatch(r"block (\d{1,9})x(\d{1,9})", text):
        return PerBlock(int(block[1]), int(block[2]))
    expected = ", ".join([*_PLAIN, "block ROWSxCOLUMNS"])
    raise ConfigError(f"expected a granularity, one of {expected}; got {text!r}")
