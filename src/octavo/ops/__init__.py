"""The functional API: each op checks its arguments, selects an implementation and runs it."""

from octavo.ops.append_kv import append_kv
from octavo.ops.attention import attention
from octavo.ops.decode_attention import decode_attention
from octavo.ops.explain import Explanation, explain
from octavo.ops.linear_gelu import linear_gelu
from octavo.ops.matvec import matvec
from octavo.ops.plan_decode import plan_decode
from octavo.ops.prefill_attention import prefill_attention
from octavo.ops.quantize import quantize
from octavo.ops.quantize_qkv import quantize_qkv
from octavo.ops.rotate_qk import rotate_qk
from octavo.ops.scaled_dot_product_attention import scaled_dot_product_attention
from octavo.ops.scaled_mm import scaled_mm
from octavo.ops.select import Request, Selection, register_impl, select, unregister_impl
from octavo.ops.warm_up import warm_up

__all__ = [
    "Explanation",
    "Request",
    "Selection",
    "append_kv",
    "attention",
    "decode_attention",
    "explain",
    "linear_gelu",
    "matvec",
    "plan_decode",
    "prefill_attention",
    "quantize",
    "quantize_qkv",
    "register_impl",
    "rotate_qk",
    "scaled_dot_product_attention",
    "scaled_mm",
    "select",
    "unregister_impl",
    "warm_up",
]
