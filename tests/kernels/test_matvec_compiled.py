"""The matvec kernel compiled for GPUs that are not here: instructions and registers."""

import pytest

pytest.importorskip("triton")
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

KERNEL = "octavo.kernels.matvec.triton:_matvec_kernel"
POINTERS = ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr")
SIZES = {"num_columns": "i32", "depth": "i32", "row_stride": "i32"}
# Rows of 4096 values, the default tile.
EVEN = {"ALIGN": 8, "IS_EVEN": True, "BLOCK_N": 4, "BLOCK_K": 2048}
# gpt-oss: rows of 2880 values, three tiles of 1024.
UNEVEN = EVEN | {"IS_EVEN": False, "BLOCK_K": 1024}
WEIGHT_LOAD = "ld.global.L1::evict_first.L2::cache_hint"


def compile_matvec(capability, shape=EVEN, dtype="bf16", has_bias=True, **changes):
    constants = shape | {"HAS_BIAS": has_bias, "IS_DEPENDENT": capability >= 90} | changes
    signature = {name: f"*{dtype}" for name in POINTERS} | SIZES
    if not has_bias:
        del signature["bias_ptr"]
        constants["bias_ptr"] = None
    # Sizes are not known to be multiples of anything but ALIGN, and pointers to be of 16 bytes.
    return compile_for(
        capability, KERNEL, signature, constants, aligned=POINTERS, num_warps=4, num_stages=1
    )


@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_loads_of_16_bytes(capability, shape):
    """All of a tile is on its way at once, and 4 programs fit on an SM."""
    compiled = compile_matvec(capability, shape)
    num_loads = shape["BLOCK_N"] * shape["BLOCK_K"] // (128 * 8)
    assert compiled.ptx.count(f"{WEIGHT_LOAD}.v4.b32") == num_loads
    assert compiled.ptx.count(WEIGHT_LOAD) == num_loads
    assert compiled.ptx.count("ld.global.v4.b32") == shape["BLOCK_K"] // (128 * 8)  # of x
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= 128
    assert compiled.shared_bytes <= 256  # for the sums of warps: tiles stay in registers


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_the_one_in_front_is_waited_for(capability):
    """From sm_90 on; the next one is let in before anything is waited for."""
    ptx = compile_matvec(capability).ptx
    if capability < 90:
        assert "griddepcontrol" not in ptx
        return
    places = [
        ptx.index(text)
        for text in ("griddepcontrol.launch_dependents", "griddepcontrol.wait", "ld.global")
    ]
    assert places == sorted(places)
    assert "griddepcontrol" not in compile_matvec(capability, IS_DEPENDENT=False).ptx


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_dtypes(dtype):
    for has_bias in (False, True):
        compiled = compile_matvec(90, dtype=dtype, has_bias=has_bias)
        value_bytes = 4 if dtype == "fp32" else 2
        num_loads = 4 * 2048 * value_bytes // (128 * 16)
        assert compiled.ptx.count(f"{WEIGHT_LOAD}.v4.b32") == num_loads
        assert "fma.rn" in compiled.ptx and "tf32" not in compiled.ptx
        assert compiled.stack_bytes == 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("align", [1, 2, 4])
def test_rows_that_are_not_aligned(capability, align):
    """Narrower loads, and still nothing is spilled."""
    compiled = compile_matvec(capability, UNEVEN, ALIGN=align)
    width = {1: ".b16", 2: ".b32", 4: ".v2.b32"}[align]
    assert f"{WEIGHT_LOAD}{width}" in compiled.ptx
    assert f"{WEIGHT_LOAD}.v4" not in compiled.ptx
    assert compiled.stack_bytes == 0


def test_sizes_beyond_32_bits():
    """A weight of more than 2^31 rows or a stride as large is an argument of 64 bits."""
    constants = EVEN | {"HAS_BIAS": True, "IS_DEPENDENT": True}
    signature = {name: "*bf16" for name in POINTERS} | {name: "i64" for name in SIZES}
    compiled = compile_for(
        90, KERNEL, signature, constants, aligned=POINTERS, num_warps=4, num_stages=1
    )
    assert f"{WEIGHT_LOAD}.v4.b32" in compiled.ptx
    assert compiled.stack_bytes == 0
