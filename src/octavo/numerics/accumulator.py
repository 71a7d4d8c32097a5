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

# Groups whose products are spelled out at once: memory against Python steps.
_GROUPS_AT_ONCE = 8
# Layout of float64, in which every product and sum of the model is exact.
_FRACTION_BITS, _EXPONENT_MASK, _EXPONENT_BIAS = 52, 0x7FF, 1023


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
        span = self.group * _GROUPS_AT_ONCE
        for start in range(0, a.shape[-1], span):
            columns = slice(start, start + span)
            products, exponents = _outer(a[..., columns], b[..., columns])
            for group, exponent in zip(
                products.split(self.group, dim=-1),
                exponents.split(self.group, dim=-1),
                strict=True,
            ):
                running = self._add(running, group, exponent.amax(dim=-1))
        return running.to(torch.float32)

    def _add(self, total: Tensor, products: Tensor, exponent: Tensor) -> Tensor:
        """The new total: one group of products [..., group] and the total cut, added and cut."""
        unit = self._last_bit(torch.maximum(exponent, _exponent(total)))
        kept = _cut(products, unit.unsqueeze(-1)).sum(dim=-1) + _cut(total, unit)
        return _cut(kept, self._last_bit(_exponent(kept)))

    def _last_bit(self, exponent: Tensor) -> Tensor:
        """The value of the last bit that is kept of a number with this exponent."""
        biased = (exponent - self.fraction_bits + _EXPONENT_BIAS).clamp(min=1)
        return (biased << _FRACTION_BITS).view(torch.float64)


HOPPER_FP8 = Accumulator(group=32, fraction_bits=13)


def _outer(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """All products a[i, k] · b[j, k] and their exponents, [..., rows, columns, K].

    The hardware adds the operands' exponents; it does not wait for the product's own.
    """
    products = a.to(torch.float64).unsqueeze(-2) * b.to(torch.float64).unsqueeze(-3)
    exponents = _operand_exponent(a).unsqueeze(-2) + _operand_exponent(b).unsqueeze(-3)
    return products, exponents


def _operand_exponent(x: Tensor) -> Tensor:
    """The exponent of an FP8 operand: subnormals have the smallest normal's, zeros none."""
    exact = x.to(torch.float64)
    smallest = exact.new_tensor(format_of(x.dtype).smallest_normal)
    return torch.where(exact == 0, -_EXPONENT_BIAS, _exponent(torch.maximum(exact.abs(), smallest)))


def _exponent(x: Tensor) -> Tensor:
    """⌊log2 |x|⌋ of a float64, int64; −1023 for zero."""
    return (x.view(torch.int64) >> _FRACTION_BITS & _EXPONENT_MASK) - _EXPONENT_BIAS


def _cut(x: Tensor, unit: Tensor) -> Tensor:
    """x as a multiple of `unit`, cut off towards zero."""
    return torch.trunc(x / unit) * unit
