"""Measure what an FP8 matrix instruction adds up, and whether octavo's model of it agrees.

Needs a Hopper GPU. For each K it multiplies weights P ≥ 0 by values V of mean 1, as attention does,
once with the tensor core's own accumulation (`torch._scaled_mm`, fast accumulation), once by the
model, and once in tiles of 128 that are added in float32. Appends one record for each K.

    python scripts/measure_accumulator.py results/accumulator_h200.jsonl
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.device import default_device
from octavo.measure import store
from octavo.measure.records import Machine, Measurement
from octavo.numerics.accumulator import HOPPER_FP8
from octavo.numerics.error import relative_rms

LENGTHS = (512, 2048, 8192, 32768, 131072)
TILE = 128
# Enough tiles to fill the GPU: for few of them cuBLAS splits K, and then no sum is one long one.
SIZE = 2048
CHECKED = 16  # rows and columns that are compared with the model and with float64


def tensor_core(a: Tensor, b: Tensor) -> Tensor:
    """a · bᵀ, all of K in the tensor core's accumulator."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)


def two_level(a: Tensor, b: Tensor) -> Tensor:
    """a · bᵀ, each tile of K in the tensor core's accumulator and added in float32."""
    total = torch.zeros(len(a), len(b), device=a.device)
    for x, y in zip(a.split(TILE, dim=1), b.split(TILE, dim=1), strict=True):
        total += tensor_core(x.contiguous(), y.contiguous())
    return total


def measure(length: int, machine: Machine, command: str) -> Measurement:
    """One record: the errors of both ways to accumulate, and of the model."""
    p = torch.rand(SIZE, length, device="cuda").to(torch.float8_e4m3fn)
    v = (1 + torch.randn(SIZE, length, device="cuda")).to(torch.float8_e4m3fn)
    hardware = tensor_core(p, v)[:CHECKED, :CHECKED]
    tiled = two_level(p, v)[:CHECKED, :CHECKED]
    p, v = p[:CHECKED], v[:CHECKED]
    truth = p.double() @ v.double().t()
    model = HOPPER_FP8.matmul(p.cpu(), v.cpu())
    return Measurement(
        op="accumulation",
        impl="torch",
        case={"keys": length, "size": SIZE},
        values={
            "one_level_relative_rms": relative_rms(hardware, truth),
            "two_level_relative_rms": relative_rms(tiled, truth),
            "num_results": hardware.numel(),
            "num_bits_differ": int((hardware.cpu() != model).sum()),
        },
        machine=machine,
        command=command,
        baseline="float64",
    )


def main() -> None:
    """Measure every length and append the records to the file named on the command line."""
    path = Path(sys.argv[1])
    device = default_device()
    if device.capability != (9, 0):
        sys.exit(f"expected a Hopper GPU (compute capability 9.0), got {device.name}")
    torch.manual_seed(0)
    machine = Machine.current(gpu=device.name, capability=device.capability)
    command = f"python scripts/measure_accumulator.py results/{path.name}"
    for length in LENGTHS:
        record = measure(length, machine, command)
        store.append(path, [record])
        print(length, dict(record.values))


if __name__ == "__main__":
    main()
