"""The quantize_qkv kernels compiled for GPUs that are not here: instructions and registers."""

import pytest

from octavo.kernels.quantize_qkv.config import AMAX_REGISTERS

pytest.importorskip("triton")
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

MODULE = "octavo.kernels.quantize_qkv.triton"
PARTS = {f"{part}_ptr": "*bf16" for part in "qkv"}
STRIDES = {f"{part}_{name}_stride": "i32" for part in "qkv" for name in ("batch", "token", "head")}
TABLES = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "num_rows": "i32", "cos_row": "i32"}
SIZES = {"sin_row": "i32", "q_length": "i32", "k_length": "i32"}
SIZES |= {name: "i32" for name in ("num_q_tokens", "num_k_tokens")}
RINGS = {f"{part}_ring_length": "i32" for part in "qkv"}
SCRATCH = {"partial_ptr": "*fp32", "count_ptr": "*i32", "slot_ptr": "*i32"}
NORMS = {"q_norm_ptr": "*bf16", "k_norm_ptr": "*bf16", "eps": "fp32", "num_first": "i32"}
COMMON = PARTS | STRIDES | NORMS | TABLES | SIZES | RINGS | SCRATCH
CAST = COMMON | {
    "q_data_ptr": "*fp8e4nv",
    "k_data_ptr": "*fp8e4nv",
    "v_data_ptr": "*i32",
    "cu_seqlens_ptr": "*i32",
    "factor": "fp32",
    **{f"{part}_scale_ptr": "*fp32" for part in "qkv"},
    **{f"{part}_scale_stride": "i32" for part in "qkv"},
    **{f"{part}_ring_ptr": "*fp32" for part in "qkv"},
    **{f"{part}_nonfinite_ptr": "*i64" for part in "qkv"},
    **{name: "i32" for name in ("num_q_programs", "num_k_programs", "num_sequences")},
    "num_groups": "i32",
}
# Qwen3-VL's vision tower: 16 heads of 72, tables of 36 columns side by side.
SHAPE = {
    "NUM_HEADS": 16,
    "NUM_KV_HEADS": 16,
    "ROTARY": 1,
    "ROTARY_DIM": 72,
    "HEAD_DIM": 72,
    "PADDED": 80,
    "ALIGN": 8,
    "TABLE_ALIGN": 4,
    "HAS_BATCH": False,
    "HAS_REPEATS": False,
    "NUM_NORMS": 0,
    "NORM_TOKENS": 8,
    "NORM_HEADS": 12,
    "PER_HEAD": False,
    "BLOCK_TOKENS": 32,
    "BLOCK_WIDTH": 128,
    "cos_column": 1,
    "sin_column": 1,
}


FIRST = {f"{part}_first_ptr": "*bf16" for part in "qkv"}
FIRST |= {f"{part}_first_{x}_stride": "i32" for part in "qkv" for x in ("batch", "token", "head")}
# FLUX.1: 24 heads of 128; every second column of tables that have each angle twice.
FLUX = {"NUM_HEADS": 24, "NUM_KV_HEADS": 24, "ROTARY": 2, "ROTARY_DIM": 128, "HEAD_DIM": 128}
FLUX |= {"PADDED": 128, "NUM_NORMS": 2, "IS_PACKED": False, "cos_column": 2, "sin_column": 2}


def compile_cast(capability, *, signature=CAST, **changes):
    constants = {
        "IS_TRANSPOSED": True,
        "IS_PACKED": True,
        "BLOCK_KEYS": 64,
        "BLOCK_VALUES": 64,
        "IS_DYNAMIC": False,
        "HAS_RINGS": False,
        "NUM_PARTIALS": 256,
        "RING_BLOCK": 16,
        "HAS_FMA": True,
    }
    return compile_for(
        capability,
        f"{MODULE}:_cast_kernel",
        signature,
        SHAPE | constants | changes,
        aligned=["q_batch_stride"],  # and so are the pointers
        num_warps=4,
        enable_fp_fusion=False,
    )


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_static(capability):
    compiled = compile_cast(capability, ROTARY=0, ROTARY_DIM=0)
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert "ld.global.v4.b32" in compiled.ptx  # 8 values at once, and 16 keys of one value
    assert "st.global.v4.b32" in compiled.ptx
    assert "st.global.b8" not in compiled.ptx
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= 72


def test_dynamic_with_rotary():
    compiled = compile_cast(90, IS_DYNAMIC=True, HAS_RINGS=True)
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert "st.global.b8" not in compiled.ptx
    assert compiled.stack_bytes <= 8  # one register around the division that inverts the scale
    assert compiled.num_registers <= 96


def compile_amax(signature=COMMON, *, maxnreg=None, **changes):
    passes = {f"{part}_passes_ptr": "*i64" for part in "qkv"}
    return compile_for(
        90,
        f"{MODULE}:_amax_kernel",
        signature | passes,
        SHAPE | {"HAS_RINGS": True, "NUM_PARTIALS": 256} | changes,
        aligned=["q_batch_stride"],
        num_warps=4,
        enable_fp_fusion=False,
        maxnreg=maxnreg,
    )


def test_amax():
    compiled = compile_amax()
    assert "ld.global.v2.b32" in compiled.ptx
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= 128


def test_norms():
    compiled = compile_cast(90, **FLUX)
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert "ld.global.v4.b32" in compiled.ptx
    assert "st.global.b8" not in compiled.ptx
    assert compiled.stack_bytes <= 8
    assert compiled.num_registers <= 128


def wide_loads(compiled):
    """How many loads have 16 bytes, and how many there are."""
    return compiled.ptx.count("ld.global.v4.b32"), compiled.ptx.count("ld.global")


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("has_batch", [False, True])
def test_two_streams_are_read_as_one_is(has_batch, is_dynamic):
    options = {"HAS_BATCH": has_batch, "IS_DYNAMIC": is_dynamic}
    one = compile_cast(90, **FLUX, **options)
    two = compile_cast(90, signature=CAST | FIRST, **FLUX, **options)
    assert wide_loads(two) == wide_loads(one)
    assert two.stack_bytes == 0
    assert two.num_registers <= one.num_registers + 8


def test_amax_of_two_streams_is_read_as_that_of_one():
    options = {name: value for name, value in FLUX.items() if name != "IS_PACKED"}
    one, two = (
        compile_amax(signature, maxnreg=AMAX_REGISTERS, **options)
        for signature in (COMMON, COMMON | FIRST)
    )
    assert wide_loads(two) == wide_loads(one)
    assert two.stack_bytes == 0
