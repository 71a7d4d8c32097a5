"""Queries, keys and values as kernels get them from one projection, and rotary tables."""

import torch

from octavo.numerics.qkv import QkvScales
from octavo.numerics.rotary import Rotary
from octavo.testing.inputs import Draw


def draw_packed(num_tokens, num_heads, num_kv_heads, head_dim, device, dtype=torch.bfloat16):
    """q, k and v as views of one projection."""
    heads = [num_heads, num_kv_heads, num_kv_heads]
    joint = Draw(0, device).normal(num_tokens, sum(heads), head_dim, dtype=dtype)
    return joint.split(heads, dim=1)


def draw_rotary(rows, rotary_dim, device, *, is_interleaved=False, dtype=torch.float32):
    angle = Draw(1).normal(rows, rotary_dim // 2, dtype=torch.float32) * 6
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    return Rotary(cos, sin, is_interleaved)


def static_scales(device, shapes=((), (), ())):
    draw = Draw(1)
    return QkvScales(*((draw.normal(*shape).abs() + 0.5).to(device) / 64 for shape in shapes))
