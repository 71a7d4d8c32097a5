"""What this machine can do at best, measured: reading memory, and multiplying matrices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.internals import internals
from octavo.measure.bench.timing import sample_graph_ms, sample_ms
from octavo.measure.records import timing

with internals("torch"):
    from torch import _scaled_mm


@dataclass(frozen=True)
class Ceilings:
    """The fastest rates seen on this machine; FP8's is None where it has no FP8 products."""

    gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None = None

    def percent(self, operands: str, tflops: float | None, gb_per_s: float | None) -> float:
        """How much of the nearer ceiling a speed reaches."""
        peak = self.fp8_tflops if operands.startswith("FP8") and self.fp8_tflops else None
        of_products = (tflops or 0.0) / (peak or self.bf16_tflops)
        return 100 * max(of_products, (gb_per_s or 0.0) / self.gb_per_s)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Sum a large tensor, and multiply large matrices with torch."""
    is_gpu = device.type == "cuda"
    size, num_values = (8192, 2**30) if is_gpu else (512, 2**24)
    x = torch.zeros(num_values // 8, dtype=torch.int64, device=device)
    gb_per_s = num_values / 1e6 / _median_ms(x.sum, device)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    flops = 2.0 * size**3 / 1e9
    bf16_tflops = flops / _median_ms(partial(torch.mm, a, b), device)
    fp8_tflops = None
    if is_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        fp8_tflops = flops / _median_ms(_fp8_product(a, b), device)
    return Ceilings(gb_per_s, bf16_tflops, fp8_tflops)


def _fp8_product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    one = torch.ones((), device=a.device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return partial(_scaled_mm, a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    samples = sample_graph_ms([call]) if device.type == "cuda" else sample_ms(call, device)
    return timing(samples)["median_ms"]
