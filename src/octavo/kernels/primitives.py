"""Pieces of device code that two or more kernels use."""

import triton
import triton.language as tl

MIN_SCALE = tl.constexpr(2.0**-126)
MAX_SCALE = tl.constexpr(2.0**126)
# Above this every quotient saturates, in any FP8 format.
MAX_QUOTIENT = tl.constexpr(2.0**18)

_PACK = """
{{
    .reg .b16 low, high;
    cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
    cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
    mov.b32 $0, {{low, high}};
}}
"""
_PACK_E4M3 = tl.constexpr(_PACK.format("e4m3"))
_PACK_E5M2 = tl.constexpr(_PACK.format("e5m2"))


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
def cast_fp8(x, dtype: tl.constexpr, HAS_ASM: tl.constexpr):
    """float32 in `dtype`; in FP8 rounded once, saturating, NaN kept.

    The instruction is written out because Triton 3.6 takes another way on sm_89, through float16,
    which rounds twice. HAS_ASM: off in the interpreter.
    """
    if HAS_ASM and dtype == tl.float8e4nv:
        return _cast_four(x, _PACK_E4M3).to(dtype, bitcast=True)
    elif HAS_ASM and dtype == tl.float8e5:
        return _cast_four(x, _PACK_E5M2).to(dtype, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _cast_four(x, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def to_fp8(x, scale, dtype: tl.constexpr, HAS_ASM: tl.constexpr):
    """x / scale in FP8."""
    return cast_fp8(tl.div_rn(x.to(tl.float32), scale), dtype, HAS_ASM)


@triton.jit
def divisor(scale, HAS_FMA: tl.constexpr):
    """What `divide` needs of a scale: (a power of two to take from x first, scale, inverse, limit).

    Remainders of scales within 2^±80 are normal numbers; others lose their power of two. Scales
    that are no normal numbers have limit 0.
    """
    if HAS_FMA:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 0xFF
        is_normal = (exponent > 0) & (exponent < 254)
        is_far = is_normal & ((exponent < 47) | (exponent > 207))
        power = tl.where(is_far, ((254 - exponent) << 23).to(tl.float32, bitcast=True), 1.0)
        mantissa = (bits - ((exponent - 127) << 23)).to(tl.float32, bitcast=True)
        scale = tl.where(is_far, mantissa, scale)
        return power, scale, tl.div_rn(1.0, scale), tl.where(is_normal, MAX_QUOTIENT, 0.0)
    else:
        return scale, scale, scale, scale


@triton.jit
def divide(x, by, HAS_FMA: tl.constexpr):
    """x / scale for `divisor(scale)`, with the FP8 that a division rounded once would give.

    Divisions cost some 20 instructions each. Here the scale is inverted once; two steps with exact
    remainders then round each quotient as a division does (Markstein's theorem). Signs of zeros are
    kept; Inf, NaN and quotients that saturate take the product. HAS_FMA: off in the interpreter,
    which rounds a fused multiply-add twice.
    """
    power, scale, inverse, limit = by
    x = x.to(tl.float32)
    if HAS_FMA:
        if power.type.is_block():
            x = x * power
        else:
            if power != 1.0:
                x = x * power
        product = x * inverse
        # A product with −1, unlike a difference from 0, costs nothing: operands may be negated.
        negative_inverse, negative_x = inverse * -1.0, x * -1.0
        quotient = tl.fma(tl.fma(product, scale, negative_x), negative_inverse, product)
        quotient = tl.fma(tl.fma(quotient, scale, negative_x), negative_inverse, quotient)
        return tl.where(tl.abs(product) < limit, quotient, product)
    else:
        return tl.div_rn(x, scale)


@triton.jit
def pack_fp8(x0, x1, x2, x3, dtype: tl.constexpr, HAS_ASM: tl.constexpr):
    """Four tensors of float32 as FP8, one in each byte of an int32, x0 in the lowest."""
    if HAS_ASM:
        # Triton would cast neighbours together and take their bytes apart again.
        if dtype == tl.float8e4nv:
            code: tl.constexpr = _PACK_E4M3
        else:
            code: tl.constexpr = _PACK_E5M2
        return tl.inline_asm_elementwise(
            code, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = x0.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32)
        word |= x1.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        word |= x2.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        word |= x3.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
        return word.to(tl.int32, bitcast=True)


@triton.jit
def count_nonfinite(x):
    """1 where x is NaN or ±Inf, else 0."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1)


@triton.jit
def pair_places(pair, ROTARY_DIM: tl.constexpr, WIDTH: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Where the two values of each pair of a head lie.

    Pairs below ROTARY_DIM / 2 are the ones that rotary embedding turns; the others take the rest of
    the WIDTH values in two halves.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = (WIDTH - ROTARY_DIM + 1) // 2
    first = pair * 2 if IS_INTERLEAVED else pair
    second = pair * 2 + 1 if IS_INTERLEAVED else pair + HALF
    if ROTARY_DIM < WIDTH:
        first = tl.where(pair < HALF, first, pair + HALF)
        second = tl.where(pair < HALF, second, pair + (HALF + REST))
    return first, second


@triton.jit
def rotate_pair(first, second, cos, sin):
    """The pair (first, second) turned by an angle; launch without fusion, to round each product."""
    return first * cos - second * sin, second * cos + first * sin
