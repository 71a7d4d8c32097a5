"""The grouped_mm kernel compiled for GPUs that are not here: instructions, registers, no spills."""

from dataclasses import fields

import pytest

pytest.importorskip("triton")
from octavo.kernels.device import Device
from octavo.kernels.grouped_mm.config import GroupedShape, default
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

MMA = {
    80: "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16",
    89: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3",
    90: "wgmma.mma_async",
    100: "tcgen05.mma",
}
SIZES = ("num_rows", "num_experts", "num_columns", "depth", "a_stride")
BLOCKS = {"A_SCALE": "block", "B_SCALE": "block", "WIDTH": 128, "HEIGHT": 128}


def compile_grouped(capability, rows, *, a="fp8e4nv", **changes):
    """As the default launches it for so many rows of 128 experts."""
    is_fp8 = a == "fp8e4nv"
    device = Device("cuda", "no GPU", divmod(capability, 10), num_sms=132)
    width = changes.get("WIDTH", 0)
    config = default(GroupedShape(rows, 1536, 2048, 128), device, width, is_fp8=is_fp8)
    sizes = {field.name.upper(): getattr(config, field.name) for field in fields(config)}
    by_bits = sizes.pop("IS_DECODED_BY_BITS")
    options = {name.lower(): sizes.pop(name) for name in ("NUM_WARPS", "NUM_STAGES")}
    constants = {"A_SCALE": "row" if is_fp8 else "none", "B_SCALE": "row", "WIDTH": 0, "HEIGHT": 1}
    constants |= {"HAS_BIAS": True, "HAS_TOKENS": True, "DECODE": "e4m3" if by_bits else ""}
    constants |= {**sizes, "EXPERTS": 256, **changes}
    weight = f"tensordesc<fp8e4nv[{config.block_n},{config.block_k}]>"
    if not config.is_tma:
        weight = "*u8" if by_bits else "*fp8e4nv"
    signature = {"a_ptr": f"*{a}", "b_ref": weight, "out_ptr": "*bf16", "a_scale_ptr": "*fp32"}
    signature |= {"b_scale_ptr": "*fp32", "bias_ptr": "*bf16", "ends_ptr": "*i32"}
    signature |= {"token_ptr": "*i64", **dict.fromkeys(SIZES, "i32")}
    if not is_fp8:
        del signature["a_scale_ptr"]
        constants["a_scale_ptr"] = None
    kernel = "octavo.kernels.grouped_mm.triton:_grouped_kernel"
    aligned = ("num_columns", "depth", "a_stride")
    return compile_for(capability, kernel, signature, constants, aligned=aligned, **options)


@pytest.mark.parametrize("changes", [{}, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows", [8, 512, 4096, 65536])
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_fp8(capability, rows, changes):
    compiled = compile_grouped(capability, rows, **changes)
    assert MMA[capability] in compiled.ptx
    assert "cp.async" in compiled.ptx  # rows of a are on their way while others are multiplied
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize(("capability", "rows"), [(80, 8), (80, 65536), (90, 8), (90, 65536)])
def test_a_plain_activation(capability, rows):
    compiled = compile_grouped(capability, rows, a="bf16")
    assert MMA[capability] in compiled.ptx
    assert ("e4m3" in compiled.ptx) == (capability == 90)
    assert compiled.stack_bytes == 0
