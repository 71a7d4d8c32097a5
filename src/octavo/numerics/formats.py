"""The 8-bit floating-point formats: E4M3 (values) and E5M2 (range)."""

from dataclasses import dataclass

import torch

from octavo.errors import ConfigError


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit format: how torch stores it, and the numbers that bound it."""

    name: str
    dtype: torch.dtype
    max: float
    smallest_normal: float
    smallest_subnormal: float
    mantissa_bits: int

    def __str__(self) -> str:
        return self.name


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 3)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 2)

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}
_DTYPES = (E4M3.dtype, E5M2.dtype)


def format_named(name: str) -> Fp8Format:
    """The format called `name`: "e4m3" or "e5m2"."""
    if name not in FORMATS:
        raise ConfigError(f"expected an FP8 format, one of {', '.join(FORMATS)}; got {name!r}")
    return FORMATS[name]


def format_of(dtype: torch.dtype) -> Fp8Format:
    """The format that torch stores as `dtype`."""
    for fmt in FORMATS.values():
        if fmt.dtype == dtype:
            return fmt
    expected = ", ".join(str(fmt.dtype) for fmt in FORMATS.values())
    raise ConfigError(f"expected an FP8 dtype, one of {expected}; got {dtype}")


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether `dtype` is one of octavo's FP8 formats."""
    return dtype in _DTYPES
