"""Online softmax: the weighted sum of values, one tile of keys at a time."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.numerics.accumulator import HOPPER_FP8, Accumulator
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import format_of, is_fp8
from octavo.numerics.quantize import saturating_cast

# P ≤ 1 is multiplied by this before it is rounded to FP8, to use more of e4m3's range.
FP8_WEIGHT_RANGE = 2.0**8
# The code of 2^8 is 120; 7/16 less centers the error of a mantissa that grows linearly.
TOP_CODE = 120 - 7 / 16
# With codes a tile's reference lies at most so many powers of two below the largest logit so far.
CODE_SPAN = 64 * math.log(2)
# Where some keys lie further below the reference, in groups of key mod 8, the row is rounded.
CODE_FAR = 9 * math.log(2)


@dataclass(frozen=True)
class Rounding:
    """Where a kernel rounds inside attention.

    weights: the dtype of P as an operand of P·V; None leaves it in the compute dtype.
    accumulator: what adds up the FP8 products; None adds in the compute dtype.
    has_rounded_sums: the denominator is the sum of P as it was rounded, where the tensor core adds
    that up beside P·V.
    has_codes: P becomes e4m3 by `codes`, relative to the largest logit of its own tile; rows with
    keys far below it are rounded, since small numbers of e4m3 are no logarithms.
    """

    weights: torch.dtype | None = None
    accumulator: Accumulator | None = None
    has_rounded_sums: bool = False
    has_codes: bool = False


EXACT = Rounding()


def kernel_rounding(q_dtype: torch.dtype, spec: AttentionSpec) -> Rounding:
    """How the kernels round for queries of this dtype: FP8 queries make P FP8 as well.

    Promotion after every tile is modelled by exact sums: what the accumulator cuts off inside one
    tile (128 products at 13 bits) is far below the rounding of P to 3 bits.
    """
    if is_fp8(q_dtype):
        accumulator = None if spec.promote_every == 1 else HOPPER_FP8
        has_codes = spec.exponentials == "codes"
        return Rounding(torch.float8_e4m3fn, accumulator, has_codes, has_codes)
    return Rounding(q_dtype if q_dtype in (torch.bfloat16, torch.float16) else None)


def codes(p: Tensor) -> Tensor:
    """p ≤ 1 as e4m3 numbers up to 2^8, by the logarithm of p instead of by rounding.

    The byte of an e4m3 number grows by 8 with each power of two, and linearly in between: it is
    8 · log2(p) + 120 but for a small error, and whoever has the logarithm needs no p.
    """
    # As kernels do: float16 numbers of the size of 1024 are integers.
    code = (8 * torch.log2(p) + TOP_CODE).clamp(min=0).half() + 1024 - 1024
    byte = torch.where(code.isnan(), 0x7F, code).to(torch.uint8)
    return byte.view(torch.float8_e4m3fn)


def _has_far_keys(logits: Tensor, reference: Tensor) -> Tensor:
    """Whether all keys of one remainder mod 8 lie far below a row's reference: [heads, rows, 1]."""
    num_missing = -logits.shape[-1] % 8
    padded: Tensor = torch.nn.functional.pad(logits, (0, num_missing), value=-torch.inf)
    groups = padded.reshape(*padded.shape[:-1], -1, 8).amax(-2)
    return groups.amin(-1, keepdim=True) < reference.unsqueeze(-1) - CODE_FAR


class OnlineSoftmax:
    """Reference, denominator and weighted values of some rows of every head."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        spec: AttentionSpec,
        rounding: Rounding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """shape: of the result, (heads, rows, head_dim); dtype: of all sums."""
        self.promote_every = spec.promote_every
        self.rounding = rounding
        is_scaled = rounding.weights is not None and is_fp8(rounding.weights)
        self.weight_range = FP8_WEIGHT_RANGE if is_scaled else 1.0
        self.num_tiles = 0
        # The logit that P is relative to, and the largest one so far: the same without codes.
        self.reference = torch.full(shape[:-1], -torch.inf, dtype=dtype, device=device)
        self.largest = self.reference
        self.is_far = torch.zeros((*shape[:-1], 1), dtype=torch.bool, device=device)
        self.row_sum = torch.zeros(shape[:-1], dtype=dtype, device=device)
        # Two levels: `partial` is what the tensor core holds, `total` the float32 register.
        self.partial = torch.zeros(shape, dtype=dtype, device=device)
        self.total = torch.zeros(shape, dtype=dtype, device=device)

    def add_tile(self, logits: Tensor, v: Tensor, v_weight: Tensor | None = None) -> None:
        """Take in one tile of keys.

        logits: [heads, rows, keys], −inf where masked; v: [heads, keys, head_dim];
        v_weight: [heads, 1, keys], factors of single keys that act before P is rounded.
        """
        reference = self._refer(logits.amax(dim=-1))
        finite = torch.where(reference == -torch.inf, 0.0, reference)
        shrink = torch.exp(self.reference - finite)
        p = torch.exp(logits - finite.unsqueeze(-1))
        self.reference = reference
        if self.rounding.has_codes:
            self.is_far = _has_far_keys(logits, finite)
        added = p
        if self.rounding.has_rounded_sums:
            added = self._round(p).to(p.dtype) / self.weight_range
        self.row_sum = self.row_sum * shrink + added.sum(dim=-1)
        self.total = self.total * shrink.unsqueeze(-1)
        self.partial = self.partial * shrink.unsqueeze(-1)
        self._add_values(p if v_weight is None else p * v_weight, v)

    def finish(self, sink: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse), with `sink` [heads, rows] as one more logit; zeros where nothing was seen."""
        top = torch.maximum(self.reference, sink)
        top = torch.where(top == -torch.inf, 0.0, top)
        shrink = torch.exp(self.reference - top)
        denominator = self.row_sum * shrink + torch.exp(sink - top)
        share = (shrink / denominator / self.weight_range).unsqueeze(-1)
        out = (self.total + self.partial) * share
        out = out.masked_fill((denominator == 0).unsqueeze(-1), 0.0)
        return out, torch.log(denominator) + top

    def _refer(self, found: Tensor) -> Tensor:
        """What P of a tile is relative to; found: the tile's largest logit in each row."""
        self.largest = torch.maximum(self.largest, found)
        if not self.rounding.has_codes:
            return self.largest
        reference = torch.maximum(found, self.largest - CODE_SPAN)
        return torch.where(found == -torch.inf, self.reference, reference)

    def _add_values(self, p: Tensor, v: Tensor) -> None:
        weights = self._round(p)
        if self.rounding.accumulator is None:
            self.partial = self.partial + weights.to(p.dtype) @ v.to(p.dtype)
        else:
            columns = v.transpose(-1, -2)
            self.partial = self.rounding.accumulator.matmul(weights, columns, self.partial)
        self.num_tiles += 1
        if self.promote_every is not None and self.num_tiles % self.promote_every == 0:
            self.total = self.total + self.partial
            self.partial = torch.zeros_like(self.partial)

    def _round(self, p: Tensor) -> Tensor:
        dtype = self.rounding.weights
        if dtype is None:
            return p
        if self.rounding.has_codes:
            rounded = saturating_cast(p * self.weight_range, format_of(dtype))
            return torch.where(
                self.is_far, rounded.view(torch.uint8), codes(p).view(torch.uint8)
            ).view(dtype)
        if is_fp8(dtype):
            return saturating_cast(p * self.weight_range, format_of(dtype))
        return p.to(dtype)
