"""The append_kv kernel compiled for GPUs that are not here: instructions, no spills."""

import pytest

pytest.importorskip("triton")
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

KERNEL = "octavo.kernels.append_kv.triton:_append_kernel"
POINTERS = {f"{name}_ptr": "*bf16" for name in ("key", "value", "query", "out")}
POINTERS |= {f"{name}_ptr": "*fp32" for name in ("cos", "sin", "key_scale", "value_scale")}
POINTERS |= {"q_scale_ptr": "*fp32", "slots_ptr": "*i64"}
ROWS = [f"{name}_{of}" for name in ("key", "value", "query") for of in ("token", "head")]
PAGES = [f"{name}_page{of}" for name in ("key", "value") for of in ("", "_head", "_token")]
SCALES = [f"{x}_scale_{of}" for x in ("key", "value") for of in ("page", "head", "token")]
ALIGNED = [*ROWS, *PAGES, *SCALES, "cos_row", "sin_row", "num_slots"]
SIGNATURE = POINTERS | dict.fromkeys([*ALIGNED, "q_scale_head", "num_rows"], "i32")
SIGNATURE |= {"factor": "fp32"}
# One step of Llama-3.1-8B.
SHAPE = {
    "cos_column": 1,
    "sin_column": 1,
    "PAGE_SIZE": 64,
    "HEAD_DIM": 128,
    "ROTARY_DIM": 128,
    "IS_INTERLEAVED": False,
    "HAS_REPEATS": False,
    "HAS_QUERY": True,
    "HAS_Q_SCALE": False,
    "PER_TOKEN": False,
    "IS_FP8": True,
    "HAS_FMA": True,
    "IS_DEPENDENT": True,
    "NUM_KV_HEADS": 8,
    "GROUP": 4,
    "BLOCK_PAIRS": 64,
    "BLOCK_HEADS": 4,
    "BLOCK_QUERIES": 16,
    "LARGEST": None,
}


def compile_append(capability, page, **changes):
    others = {"key_pages_ptr": page, "value_pages_ptr": page}
    constants = SHAPE | changes
    if constants["LARGEST"] is None:
        constants["saturated_ptr"] = None
    else:
        others["saturated_ptr"] = "*i64"
    options = {"launch_pdl": True} if constants["IS_DEPENDENT"] else {}
    return compile_for(
        capability,
        KERNEL,
        SIGNATURE | others,
        constants,
        aligned=ALIGNED,
        num_warps=4,
        enable_fp_fusion=False,
        **options,
    )


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_fp8_pages(capability):
    compiled = compile_append(capability, "*fp8e4nv", IS_DEPENDENT=capability >= 90)
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert compiled.ptx.count("griddepcontrol") == (2 if capability >= 90 else 0)
    assert "st.global.b8" not in compiled.ptx
    assert compiled.stack_bytes == 0
    assert compiled.num_registers <= 64


def test_scales_per_token():
    compiled = compile_append(90, "*fp8e5", PER_TOKEN=True)
    assert "cvt.rn.satfinite.e5m2x2.f32" in compiled.ptx
    assert compiled.stack_bytes == 0


def test_bf16_pages_on_older_gpus():
    compiled = compile_append(80, "*bf16", IS_FP8=False, IS_DEPENDENT=False)
    assert "griddepcontrol" not in compiled.ptx
    assert "ld.global.v4.b32" in compiled.ptx
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("changes", [{}, {"HAS_QUERY": False, "ROTARY_DIM": 0}], ids=str)
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_counts_of_saturated_values(capability, changes):
    """A reduction without a result or an order; who does not count has none of it."""
    changes = {**changes, "IS_DEPENDENT": capability >= 90}
    plain = compile_append(capability, "*fp8e4nv", **changes)
    counting = compile_append(capability, "*fp8e4nv", LARGEST=462.0, **changes)
    assert "atom" not in plain.ptx and "atom" in counting.ptx
    assert "saturated" not in plain.ptx
    assert "atom.global.gpu.acq_rel" not in counting.ptx
    assert counting.opcodes.get("MEMBAR", 0) == 0
    assert counting.stack_bytes == 0
    assert counting.num_registers <= plain.num_registers + 16
