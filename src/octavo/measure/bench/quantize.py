"""Quantizing activations, one scale per token, beside a copy of the same tensor."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls
from octavo.numerics.granularity import PerToken
from octavo.numerics.quantize import Quantized

SMALL = ((1024, 1024),)
LARGE = tuple((rows, columns) for rows in (4096, 14040) for columns in (2048, 3072, 6144, 12288))


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each size that suits the device."""
    sizes = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, rows, columns) for rows, columns in sizes]


def _benchmark(device: torch.device, rows: int, columns: int) -> Benchmark:
    def make_inputs(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(rows, columns, device=device, generator=generator).bfloat16()

    num_bytes = rows * columns * 3 + rows * 4  # BF16 in, FP8 and scales out
    ours = [
        Contender(name, "BF16 to FP8", partial(_ours, name), 2**-4, num_bytes)
        for name in timed_impls("quantize", device)
    ]
    copy = Contender("copy", "BF16 to BF16", _copy, 0.0, 4 * rows * columns)
    return Benchmark(
        op="quantize",
        case={"shape": f"{rows}x{columns}", "granularity": "token"},
        make_inputs=make_inputs,
        truth=Tensor.double,
        contenders=(*ours, copy),
        checked=_value,
    )


def _ours(impl: str, x: Tensor) -> Callable[[], Quantized]:
    return partial(ops.quantize, x, PerToken(), impl=impl)


def _copy(x: Tensor) -> Callable[[], Tensor]:
    return partial(torch.empty_like(x).copy_, x)


def _value(result: Quantized | Tensor) -> Tensor:
    return result.dequantize() if isinstance(result, Quantized) else result
