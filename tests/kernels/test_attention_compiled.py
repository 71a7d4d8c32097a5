"""The attention kernel compiled for GPUs that are not here: instructions, registers, no spills."""

import pytest
import torch

from octavo.kernels.attention.config import AttentionShape, default, split_head_dim
from octavo.kernels.device import Device

pytest.importorskip("triton")
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

NAMES = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16}
STRIDES = [f"{x}_{of}_stride" for x in "qk" for of in ("batch", "token", "head")]
STRIDES += [f"v_{of}_stride" for of in ("batch", "inner", "head")]
SIZES = ["num_tiles", "num_sequences", "num_heads", "group", "q_len", "kv_len", "window"]


def compiled(capability, dtype, head_dim, *, promote_every=1):
    """As it is launched for packed causal sequences with everything contiguous."""
    is_fp8 = dtype.startswith("fp8")
    shape = AttentionShape(NAMES[dtype], head_dim, 10_000, promote_every)
    device = Device("cuda", "GPU", divmod(capability, 10))
    config = default(shape, device)
    (main_qk, rest_qk), (main_pv, rest_pv) = split_head_dim(head_dim, is_fp8)
    return compile_for(
        capability,
        "octavo.kernels.attention.triton:_attention_kernel",
        {
            **dict.fromkeys(["q_ptr", "k_ptr", "v_ptr"], f"*{dtype}"),
            "out_ptr": "*bf16",
            **dict.fromkeys(["lse_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr"], "*fp32"),
            **dict.fromkeys(["cu_seqlens_q_ptr", "cu_seqlens_k_ptr"], "*i32"),
            **dict.fromkeys(STRIDES + SIZES, "i32"),
            **dict.fromkeys(["softmax_scale", "softcap"], "fp32"),
        },
        {
            "sink_ptr": None,
            "key_mask_ptr": None,
            "IS_PACKED": True,
            "IS_CAUSAL": True,
            "HAS_WINDOW": False,
            "HAS_SOFTCAP": False,
            "HAS_SINKS": False,
            "HAS_KEY_MASK": False,
            "IS_TRANSPOSED": is_fp8,
            "IS_WIDE": False,
            "Q_PER_HEAD": False,
            "K_GRANULARITY": "tensor",
            "V_GRANULARITY": "tensor",
            "PROMOTE_EVERY": promote_every if is_fp8 else 0,
            "WEIGHT_BITS": 8 if is_fp8 else 0,
            "PRECISION": None,
            "HEAD_DIM": head_dim,
            "MAIN_QK": main_qk,
            "REST_QK": rest_qk,
            "MAIN_PV": main_pv,
            "REST_PV": rest_pv,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
        },
        aligned=STRIDES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_hopper_multiplies_fp8_from_registers(head_dim):
    kernel = compiled(90, "fp8e4nv", head_dim)
    assert ".f32.e4m3.e4m3" in kernel.ptx
    assert "QGMMA" in kernel.opcodes
    assert kernel.stack_bytes == 0
    # Two programs share an SM, and P goes from sums to operand without a shuffle: what is left
    # are the row maxima and sums, 8 in each of the two loops.
    assert 2 * 128 * kernel.num_registers <= 65536
    assert kernel.opcodes["SHFL"] <= 16
    assert kernel.shared_bytes <= 227 * 1024 // 2


def test_later_promotion_does_not_spill():
    assert compiled(90, "fp8e4nv", 128, promote_every=4).stack_bytes == 0


@pytest.mark.parametrize(
    ("capability", "dtype", "instruction"),
    [(80, "bf16", "HMMA"), (89, "fp8e4nv", "QMMA"), (90, "bf16", "HGMMA"), (100, "fp8e4nv", "UTC")],
)
def test_other_gpus(capability, dtype, instruction):
    kernel = compiled(capability, dtype, 128)
    assert any(name.startswith(instruction) for name in kernel.opcodes)
    assert kernel.stack_bytes == 0
