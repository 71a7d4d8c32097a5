"""Time `scaled_mm` as it is selected, and the Triton kernel itself, beside torch._scaled_mm.

Needs a GPU with FP8 matrix products. Every call is compared with float64 before it is timed, some
rows of it where there are many. Inputs rotate through more than the L2 cache, and calls are
replayed in a CUDA graph, so that launching is not counted. Appends one record for each way to run a
shape; "quantized in front" includes the quantization of the activations.

    python scripts/measure_scaled_mm.py results/scaled_mm_h200.jsonl
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.kernels.device import default_device
from octavo.kernels.scaled_mm.config import MatmulShape, work
from octavo.measure import store
from octavo.measure.bench.timing import sample_graph_ms
from octavo.measure.records import Machine, Measurement, timing
from octavo.numerics.error import relative_rms
from octavo.numerics.granularity import PerChannel, PerTensor, PerToken
from octavo.numerics.quantize import Quantized, quantize
from octavo.reference import gemm

WIDTHS = (2048, 3072, 6144, 12288)  # of diffusion transformers
LARGE = (
    (8192, 8192, 8192),
    *((rows, n, k) for rows in (4096, 14040) for n in WIDTHS for k in WIDTHS),
    (4608, 12288, 3072),
    (4608, 3072, 12288),
)
FEW_ROWS = (1, 4, 16)
LLAMA = ((6144, 4096), (28672, 4096), (4096, 14336))  # Llama-3.1-8B: columns, depth
ROTATED_BYTES = 300e6
CHECKED_ROWS = 32
# A result in bfloat16 is within 2^-9 of its value; the RMS of that is smaller.
MAX_ERROR = 2.0**-8


@dataclass(frozen=True)
class Operands:
    """One activation and one weight, in every form that is timed."""

    plain: Tensor
    per_row: tuple[Quantized, Quantized]
    per_tensor: tuple[Quantized, Quantized]
    bias: Tensor


Call = Callable[[Operands], Tensor]


def draw(rows: int, columns: int, depth: int) -> Operands:
    """Normal values."""
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
    return Operands(
        plain=x,
        per_row=(ops.quantize(x, PerToken()), ops.quantize(weight, PerChannel())),
        per_tensor=(ops.quantize(x, PerTensor()), ops.quantize(weight, PerTensor())),
        bias=torch.randn(columns, device="cuda", dtype=torch.bfloat16),
    )


def raw(a: Quantized, b: Quantized, bias: Tensor | None) -> Tensor:
    """torch._scaled_mm as it is called without octavo."""
    a_scale, b_scale = a.scale, b.scale
    if a_scale.dim():
        a_scale, b_scale = a_scale.unsqueeze(1), b_scale.unsqueeze(0)
    return torch._scaled_mm(
        a.data, b.data.t(), a_scale, b_scale, bias=bias, out_dtype=torch.bfloat16
    )


def truth(inputs: Operands, granularity: str, has_bias: bool, rows: Tensor) -> Tensor:
    """Some rows of the product in float64."""
    bias = inputs.bias if has_bias else None
    a: Quantized | Tensor = inputs.plain[rows]
    weight = inputs.per_row[1]
    if granularity == "token":
        a = quantize(inputs.plain[rows], PerToken())
    elif granularity == "tensor":
        whole, weight = inputs.per_tensor
        a = Quantized(whole.data[rows], whole.scale, PerTensor())
    return gemm.scaled_mm(a, weight, bias, compute=torch.float64)


# Name of the implementation, granularity of the activation, bias, quantized in front, the call.
Way = tuple[str, str, bool, bool, Call]

RAW_TENSOR: Way = ("torch._scaled_mm", "tensor", False, False, lambda x: raw(*x.per_tensor, None))
MANY_ROWS: tuple[Way, ...] = (
    RAW_TENSOR,
    ("torch._scaled_mm", "tensor", True, False, lambda x: raw(*x.per_tensor, x.bias)),
    ("selected", "tensor", False, False, lambda x: ops.scaled_mm(*x.per_tensor)),
    ("selected", "tensor", True, False, lambda x: ops.scaled_mm(*x.per_tensor, x.bias)),
    ("selected", "token", True, False, lambda x: ops.scaled_mm(*x.per_row, x.bias)),
    ("triton", "token", True, False, lambda x: ops.scaled_mm(*x.per_row, x.bias, impl="triton")),
)
ONE_TO_16_ROWS: tuple[Way, ...] = (
    RAW_TENSOR,
    ("torch._scaled_mm", "token", False, False, lambda x: raw(*x.per_row, None)),
    ("selected", "tensor", False, False, lambda x: ops.scaled_mm(*x.per_tensor)),
    ("selected", "token", False, False, lambda x: ops.scaled_mm(*x.per_row)),
    (
        "selected",
        "token",
        False,
        True,
        lambda x: ops.scaled_mm(x.plain, x.per_row[1], activation=PerToken()),
    ),
    ("selected", "none", False, False, lambda x: ops.scaled_mm(x.plain, x.per_row[1])),
)


def measure(
    shape: MatmulShape, ways: tuple[Way, ...], machine: Machine, command: str
) -> list[Measurement]:
    """One record for each way to run a shape."""
    _, num_bytes = work(shape, a_bytes=1, out_bytes=2)
    count = max(2, int(ROTATED_BYTES / num_bytes) + 1)
    inputs = [draw(shape.rows, shape.columns, shape.depth) for _ in range(count)]
    rows = torch.randperm(shape.rows, device="cuda")[:CHECKED_ROWS]
    records = []
    for impl, granularity, has_bias, is_quantized, call in ways:
        expected = truth(inputs[0], granularity, has_bias, rows)
        error = relative_rms(call(inputs[0])[rows], expected)
        if not error <= MAX_ERROR:
            sys.exit(f"{impl} per {granularity} of {shape} has a relative error of {error:.3g}")
        samples = sample_graph_ms([partial(call, x) for x in inputs])
        flops, num_bytes = work(shape, a_bytes=2 if granularity == "none" else 1, out_bytes=2)
        record = Measurement(
            op="scaled_mm",
            impl=impl,
            case={
                "rows": shape.rows,
                "columns": shape.columns,
                "depth": shape.depth,
                "activation": granularity,
                "bias": has_bias,
                "quantized_in_front": is_quantized,
            },
            values=timing(samples, flops=flops, bytes=num_bytes) | {"relative_rms": error},
            machine=machine,
            command=command,
            baseline="float64",
        )
        records.append(record)
    return records


def describe(records: list[Measurement]) -> str:
    """Microseconds of each record, in order."""
    return " ".join(f"{1e3 * record.values['median_ms']:.2f}" for record in records)


def main() -> None:
    """Measure every shape and append the records to the file named on the command line."""
    path, device = Path(sys.argv[1]), default_device()
    if device.capability is None:
        sys.exit(f"expected a CUDA GPU, got {device.name}")
    torch.manual_seed(0)
    machine = Machine.current(gpu=device.name, capability=device.capability)
    command = f"python scripts/measure_scaled_mm.py results/{path.name}"
    jobs = [(MatmulShape(*sizes), MANY_ROWS) for sizes in LARGE]
    jobs += [(MatmulShape(m, *sizes), ONE_TO_16_ROWS) for sizes in LLAMA for m in FEW_ROWS]
    for shape, ways in jobs:
        records = measure(shape, ways, machine, command)
        store.append(path, records)
        print(shape, "µs:", describe(records), flush=True)


if __name__ == "__main__":
    main()
