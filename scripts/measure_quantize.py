"""Time `quantize` per token as it is launched by default, after comparing its bits.

Needs a GPU on which the Triton kernels run. Inputs rotate through more than the L2 cache, and calls
are replayed in a CUDA graph, so that launching is not counted. Appends one record for each shape.

    python scripts/measure_quantize.py results/quantize_h200.jsonl
"""

import sys
from functools import partial
from pathlib import Path

import torch

from octavo import ops
from octavo.kernels.device import default_device
from octavo.measure import store
from octavo.measure.bench.timing import sample_graph_ms
from octavo.measure.records import Machine, Measurement, timing
from octavo.numerics.granularity import PerToken
from octavo.numerics.quantize import quantize

SHAPES = (
    (4096, 2048),
    (4096, 3072),
    (4096, 6144),
    (4096, 12288),
    (4608, 3072),
    (4608, 12288),
    (14040, 2048),
    (14040, 3072),
    (14040, 6144),
    (14040, 12288),
    (24480, 1152),
)
ROTATED_BYTES = 400e6


def measure(shape: tuple[int, int], machine: Machine, command: str) -> Measurement:
    """One record: the time per call, and beside it that of copying the input."""
    num_bytes = shape[0] * shape[1] * 3 + shape[0] * 4  # bf16 in, FP8 and scales out
    num_inputs = max(4, int(ROTATED_BYTES / num_bytes) + 1)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(num_inputs)]
    copies = [torch.empty_like(x) for x in inputs]
    expected, actual = quantize(inputs[0], PerToken()), ops.quantize(inputs[0], PerToken())
    bits = [x.view(torch.uint8) for x in (expected.data, actual.data)]
    if not (torch.equal(*bits) and torch.equal(expected.scale, actual.scale)):
        sys.exit(f"quantize of {shape} differs from the reference")
    samples = sample_graph_ms([partial(ops.quantize, x, PerToken()) for x in inputs])
    copied = sample_graph_ms([partial(y.copy_, x) for x, y in zip(inputs, copies, strict=True)])
    copy_gb_per_s = 4e-6 * shape[0] * shape[1] / timing(copied)["median_ms"]
    return Measurement(
        op="quantize",
        impl="triton",
        case={"rows": shape[0], "columns": shape[1], "granularity": "token"},
        values=timing(samples, bytes=num_bytes) | {"copy_gb_per_s": copy_gb_per_s},
        machine=machine,
        command=command,
    )


def main() -> None:
    """Measure every shape and append the records to the file named on the command line."""
    path, device = Path(sys.argv[1]), default_device()
    if device.capability is None:
        sys.exit(f"expected a CUDA GPU, got {device.name}")
    machine = Machine.current(gpu=device.name, capability=device.capability)
    command = f"python scripts/measure_quantize.py results/{path.name}"
    for shape in SHAPES:
        record = measure(shape, machine, command)
        store.append(path, [record])
        print(shape, f"{record.gb_per_s:.0f} GB/s", dict(record.values))


if __name__ == "__main__":
    main()
