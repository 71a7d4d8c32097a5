"""Pieces of device code that two or more kernels use."""

import triton
import triton.language as tl

MIN_SCALE = tl.constexpr(2.0**-126)
MAX_SCALE = tl.constexpr(2.0**126)


@triton.jit
def finite_magnitude(x):
    """|x| in float32, and 0 for NaN and ±Inf."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def amax_to_scale(amax, margin_over_max, POWER_OF_TWO: tl.constexpr):
    """margin · amax / largest value of the format; 1.0 where amax is 0."""
    scale = tl.clamp(amax * margin_over_max, MIN_SCALE, MAX_SCALE)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (tl.minimum(exponent, 254) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def to_fp8(x, scale, dtype: tl.constexpr):
    """x / scale in FP8: sm_90 and newer convert with saturation and keep NaN."""
    return tl.div_rn(x.to(tl.float32), scale).to(dtype)
