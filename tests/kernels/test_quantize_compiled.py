"""The quantize kernels compiled for GPUs that are not here: instructions, registers, no spills."""

import pytest

pytest.importorskip("triton")
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

MODULE = "octavo.kernels.quantize.triton"
POINTERS = {"x_ptr": "*bf16", "data_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
SIZES = {"num_rows": "i32", "num_columns": "i32", "row_stride": "i64"}
BLOCK = {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 128}
CAPABILITIES = [89, 90, 100]


@pytest.mark.parametrize(
    ("is_one_tile", "is_static"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rows(capability, is_one_tile, is_static):
    compiled = compile_for(
        capability,
        f"{MODULE}:_quantize_rows_kernel",
        {**POINTERS, "given_ptr": "*fp32", **SIZES, "margin_over_max": "fp32"},
        {
            "MAX": 448.0,
            "IS_STATIC": is_static,
            "IS_SHARED": is_static,
            "POWER_OF_TWO": False,
            "NUM_CHUNKS": int(is_one_tile),
            "HAS_TAIL": False,
            "HAS_FMA": True,
            "IS_DEPENDENT": capability >= 90,
            "BLOCK_ROWS": 1,
            "BLOCK_COLUMNS": 4096,
        },
        num_warps=8,
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert ("griddepcontrol.wait" in compiled.ptx) == (capability >= 90)
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= 64  # room for 32 warps on an SM


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_blocks(capability):
    compiled = compile_for(
        capability,
        f"{MODULE}:_quantize_blocks_kernel",
        {
            **POINTERS,
            **SIZES,
            "matrix_stride": "i64",
            "group_columns": "i32",
            "margin_over_max": "fp32",
        },
        {"IS_STATIC": False, "POWER_OF_TWO": False, "GROUP_ROWS": 1, "HAS_ASM": True, **BLOCK},
        num_warps=4,
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= 128


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_heads(capability):
    compiled = compile_for(
        capability,
        f"{MODULE}:_cast_heads_kernel",
        {**POINTERS, **SIZES, "partial_ptr": "*fp32", "margin_over_max": "fp32"},
        {"NUM_PARTIALS": 1024, "POWER_OF_TWO": False, "HAS_ASM": True, **BLOCK},
        num_warps=4,
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_amax(capability):
    compiled = compile_for(
        capability,
        f"{MODULE}:_amax_kernel",
        {"x_ptr": "*bf16", "partial_ptr": "*fp32", **SIZES},
        BLOCK,
        num_warps=4,
    )
    assert compiled.stack_bytes == 0
