"""Matrix products with FP8 weights, with and without quantizing the activation in front."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.measure.bench.benchmark import Benchmark, Contender
from octavo.numerics.granularity import PerChannel, PerToken
from octavo.ops.select import impl_names

# (rows, columns, depth)
SMALL = ((256, 1024, 1024),)
LARGE = (
    (8192, 8192, 8192),
    (4096, 3072, 3072),
    (4608, 12288, 3072),
    (4608, 3072, 12288),
    (14040, 6144, 2048),
    (14040, 2048, 6144),
    *((rows, *shape) for rows in (1, 16) for shape in ((6144, 4096), (28672, 4096), (4096, 14336))),
)
CHECKED = 16
Inputs = tuple[Tensor, Tensor, Tensor]


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each size that suits the device."""
    sizes = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, *size) for size in sizes]


def _benchmark(device: torch.device, rows: int, columns: int, depth: int) -> Benchmark:
    def make_inputs(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        a, b, bias = (
            torch.randn(shape, device=device, generator=generator).bfloat16()
            for shape in ((rows, depth), (columns, depth), (columns,))
        )
        return a, b, bias

    def truth(inputs: Inputs) -> Tensor:
        a, b, bias = (x.double() for x in inputs)
        return a[:CHECKED] @ b.t() + bias

    num_bytes = rows * depth + columns * depth + 2 * rows * columns
    ours = [
        Contender(name, "FP8", partial(_ours, name), 0.06, num_bytes)
        for name in impl_names("scaled_mm")
    ]
    others = [Contender("torch", "BF16", _bf16, 0.01, 2 * (rows + columns) * depth)]
    return Benchmark(
        op="scaled_mm",
        case={"shape": f"{rows}x{columns}x{depth}", "granularity": "token by channel"},
        make_inputs=make_inputs,
        truth=truth,
        contenders=(*ours, *others),
        flops=2.0 * rows * columns * depth,
        checked=lambda result: result[:CHECKED],
    )


def _ours(impl: str, inputs: Inputs) -> Callable[[], Tensor]:
    a, b, bias = inputs
    operands = ops.quantize(a, PerToken()), ops.quantize(b, PerChannel())
    return partial(ops.scaled_mm, *operands, bias, impl=impl)


def _bf16(inputs: Inputs) -> Callable[[], Tensor]:
    a, b, bias = inputs
    return partial(torch.nn.functional.linear, a, b, bias)
