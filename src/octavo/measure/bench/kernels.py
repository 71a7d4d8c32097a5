"""All benchmarks of `octavo bench kernels`, by op."""

from collections.abc import Callable
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.measure.bench import (
    append_kv,
    attention,
    decode,
    encoder_attention,
    linear_gelu,
    matvec,
    packed_attention,
    quantize,
    quantize_qkv,
    scaled_mm,
)
from octavo.measure.bench.benchmark import Benchmark

Suite = Callable[[torch.device, Path | None], list[Benchmark]]
SUITES: dict[str, Suite] = {
    "append_kv": append_kv.benchmarks,
    "attention": attention.benchmarks,
    "decode_attention": decode.benchmarks,
    "encoder_attention": encoder_attention.benchmarks,
    "linear_gelu": linear_gelu.benchmarks,
    "matvec": matvec.benchmarks,
    "packed_attention": packed_attention.benchmarks,
    "quantize": quantize.benchmarks,
    "quantize_qkv": quantize_qkv.benchmarks,
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
