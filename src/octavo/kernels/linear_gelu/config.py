"""What cuBLAS's product with a GELU at its end can do; no GPU here."""

import torch

from octavo.kernels.device import Device

# Values of 16 bytes: what cuBLAS's kernels with a GELU read at once.
ALIGNMENT = 8


def torch_objection(
    device: Device, dtype: torch.dtype, sizes: tuple[int, int, int] | None
) -> str | None:
    """Why torch._addmm_activation cannot do it on this device; None if it can.

    sizes: rows, columns and depth.
    """
    if device.capability is None:
        return (
            f"torch._addmm_activation has a GELU of its own on CUDA GPUs alone, got {device.name}"
        )
    if device.capability < (8, 0):
        major, minor = device.capability
        return f"products need compute capability 8.0 or newer, got {major}.{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"products in 16 bits have a GELU at their end, got {dtype}"
    if sizes is not None:
        _, columns, depth = sizes
        if depth == 0:
            return "a product of no values is the bias alone, without GELU: got a depth of 0"
        if columns % ALIGNMENT or depth % ALIGNMENT:
            return (
                f"the product would be rounded before its GELU unless {ALIGNMENT} divides columns "
                f"and depth, got {columns} and {depth}"
            )
    return None


def work(rows: int, columns: int, depth: int, value_bytes: int = 2) -> tuple[int, int]:
    """(flops, bytes) of one call: operands and the result; the GELU has no traffic of its own."""
    values = rows * depth + columns * (depth + 1) + rows * columns
    return 2 * rows * columns * depth, values * value_bytes
