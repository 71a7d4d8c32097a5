"""Small calls of every op, several kinds of each, and a mode that records their operators."""

import torch

from octavo import ops
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerBlock, PerHead, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.rotary import Rotary
from octavo.testing.cases import AttentionCase, MatmulCase, PackedCase, PagedCase
from octavo.testing.inputs import (
    Draw,
    make_attention_inputs,
    make_decode_inputs,
    make_matmul_inputs,
    make_packed_inputs,
    make_paged_view,
    make_prefill_inputs,
)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the operators of octavo that a call uses, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "octavo":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


def draw_qk(is_strided: bool = False):
    qkv = strided_qkv() if is_strided else draw_qkv()
    return {"q": qkv["q"], "k": qkv["k"]}


def tables():
    angle = torch.rand(5, 20)
    return Rotary(angle.cos(), angle.sin())


def draw_qkv():
    draw = Draw(0)
    return {
        name: draw.normal(1, 5, heads, 40, dtype=torch.bfloat16)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }


def strided_qkv():
    return dict(zip("qkv", Draw(0).normal(1, 5, 8, 40).split([4, 2, 2], dim=2), strict=True))


def history(shapes=((), (), ())):
    return tuple(AmaxHistory(shape) for shape in shapes)


def append_inputs(**options):
    key, value = Draw(0).normal(2, 3, 2, 64, dtype=torch.bfloat16)
    slots = torch.tensor([3, -1, 70])
    return {
        "view": make_paged_view(PagedCase(**options)),
        "key": key,
        "value": value,
        "slots": slots,
    }


def matvec_inputs(**changes):
    draw = Draw(0)
    shapes = {"x": (1, 40), "weight": (6, 40), "bias": (6,)}
    return {
        name: draw.normal(*shape, dtype=torch.bfloat16) for name, shape in shapes.items()
    } | changes


def gelu_inputs(**changes):
    return matvec_inputs(x=Draw(1).normal(2, 3, 40, dtype=torch.bfloat16)) | changes


SMALL = AttentionCase(batch=1, q_len=5, head_dim=32)
SPEC = AttentionSpec(causal=True, window=3)

# name -> the call; every operator in several kinds
CALLS = {
    "attention": lambda: ops.attention(**make_attention_inputs(SMALL)),
    "attention-fp8": lambda: ops.attention(
        **make_attention_inputs(SMALL, dtype=E4M3.dtype, granularity=PerToken()), return_lse=True
    ),
    "attention-everything": lambda: ops.attention(
        **make_attention_inputs(
            AttentionCase(q_len=5, spec=SPEC, has_sinks=True, has_key_mask=True),
            dtype=torch.float32,
        ),
        out_dtype=torch.float16,
    ),
    "attention-strided": lambda: ops.attention(**strided_qkv()),
    "attention-packed": lambda: ops.attention(**make_packed_inputs(PackedCase(q_lens=(3, 0, 5)))),
    "attention-empty": lambda: ops.attention(**make_attention_inputs(AttentionCase(batch=0))),
    "prefill": lambda: ops.prefill_attention(**make_prefill_inputs(PagedCase()), return_lse=True),
    "prefill-fp8": lambda: ops.prefill_attention(
        **make_prefill_inputs(PagedCase(granularity=PerHead()), dtype=E4M3.dtype)
    ),
    "decode": lambda: ops.decode_attention(**make_decode_inputs(PagedCase(has_sinks=True))),
    "decode-strided": lambda: ops.decode_attention(
        Draw(0).normal(5, 4, 2, 64, dtype=torch.bfloat16).transpose(1, 2),
        make_paged_view(PagedCase()),
        out_dtype=torch.float32,
    ),
    "append": lambda: ops.append_kv(**append_inputs()),
    "append-token": lambda: ops.append_kv(**append_inputs(granularity=PerToken())),
    "append-counted": lambda: ops.append_kv(
        **append_inputs(), saturated=torch.zeros(2, dtype=torch.int64)
    ),
    "append-bf16": lambda: ops.append_kv(**append_inputs(dtype=torch.bfloat16)),
    "quantize": lambda: ops.quantize(Draw(0).normal(3, 40)),
    "quantize-strided": lambda: ops.quantize(Draw(0).normal(3, 40).t(), PerToken()),
    "quantize-block": lambda: ops.quantize(Draw(0).normal(3, 40), PerBlock(2, 16), margin=1.5),
    "quantize-static": lambda: ops.quantize(Draw(0).normal(3, 40).t(), scale=torch.ones(())),
    "qkv": lambda: ops.quantize_qkv(**draw_qkv()),
    "qkv-head": lambda: ops.quantize_qkv(**strided_qkv(), granularity=PerHead()),
    "qkv-history": lambda: ops.quantize_qkv(**draw_qkv(), history=history()),
    "qkv-static": lambda: ops.quantize_qkv(**strided_qkv(), scales=QkvScales.ones()),
    "qkv-first": lambda: ops.quantize_qkv(**strided_qkv(), first=tuple(strided_qkv().values())),
    "rotate": lambda: ops.rotate_qk(**draw_qk(), rotary=tables()),
    "rotate-strided": lambda: ops.rotate_qk(**draw_qk(is_strided=True), rotary=tables()),
    "matmul": lambda: ops.scaled_mm(**make_matmul_inputs(MatmulCase(has_bias=True))),
    "matmul-plain": lambda: ops.scaled_mm(**make_matmul_inputs(MatmulCase(a=None))),
    "matmul-block": lambda: ops.scaled_mm(
        **make_matmul_inputs(MatmulCase(a=PerBlock(1, 64), b=PerBlock(64, 64)))
    ),
    "gelu": lambda: ops.linear_gelu(**gelu_inputs()),
    "gelu-strided": lambda: ops.linear_gelu(
        torch.ones(40, 3).t(), Draw(0).normal(12, 90)[::2, 50:], torch.ones(12)[::2]
    ),
    "gelu-empty": lambda: ops.linear_gelu(**gelu_inputs(x=torch.ones(0, 40).bfloat16())),
    "matvec": lambda: ops.matvec(**matvec_inputs()),
    "matvec-strided": lambda: ops.matvec(torch.ones(40, 3)[:, 1], Draw(0).normal(6, 90)[::2, 50:]),
    "matvec-empty": lambda: ops.matvec(
        **matvec_inputs(x=torch.ones(1, 1, 0), weight=torch.ones(6, 0), bias=None)
    ),
}
