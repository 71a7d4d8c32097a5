"""What rotary embedding means: in float32, from the values as they are."""

import torch
from torch import Tensor

from octavo.numerics.rotary import Rotary


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x [..., heads, head_dim] turned by the tables, in float32."""
    tokens = x.float().reshape(-1, *x.shape[-2:])
    repeats = len(tokens) // max(1, len(rotary.cos))
    cos, sin = (t.float().repeat(repeats, 1).unsqueeze(1) for t in (rotary.cos, rotary.sin))
    turned, rest = tokens[..., : rotary.rotary_dim], tokens[..., rotary.rotary_dim :]
    if rotary.is_interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    if rotary.is_interleaved:
        turned = torch.stack(pair, dim=-1).flatten(-2)
    else:
        turned = torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1).view(x.shape)


def rotate_qk(q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """q and k [..., heads, head_dim] turned in float32, then rounded once to their dtypes."""
    return rotate(q, rotary).to(q.dtype), rotate(k, rotary).to(k.dtype)
