"""From the largest absolute value to a scale: x ≈ data * scale."""

import math

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.numerics.formats import E4M3, Fp8Format
from octavo.numerics.granularity import Granularity

# The smallest and the largest scale: normal float32s, powers of two, and so are their reciprocals,
# as kernels multiply by those.
MIN_SCALE = torch.finfo(torch.float32).tiny
MAX_SCALE = 1 / MIN_SCALE


def finite_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """The largest absolute *finite* value of each group, float32; zero where there is none.

    NaN and ±Inf are left out, so that one bad value does not choose the scale of its neighbours.
    """
    magnitude = x.detach().abs().to(torch.float32)
    return granularity.reduce_max(torch.where(magnitude < torch.inf, magnitude, 0.0))


def without_padding(x: Tensor, num_tokens: Tensor) -> Tensor:
    """Packed x [tokens, …] with zeros behind the first num_tokens [1]; nothing waits for them."""
    is_token = torch.arange(len(x), device=x.device) < num_tokens
    return torch.where(is_token.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


def count_nonfinite(x: Tensor) -> Tensor:
    """How many values are NaN or ±Inf, as an int64 scalar on x's device."""
    return x.numel() - torch.isfinite(x).sum()


def amax_to_scale(
    amax: Tensor, fmt: Fp8Format = E4M3, *, margin: float = 1.0, power_of_two: bool = False
) -> Tensor:
    """scale = margin * amax / fmt.max, float32.

    margin: headroom for values larger than those seen. power_of_two: rounded up, so that dividing
    by the scale is exact. amax = 0 gives 1.0: any scale is exact for zeros, 1.0 is the neutral one.
    All others are kept within MIN_SCALE … MAX_SCALE.
    """
    check_margin(margin)
    scale = (amax.to(torch.float32) * (margin / fmt.max)).clamp(MIN_SCALE, MAX_SCALE)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(amax == 0, 1.0, scale)


def check_margin(margin: float) -> None:
    """Raise unless `margin` is a positive finite number."""
    if not (math.isfinite(margin) and margin > 0):
        raise ConfigError(f"margin must be a positive finite number, got {margin}")
