"""The rotate_qk kernel compiled for GPUs that are not here: instructions and registers."""

import pytest

pytest.importorskip("triton")
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

KERNEL = "octavo.kernels.rotate_qk.triton:_rotate_kernel"
STRIDES = {f"{part}_{name}_stride": "i32" for part in "qk" for name in ("batch", "token", "head")}
SIZES = {
    name: "i32"
    for name in (
        *("num_q_programs", "num_q_tokens", "num_k_tokens", "q_length", "k_length"),
        *("num_rows", "cos_row", "sin_row"),
    )
}
# Qwen3-VL's vision tower: 16 heads of 72, tables of 36 columns that lie 72 apart.
SHAPE = {
    "NUM_HEADS": 16,
    "NUM_KV_HEADS": 16,
    "ROTARY": 1,
    "ROTARY_DIM": 72,
    "HEAD_DIM": 72,
    "ALIGN": 8,
    "TABLE_ALIGN": 8,
    "HAS_BATCH": False,
    "HAS_REPEATS": False,
    "BLOCK_TOKENS": 32,
    "BLOCK_WIDTH": 128,
    "cos_column": 1,
    "sin_column": 1,
}


def compile_rotate(capability, dtype="bf16", **changes):
    pointers = {f"{part}{end}_ptr": f"*{dtype}" for part in "qk" for end in ("", "_out")}
    return compile_for(
        capability,
        KERNEL,
        pointers | STRIDES | SIZES | {"cos_ptr": "*fp32", "sin_ptr": "*fp32"},
        SHAPE | changes,
        aligned=["q_batch_stride"],  # and so are the pointers
        num_warps=4,
        enable_fp_fusion=False,
    )


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_halves(capability):
    """Halves of 36 values: 4 of them, 8 bytes, are what one load or store can have."""
    compiled = compile_rotate(capability)
    assert "ld.global.v2.b32" in compiled.ptx
    assert "st.global.v2.b32" in compiled.ptx
    assert "st.global.b16" not in compiled.ptx
    assert "fma.rn.f32" not in compiled.ptx  # products are rounded one by one
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= 128


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_heads_of_128(dtype):
    compiled = compile_rotate(90, dtype, HEAD_DIM=128, ROTARY_DIM=128)
    assert "ld.global.v4.b32" in compiled.ptx
    assert "st.global.v4.b32" in compiled.ptx
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("rotary_dim", [72, 36])
def test_interleaved(rotary_dim):
    compiled = compile_rotate(90, ROTARY=2, ROTARY_DIM=rotary_dim)
    assert "st.global.b16" not in compiled.ptx
    assert compiled.stack_bytes == 0
