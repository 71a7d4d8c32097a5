"""The formats against ml_dtypes, which has its own tables and rounding."""

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics.formats import E4M3, E5M2, FORMATS, format_named, format_of, is_fp8

THEIRS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
CODES = np.arange(256, dtype=np.uint8)

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)


@each_format
def test_all_codes_decode_as_in_ml_dtypes(fmt):
    ours = torch.from_numpy(CODES).view(fmt.dtype).to(torch.float64).numpy()
    theirs = CODES.view(THEIRS[fmt.name]).astype(np.float64)
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(theirs[numbers]))


@each_format
def test_the_numbers_that_bound_a_format(fmt):
    info = ml_dtypes.finfo(THEIRS[fmt.name])
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.mantissa_bits == info.nmant


@pytest.mark.parametrize(("fmt", "num_nan", "num_inf"), [(E4M3, 2, 0), (E5M2, 6, 2)], ids=str)
def test_codes_that_are_no_numbers(fmt, num_nan, num_inf):
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    assert (int(values.isnan().sum()), int(values.isinf().sum())) == (num_nan, num_inf)


@each_format
def test_a_format_is_found_by_its_name_and_by_its_dtype(fmt):
    assert format_named(str(fmt)) is fmt
    assert format_of(fmt.dtype) is fmt
    assert is_fp8(fmt.dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.uint8, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str
)
def test_other_dtypes_are_not_ours(dtype):
    assert not is_fp8(dtype)
    with pytest.raises(ConfigError, match=rf"float8_e4m3fn, .*float8_e5m2; got {dtype}"):
        format_of(dtype)


@pytest.mark.parametrize("name", ["fp8", "E4M3", ""])
def test_an_unknown_name_is_told_the_known_ones(name):
    with pytest.raises(ConfigError, match=f"one of e4m3, e5m2; got '{name}'"):
        format_named(name)
