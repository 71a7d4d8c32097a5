"""The scaled_mm kernels compiled for GPUs that are not here: instructions, registers, no spills."""

import pytest

pytest.importorskip("triton")
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

MODULE = "octavo.kernels.scaled_mm.triton"
SIZES = {"num_rows": "i32", "num_columns": "i32", "depth": "i32"}
SIZES |= {"a_stride": "i32", "b_stride": "i32"}
ALIGNED = ("num_columns", "depth", "a_stride", "b_stride")
RESULTS = {"out_ptr": "*bf16", "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "bias_ptr": "*bf16"}
PARTIALS = {"partial_ptr": "*fp32", "counter_ptr": "*i32"}
SCALES = {"A_SCALE": "row", "B_SCALE": "row", "WIDTH": 0, "HEIGHT": 1, "HAS_BIAS": True, "GROUP": 8}
BLOCKS = {"A_SCALE": "block", "B_SCALE": "block", "WIDTH": 128, "HEIGHT": 128}
MMA = {
    89: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3",
    90: "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    100: "tcgen05.mma",
}


def compile_tiles(capability, *, a="fp8e4nv", num_warps=4, num_stages=3, **changes):
    constants = {"IS_TMA": capability >= 90, "NUM_PARTS": 2, "FLATTEN": True, **SCALES}
    constants |= {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128} | changes
    rows = constants["BLOCK_M"] // constants["NUM_PARTS"]
    refs = {"a_ref": f"*{a}", "b_ref": "*fp8e4nv"}
    if constants["IS_TMA"]:
        refs = {"a_ref": f"tensordesc<{a}[{rows},128]>", "b_ref": "tensordesc<fp8e4nv[128,128]>"}
    return compile_for(
        capability,
        f"{MODULE}:_tile_kernel",
        {**refs, **RESULTS, **SIZES},
        constants,
        aligned=ALIGNED,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def compile_stream(capability, a, b, **changes):
    constants = {
        "DECODE": "",
        "NUM_SPLITS": 4,
        "IS_DEPENDENT": False,
        "IS_TMA": False,
        "PREFETCH": 1024,
        **SCALES,
    }
    constants |= {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128} | changes
    signature = {"a_ref": f"*{a}", "b_ref": f"*{b}", **RESULTS, **PARTIALS, **SIZES}
    if constants["A_SCALE"] == "none":
        del signature["a_scale_ptr"]
        constants["a_scale_ptr"] = None
    return compile_for(
        capability,
        f"{MODULE}:_stream_kernel",
        signature,
        constants,
        aligned=ALIGNED,
        num_warps=4,
        num_stages=3,
    )


@pytest.mark.parametrize("capability", [90, 100])
def test_tiles(capability):
    compiled = compile_tiles(capability)
    assert MMA[capability] in compiled.ptx
    assert compiled.stack_bytes == 0
    assert compiled.shared_bytes <= 113 * 1024  # two programs on an SM


def test_tiles_of_small_products_and_of_blocks():
    options = {"BLOCK_M": 64, "NUM_PARTS": 1, "num_stages": 4, "FLATTEN": False}
    compiled = compile_tiles(90, a="fp8e5", **options, **BLOCKS)
    assert MMA[90].replace("e4m3.e4m3", "e5m2.e4m3") in compiled.ptx
    assert compiled.stack_bytes == 0
    assert compiled.shared_bytes <= 113 * 1024


@pytest.mark.parametrize("capability", [89, 90])
def test_tiles_by_pointers(capability):
    options = {"IS_TMA": False, "NUM_PARTS": 1, "FLATTEN": False}
    compiled = compile_tiles(capability, num_warps=8, **options)
    assert MMA[capability] in compiled.ptx
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_streams(capability):
    compiled = compile_stream(capability, "fp8e4nv", "fp8e4nv", IS_DEPENDENT=capability >= 90)
    mma = {**MMA, 90: "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"}
    assert mma[capability] in compiled.ptx
    assert "cp.async" in compiled.ptx
    assert ("griddepcontrol.wait" in compiled.ptx) == (capability >= 90)
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize(("capability", "a"), [(80, "bf16"), (80, "fp16"), (90, "bf16")])
def test_weights_are_decoded(capability, a):
    """Without the FP8 type the weight is bytes, and nothing converts from FP8."""
    changes = {"A_SCALE": "none"}
    if capability == 80:
        compiled = compile_stream(80, a, "u8", DECODE="e4m3", **changes)
        name = {"bf16": "bf16", "fp16": "f16"}[a]
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}" in compiled.ptx
        assert "e4m3" not in compiled.ptx
    else:
        compiled = compile_stream(capability, a, "fp8e4nv", **changes)
        assert "wgmma.mma_async" in compiled.ptx
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("is_static", [False, True])
def test_tokens(is_static):
    compiled = compile_for(
        90,
        f"{MODULE}:_quantize_tokens_kernel",
        {
            "x_ptr": "*bf16",
            "data_ptr": "*fp8e4nv",
            "scale_ptr": "*fp32",
            "counter_ptr": "*i32",
            "num_columns": "i32",
            "row_stride": "i32",
            "num_counters": "i32",
            "margin_over_max": "fp32",
        },
        {
            "IS_STATIC": is_static,
            "MAX": 448.0,
            "BLOCK": 16384,
            "PART": 2048,
            "HAS_COUNTERS": True,
            "HAS_FMA": True,
            "IS_PRIMARY": True,
        },
        num_warps=16,
    )
    assert "griddepcontrol.launch_dependents" in compiled.ptx
    assert compiled.stack_bytes == 0
