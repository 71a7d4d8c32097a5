"""What prefill over pages can do, and how pages are gathered; no Triton here, and no GPU."""

from dataclasses import dataclass

import torch

from octavo.kernels.attention import config as attention
from octavo.kernels.device import Device
from octavo.numerics.formats import is_fp8


@dataclass(frozen=True)
class GatherConfig:
    """Tokens that one program brings from their pages, and its warps."""

    block_tokens: int = 128
    num_warps: int = 4


def objection(
    device: Device, q_dtype: torch.dtype, page_dtype: torch.dtype | None, head_dim: int | None
) -> str | None:
    """Why prefill over such pages cannot run on this device; None if it can."""
    found = attention.objection(device, q_dtype, head_dim)
    if found is not None:
        return found
    if page_dtype is not None and is_fp8(page_dtype) and device.capability < (8, 9):  # type: ignore[operator]
        return "Triton reads FP8 pages from compute capability 8.9 on: keep pages in bfloat16 there"
    return None
