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
ROWS, COLUMNS = 16, 16


def tensor_core(a: Tensor, b: Tensor) -> Tensor:
    """a · bᵀ, all of K in the tensor core's accumulator."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)


def two_level(a: Tensor, b: Tensor) -> Tensor:
    """a · bᵀ, each tile of K in the tensor core's accumulator and added in float32."""
    tiles = zip(a.split(TILE, dim=1), b.split(TILE, dim=1), strict=True)
    return torch.stack([tensor_core(x.contiguous(), y.contiguous()) for x, y in tiles]).sum(0)


def measure(length: int, machine: Machine, command: str) -> Measurement:
    """One record: the errors of both ways to accumulate, and of the model."""
    p = torch.rand(ROWS, length, device="cuda").to(torch.float8_e4m3fn)
    v = (1 + torch.randn(COLUMNS, length, device="cuda")).to(torch.float8_e4m3fn)
    truth = p.double() @ v.double().t()
    hardware = tensor_core(p, v)
    model = HOPPER_FP8.matmul(p.cpu(), v.cpu())
    return Measurement(
        op="accumulation",
        impl="torch",
        case={"keys": length, "rows": ROWS, "columns": COLUMNS},
        values={
            "one_level_relative_rms": relative_rms(hardware, truth),
            "two_level_relative_rms": relative_rms(two_level(p, v), truth),
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
    command = f"python scripts/measure_accumulator.py {path}"
    for length in LENGTHS:
        record = measure(length, machine, command)
        store.append(path, [record])
        print(length, dict(record.values))


if __name__ == "__main__":
    main()
