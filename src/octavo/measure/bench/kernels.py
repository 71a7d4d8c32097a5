"""All benchmarks of `octavo bench kernels`, by op."""

from collections.abc import Callable
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.measure.bench import attention, quantize, scaled_mm
from octavo.measure.bench.benchmark import Benchmark

Suite = Callable[[torch.device, Path | None], list[Benchmark]]
SUITES: dict[str, Suite] = {
    "attention": attention.benchmarks,
    "quantize": quantize.benchmarks,
    "scaled_mm": scaled_mm.benchmarks,
}


def benchmarks(
    device: torch.device, ops: list[str] | None = None, peers: Path | None = None
) -> list[Benchmark]:
    """The benchmarks of some ops, or of all; `peers` is a folder with other libraries' kernels."""
    chosen = ops or list(SUITES)
    for name in chosen:
        if name not in SUITES:
            raise ConfigError(f"expected an op, one of {', '.join(SUITES)}; got {name!r}")
    return [benchmark for name in chosen for benchmark in SUITES[name](device, peers)]
