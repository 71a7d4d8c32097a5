"""Hopper's attention kernel compiled: FP8 products from registers, no spills, no shuffles of P."""

from dataclasses import astuple

import pytest

from octavo.kernels.attention.config import default_gluon, split_head_dim
from octavo.numerics.attention import AttentionSpec

pytest.importorskip("triton")
from octavo_testkit.kernels.compiling import compile_for

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

SIZES = [
    "num_jobs",
    "num_row_tiles",
    "num_sequences",
    "num_heads",
    "group",
    "num_tokens",
    "q_len",
    "kv_len",
]
STRIDES = ["q_scale_stride", "k_scale_stride", "v_scale_stride"]
USES = ["IS_PACKED", "IS_CAUSAL", "HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"]


def compiled(head_dim, *used):
    (d1, d2), (e1, e2) = split_head_dim(head_dim, is_fp8_operand=True)
    spec = AttentionSpec(
        causal="IS_CAUSAL" in used,
        window=9 if "HAS_WINDOW" in used else None,
        softcap=9.0 if "HAS_SOFTCAP" in used else None,
    )
    config = default_gluon(head_dim, spec)
    n = config.block_n
    e2_copied = 8 if config.has_ones and e2 and head_dim - e1 == 8 else e2
    tiles = {
        "q_desc": (64, d1),
        "q2_desc": (64, d2),
        "k_desc": (n, d1),
        "k2_desc": (n, d2),
        "v_desc": (e1, n),
        "v2_desc": (e2_copied, n),
    }
    pointers = ["lse_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr", "sink_ptr"]
    return compile_for(
        90,
        "octavo.kernels.attention.gluon_sm90:_attention_kernel",
        {
            **{
                name: f"tensordesc<fp8e4nv[1, 1, {rows}, {columns}]>"
                for name, (rows, columns) in tiles.items()
                if rows * columns
            },
            "out_ptr": "*bf16",
            **dict.fromkeys(pointers, "*fp32"),
            **dict.fromkeys(["cu_seqlens_q_ptr", "cu_seqlens_k_ptr"], "*i32"),
            **dict.fromkeys([*SIZES, *STRIDES, "window"], "i32"),
            **dict.fromkeys(["softmax_scale", "softcap"], "fp32"),
        },
        {
            "BLOCK_N": n,
            "NUM_STAGES": config.num_stages,
            "HEAD_DIM": head_dim,
            **dict(zip(("D1", "D2", "E1", "E2"), (d1, d2, e1, e2), strict=True)),
            **{name: name in used for name in USES},
            "HAS_ONES": config.has_ones,
            "HAS_ONE_LOOP": config.has_one_loop,
            "IS_PERSISTENT": config.is_persistent,
            "E2_COPIED": e2_copied,
            **{name: None for name, (rows, columns) in tiles.items() if not rows * columns},
        },
        aligned=[*pointers],
        num_warps=4,
        maxnreg=168,
    )


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 136, 192])
def test_products_and_registers(head_dim):
    kernel = compiled(head_dim)
    assert ".f32.e4m3.e4m3" in kernel.ptx
    assert "QGMMA" in kernel.opcodes and "UTMALDG" in kernel.opcodes
    # The sums of 192 columns, twice, leave no register for two of what the loop carries.
    assert kernel.stack_bytes == (8 if head_dim == 192 else 0)
    assert kernel.shared_bytes <= 227 * 1024
    # The operand P needs none: row maxima take 2 steps of 2 rows, twice for each of 2 consumers.
    assert kernel.opcodes["SHFL"] <= 24


@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_packed(head_dim):
    assert compiled(head_dim, "IS_PACKED").stack_bytes == 0


@pytest.mark.parametrize("head_dim", [72, 96, 128, 160, 192])
def test_packed_and_causal(head_dim):
    # 192: as above, and more so in the loop that hides keys.
    most = 80 if head_dim == 192 else 0
    assert compiled(head_dim, "IS_CAUSAL", "IS_PACKED").stack_bytes <= most


@pytest.mark.parametrize("uses", [USES, ["HAS_SOFTCAP"]], ids=["all", "softcap"])
@pytest.mark.parametrize("head_dim", [72, 128])
def test_more_to_do_in_a_turn(head_dim, uses):
    assert compiled(head_dim, *uses).stack_bytes == 0


def test_settings_are_numbers():
    assert all(type(value) in (int, bool) for value in astuple(default_gluon(64, AttentionSpec())))
