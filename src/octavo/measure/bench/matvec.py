"""One token times a weight in BF16 beside torch's linear: how fast the weight is read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.kernels.matvec.config import work
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls

# (columns, depth): Llama-3.1-8B with its vocabulary, then gpt-oss.
SMALL = ((512, 512), (65, 300))
LARGE = (
    *((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (128256, 4096)),
    *((4096, 2880), (512, 2880), (2880, 4096)),
)
# Rounding the result to BF16 costs 0.002 on normal values.
MAX_ERROR = 0.01


@dataclass(frozen=True)
class Inputs:
    """One token and a weight."""

    x: Tensor
    weight: Tensor


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each size that suits the device."""
    sizes = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, columns, depth) for columns, depth in sizes]


def _benchmark(device: torch.device, columns: int, depth: int) -> Benchmark:
    flops, num_bytes = work(columns, depth)
    ours = [
        Contender(name, "BF16", partial(_ours, name), MAX_ERROR, num_bytes)
        for name in timed_impls("matvec", device)
    ]
    return Benchmark(
        op="matvec",
        case={"shape": f"{columns}x{depth}"},
        make_inputs=partial(_make_inputs, device, columns, depth),
        truth=_truth,
        contenders=(*ours, Contender("torch", "BF16", _torch, MAX_ERROR, num_bytes)),
        flops=flops,
        baseline="torch",
    )


def _make_inputs(device: torch.device, columns: int, depth: int, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    x, weight = (
        torch.randn(rows, depth, device=device, generator=generator).bfloat16()
        for rows in (1, columns)
    )
    return Inputs(x, weight)


def _truth(inputs: Inputs) -> Tensor:
    return inputs.x.double() @ inputs.weight.double().t()


def _ours(impl: str, inputs: Inputs) -> Callable[[], Tensor]:
    return partial(ops.matvec, inputs.x, inputs.weight, impl=impl)


def _torch(inputs: Inputs) -> Callable[[], Tensor]:
    return partial(torch.nn.functional.linear, inputs.x, inputs.weight)
