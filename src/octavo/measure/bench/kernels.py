"""Each op with each of its implementations on this machine: error first, then time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import UnsupportedError
from octavo.kernels.device import describe
from octavo.measure.bench.timing import sample_ms
from octavo.measure.records import Machine, Measurement, Scalar, timing
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import relative_rms
from octavo.numerics.granularity import PerChannel, PerToken
from octavo.ops.select import impl_names
from octavo.reference.attention import attention as reference_attention


@dataclass(frozen=True)
class Benchmark:
    """One op at one size: how to call it, what it should give, and how much work it is.

    max_error: the relative RMS error against `truth` above which a time does not count.
    """

    op: str
    case: dict[str, Scalar]
    call: Callable[[str], Tensor]  # takes the name of an implementation
    truth: Callable[[], Tensor]
    max_error: float
    flops: float
    bytes: float


def benchmarks(device: torch.device) -> list[Benchmark]:
    """One benchmark for each op that has a single result, small enough for a CPU."""
    return [
        _quantize(device, rows=1024, columns=1024),
        _attention(device, torch.bfloat16, length=512, head_dim=128, max_error=0.01),
        _attention(device, torch.float8_e4m3fn, length=512, head_dim=128, max_error=0.07),
        _scaled_mm(device, rows=256, columns=1024, depth=1024),
    ]


def run_benchmarks(
    chosen: list[Benchmark], device: torch.device, command: str
) -> Iterator[Measurement]:
    """Every implementation that can run each benchmark; one that is wrong raises."""
    described = describe(device)
    machine = Machine.current(gpu=described.gpu, capability=described.capability)
    for benchmark in chosen:
        truth = benchmark.truth()
        for impl in impl_names(benchmark.op):
            try:
                result = benchmark.call(impl)
            except UnsupportedError:
                continue  # this implementation is for other machines
            error = relative_rms(result, truth)
            if not error <= benchmark.max_error:
                raise UnsupportedError(
                    f"{benchmark.op} with impl={impl!r} is wrong: expected a relative error of at "
                    f"most {benchmark.max_error}, got {error:.3g} for {benchmark.case}"
                )
            samples = sample_ms(lambda: benchmark.call(impl), device)  # noqa: B023  called here
            work = timing(samples, flops=benchmark.flops, bytes=benchmark.bytes)
            yield Measurement(
                op=benchmark.op,
                impl=impl,
                case=benchmark.case,
                values=work | {"relative_rms": error},
                machine=machine,
                command=command,
                baseline="float64",
            )


def _quantize(device: torch.device, *, rows: int, columns: int) -> Benchmark:
    x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    return Benchmark(
        op="quantize",
        case={"shape": f"{rows}x{columns}", "operands": "BF16 to FP8"},
        call=lambda impl: ops.quantize(x, PerToken(), impl=impl).dequantize(),
        truth=x.double,
        max_error=2**-4,
        flops=0,
        bytes=x.numel() * 3 + rows * 4,
    )


def _attention(
    device: torch.device, dtype: torch.dtype, *, length: int, head_dim: int, max_error: float
) -> Benchmark:
    spec, heads = AttentionSpec(causal=False), 8
    q, k, v = (torch.randn(1, length, heads, head_dim, device=device) for _ in range(3))

    def call(impl: str) -> Tensor:
        if dtype == torch.bfloat16:
            return ops.attention(q.to(dtype), k.to(dtype), v.to(dtype), spec, impl=impl)
        return ops.attention(fp8.q, fp8.k, fp8.v, spec, fp8.scales, impl=impl)

    fp8 = ops.quantize_qkv(q, k, v)
    width = torch.finfo(dtype).bits // 8
    return Benchmark(
        op="attention",
        case={
            "shape": f"1x{length}x{heads}x{head_dim}",
            "operands": "BF16" if width == 2 else "FP8",
        },
        call=call,
        truth=lambda: reference_attention(q, k, v, spec, compute=torch.float64)[0],
        max_error=max_error,
        flops=4.0 * length * length * heads * head_dim,
        bytes=q.numel() * (3 * width + 2),
    )


def _scaled_mm(device: torch.device, *, rows: int, columns: int, depth: int) -> Benchmark:
    a, b = torch.randn(rows, depth, device=device), torch.randn(columns, depth, device=device)
    a8, b8 = ops.quantize(a, PerToken()), ops.quantize(b, PerChannel())
    return Benchmark(
        op="scaled_mm",
        case={"shape": f"{rows}x{columns}x{depth}", "operands": "FP8"},
        call=lambda impl: ops.scaled_mm(a8, b8, impl=impl),
        truth=lambda: a.double() @ b.double().t(),
        max_error=0.06,
        flops=2.0 * rows * columns * depth,
        bytes=a.numel() + b.numel() + 2 * rows * columns,
    )
