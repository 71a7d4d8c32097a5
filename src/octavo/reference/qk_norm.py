"""What the norm of queries and keys means: in float32, from the values as they are."""

import torch
from torch import Tensor


def normalize(x: Tensor, weight: Tensor, eps: float, num_first: int) -> Tensor:
    """x [..., length, heads, head_dim] normalized in float32; weight: [streams, head_dim]."""
    values = x.float()
    root = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    is_second = torch.arange(x.shape[-3], device=x.device) >= num_first
    row = is_second.long() if len(weight) == 2 else torch.zeros_like(is_second, dtype=torch.long)
    return values * root * weight.float()[row][:, None]
