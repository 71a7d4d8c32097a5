"""A model of the tensor core's adder: why FP8 products need two-level accumulation.

Hopper's FP8 matrix instruction does not add in float32. It takes 32 products and the running sum,
shifts all of them to the largest exponent among them, cuts each off 13 bits below that exponent
(towards zero), adds, and cuts the result to 13 fraction bits again. A running sum 2^14 times larger
than the products no longer moves: long sums stand still. Adding each tile's sum to a float32
register (two-level accumulation) repairs that.

The model agrees bit for bit with an H200, for `torch._scaled_mm` with fast accumulation and for
`wgmma` alike: tests/numerics/data/accumulator_h200.npz has the instruction's own results.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.numerics.formats import format_of

# Below every exponent of a product or a sum, and above what float64 can scale by.
_NO_EXPONENT = -500


@dataclass(frozen=True)
class Accumulator:
    """A tensor core's adder: `group` products at a time, `fraction_bits` bits of the largest."""

    group: int
    fraction_bits: int

    def matmul(self, a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
        """total + a @ bᵀ as the tensor core adds it up, float32.

        a: [..., rows, K] FP8; b: [..., columns, K] FP8; total: [..., rows, columns] float32.
        """
        if a.shape[-1] != b.shape[-1]:
            raise ConfigError(f"expected a and b with one K, got {a.shape[-1]} and {b.shape[-1]}")
        if total is None:
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            total = torch.zeros(*batch, a.shape[-2], b.shape[-2], device=a.device)
        running = total.to(torch.float64)
        for start in range(0, a.shape[-1], self.group):
            step = slice(start, start + self.group)
            running = self._add_group(running, a[..., step], b[..., step])
        return running.to(torch.float32)

    def _add_group(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        products = a.to(torch.float64).unsqueeze(-2) * b.to(torch.float64).unsqueeze(-3)
        # The hardware adds the operands' exponents before it knows the product's own.
        exponents = _operand_exponent(a).unsqueeze(-2) + _operand_exponent(b).unsqueeze(-3)
        exponents = exponents.masked_fill(products == 0, _NO_EXPONENT)
        largest = torch.maximum(exponents.amax(dim=-1), _exponent(total))
        unit = _power_of_two(largest - self.fraction_bits)
        kept = _cut(products, unit.unsqueeze(-1)).sum(dim=-1) + _cut(total, unit)
        return _cut(kept, _power_of_two(_exponent(kept) - self.fraction_bits))


HOPPER_FP8 = Accumulator(group=32, fraction_bits=13)


def _exponent(x: Tensor) -> Tensor:
    """⌊log2 |x|⌋, or `_NO_EXPONENT` for zero."""
    exponent = torch.frexp(x.to(torch.float64)).exponent - 1
    return exponent.masked_fill(x == 0, _NO_EXPONENT)


def _operand_exponent(x: Tensor) -> Tensor:
    """The exponent field of an FP8 operand: that of the smallest normal for subnormals."""
    smallest = torch.tensor(format_of(x.dtype).smallest_normal, dtype=torch.float64)
    return _exponent(x.to(torch.float64)).clamp(min=int(_exponent(smallest)))


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)


def _cut(x: Tensor, unit: Tensor) -> Tensor:
    """x as a multiple of `unit`, cut off towards zero."""
    return torch.trunc(x / unit) * unit
