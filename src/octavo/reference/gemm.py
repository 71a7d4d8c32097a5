"""What products of FP8 and of plain weights mean."""

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.numerics.granularity import PerBlock, PerTensor
from octavo.numerics.quantize import Quantized


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized,
    bias: Tensor | None = None,
    *,
    compute: torch.dtype = torch.float32,
) -> Tensor:
    """a · bᵀ + bias in the `compute` dtype.

    a: [rows, K], quantized, or a plain tensor for a product with FP8 weights only; b: [columns, K];
    bias: [columns]. The products of one block of K are added up, then multiplied by both scales.
    """
    a_data, a_columns = _data_and_block(a)
    b_data, b_columns = _data_and_block(b)
    if a_columns and b_columns and a_columns != b_columns:
        raise ConfigError(f"expected blocks of one width along K, got {a_columns} and {b_columns}")
    width = a_columns or b_columns or max(1, a_data.shape[1])
    out = torch.zeros(a_data.shape[0], b_data.shape[0], dtype=compute, device=a_data.device)
    for block, start in enumerate(range(0, a_data.shape[1], width)):
        columns = slice(start, start + width)
        products = a_data[:, columns].to(compute) @ b_data[:, columns].to(compute).t()
        row_scale = _row_scale(a, block).to(compute)
        column_scale = _row_scale(b, block).to(compute)
        out += products * row_scale.unsqueeze(-1) * column_scale
    return out if bias is None else out + bias.to(compute)


def matvec(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, compute: torch.dtype = torch.float32
) -> Tensor:
    """weight · x + bias in the `compute` dtype.

    x: [K]; weight: [N, K]; bias: [N]. Each product by itself, so that Inf · 0 is NaN whatever a
    BLAS makes of zeros, and a float32 sum is one whatever torch allows matrix products to be.
    """
    out = (weight.to(compute) * x.to(compute)).sum(dim=1)
    return out if bias is None else out + bias.to(compute)


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, *, compute: torch.dtype = torch.float32
) -> Tensor:
    """GELU(x · weightᵀ + bias) in the `compute` dtype, by its tanh formula.

    x: [rows, K]; weight: [N, K]; bias: [N]. GELU of s is s/2 · (1 + tanh(√(2/π) · (s + c·s³))),
    with c = 0.044715.
    """
    out = x.to(compute) @ weight.to(compute).t() + bias.to(compute)
    return torch.nn.functional.gelu(out, approximate="tanh")


def _data_and_block(x: Quantized | Tensor) -> tuple[Tensor, int | None]:
    """The data of an operand and how many columns share a scale; None for all."""
    if isinstance(x, Tensor):
        return x, None
    return x.data, x.granularity.columns if isinstance(x.granularity, PerBlock) else None


def _row_scale(x: Quantized | Tensor, block: int) -> Tensor:
    """The scales of an operand's rows in one block of columns: [rows] or []."""
    match x:
        case Tensor():
            return x.new_ones((), dtype=torch.float32)
        case Quantized(scale=scale, granularity=PerTensor()):
            return scale
        case Quantized(data=data, scale=scale, granularity=PerBlock(rows=rows)):
            return scale[:, block].repeat_interleave(rows)[: data.shape[0]]
        case _:
            return x.scale
