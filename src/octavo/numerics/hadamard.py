"""Hadamard matrices, which spread what lies in one channel of a head over many."""

import torch
from torch import Tensor

from octavo.errors import ConfigError

_PRIME = 1019  # of the sign flips; larger than any head_dim in use


def hadamard(head_dim: int) -> Tensor:
    """An orthonormal matrix of numbers of one size, float32 [head_dim, head_dim].

    A row x becomes x @ hadamard(head_dim); products of two such rows are those of the rows before.
    Where head_dim is no power of two, the matrix is block-diagonal, with blocks of the largest
    power of two that divides it: 32 for 96, 8 for 72. An odd head_dim is left to its sign flips.
    The signs of rows are flipped by the Legendre symbols of 1, 2, … modulo 1019, a fixed sequence
    that looks random: channels that are large together would else add up in one column.
    """
    if head_dim < 1:
        raise ConfigError(f"expected a head_dim from 1 on, got {head_dim}")
    size = head_dim & -head_dim
    block = torch.ones(1, 1)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    blocks = torch.block_diag(*[block] * (head_dim // size))
    # In one step from float64: the root of an odd power of two is not exact.
    root = torch.tensor(size, dtype=torch.float64).sqrt()
    matrix: Tensor = _signs(head_dim)[:, None].double() * blocks / root
    return matrix.float()


def _signs(count: int) -> Tensor:
    """±1 for each channel: whether its number is a square modulo the prime."""
    squares = {n * n % _PRIME for n in range(_PRIME)}
    return torch.tensor([1.0 if n % _PRIME in squares else -1.0 for n in range(1, count + 1)])
