"""A linear layer with GELU in BF16, as one product, beside torch's two steps compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import ops
from octavo.kernels.linear_gelu.config import work
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls
from octavo.reference.gemm import linear_gelu as reference

# (rows, columns, depth): Qwen-Image at 1024 × 1024, then a video transformer.
SMALL = ((65, 96, 48),)
LARGE = ((4096, 12288, 3072), (14040, 6144, 2048))
# Rounding the product and the result to BF16 costs 0.003 on normal values.
MAX_ERROR = 0.01


@dataclass(frozen=True)
class Inputs:
    """Tokens, and a layer."""

    x: Tensor
    weight: Tensor
    bias: Tensor


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each size that suits the device."""
    sizes = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, *size) for size in sizes]


def _benchmark(device: torch.device, rows: int, columns: int, depth: int) -> Benchmark:
    flops, num_bytes = work(rows, columns, depth)
    ours = [
        Contender(name, "BF16", partial(_ours, name), MAX_ERROR, num_bytes)
        for name in timed_impls("linear_gelu", device)
    ]
    # torch writes the product, and reads it again for GELU.
    torch_bytes = num_bytes + 2 * 2 * rows * columns
    return Benchmark(
        op="linear_gelu",
        case={"shape": f"{rows}x{columns}x{depth}"},
        make_inputs=partial(_make_inputs, device, rows, columns, depth),
        truth=_truth,
        contenders=(*ours, Contender("torch-compiled", "BF16", _compiled, MAX_ERROR, torch_bytes)),
        flops=flops,
        baseline="torch-compiled",
    )


def _make_inputs(device: torch.device, rows: int, columns: int, depth: int, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    x, weight, bias = (
        torch.randn(shape, device=device, generator=generator)
        for shape in ((rows, depth), (columns, depth), (columns,))
    )
    return Inputs(x.bfloat16(), (weight / depth**0.5).bfloat16(), bias.bfloat16())


def _truth(inputs: Inputs) -> Tensor:
    return reference(inputs.x, inputs.weight, inputs.bias, compute=torch.float64)


def _ours(impl: str, inputs: Inputs) -> Callable[[], Tensor]:
    return partial(ops.linear_gelu, inputs.x, inputs.weight, inputs.bias, impl=impl)


def _compiled(inputs: Inputs) -> Callable[[], Tensor]:
    gelu = torch.compile(_gelu) if inputs.x.is_cuda else _gelu  # on a CPU it would take seconds
    return lambda: gelu(F.linear(inputs.x, inputs.weight, inputs.bias))


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
