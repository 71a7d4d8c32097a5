"""Hadamard matrices: orthonormal for every head_dim, fixed, and spreading."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics.hadamard import hadamard

HEAD_DIMS = {1: 1, 2: 2, 7: 1, 32: 32, 64: 64, 72: 8, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256}


@pytest.mark.parametrize("head_dim, size", HEAD_DIMS.items())
def test_it_is_orthonormal_in_blocks_of_one_size(head_dim, size):
    matrix = hadamard(head_dim)
    assert matrix.dtype == torch.float32 and matrix.shape == (head_dim, head_dim)
    product = matrix.double() @ matrix.double().T
    torch.testing.assert_close(product, torch.eye(head_dim).double(), rtol=0, atol=1e-6)
    used = matrix != 0
    assert (used.sum(0) == size).all() and (used.sum(1) == size).all()
    assert torch.equal(used, torch.block_diag(*[torch.ones(size, size)] * (head_dim // size)) > 0)
    torch.testing.assert_close(matrix[used].abs(), torch.full((int(used.sum()),), size**-0.5))


def test_it_is_always_the_same():
    # A cache must be read with the matrix that it was written with.
    assert torch.equal(hadamard(64), hadamard(64))
    signs = hadamard(16)[:, 0].sign().int().tolist()
    assert signs == [1, -1, 1, 1, 1, -1, -1, -1, 1, -1, 1, 1, -1, 1, 1, 1]


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 128])
def test_it_spreads_one_channel_and_all_of_them(head_dim):
    one = torch.eye(head_dim)[3] @ hadamard(head_dim)
    assert one.abs().max() == one.abs().min() < 0.4
    # Without flipped signs, a row of equal numbers would land in one channel.
    assert (torch.ones(head_dim) @ hadamard(head_dim)).abs().max() < 0.6 * head_dim**0.5


@pytest.mark.parametrize("head_dim", [0, -64])
def test_no_head_dim(head_dim):
    with pytest.raises(ConfigError, match="expected a head_dim from 1 on"):
        hadamard(head_dim)
