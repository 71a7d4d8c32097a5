"""Run the tests of each kernel and area on this machine's GPU, and record which code passed.

One record for each kernel or area (vision, kv, linear, diffusion, retrieval, engine) whose tests
all passed; exit code 1 if any failed. The tests run in as many processes as there are cores, up to
14 (areas: 10, for the memory of their models), if pytest-xdist is there: most of the time goes
into compiling. Tests of areas that are marked slow are left out.

    python scripts/test_on_gpu.py [KERNEL | AREA ...]

Records go to results/gpu_tests_<gpu>.jsonl. `make test-gpu` runs this and all other tests that need
a GPU.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from octavo.kernels.device import default_device
from octavo.kernels.tuning import file_name
from octavo.measure import store
from octavo.measure.bench import gpu_records
from octavo.measure.records import Machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
TESTS = ROOT / "tests"
NUM_PROCESSES, NUM_AREA_PROCESSES = 14, 10


def run_tests(name: str) -> tuple[bool, int]:
    """(whether all tests of a kernel or an area passed, how many did)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += map(str, gpu_records.tests_of(name, TESTS))
    num_processes = NUM_PROCESSES
    if name in gpu_records.AREAS:
        command += ["-m", "gpu and not slow"]
        num_processes = NUM_AREA_PROCESSES
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(num_processes, os.cpu_count() or 1))]
    if importlib.util.find_spec("pytest_benchmark"):
        command += ["-p", "no:benchmark"]  # it warns about xdist, and warnings are errors
    result = subprocess.run(command, capture_output=True, text=True)
    tail = result.stdout.strip().splitlines()
    print(name, tail[-1] if tail else result.stderr[-500:], flush=True)
    if result.returncode:
        print("\n".join(line[:300] for line in tail if line.startswith(("FAILED", "E "))))
    passed = re.search(r"(\d+) passed", result.stdout)
    num_passed = int(passed[1]) if passed else 0
    return result.returncode == 0 and num_passed > 0, num_passed


def main() -> None:
    """Test the kernels and areas named on the command line, or all of them."""
    known = [*gpu_records.kernel_names(), *gpu_records.AREAS]
    chosen, device = sys.argv[1:] or known, default_device()
    if unknown := set(chosen) - set(known):
        sys.exit(f"expected some of {', '.join(known)}; got {', '.join(sorted(unknown))}")
    if device.capability is None:
        sys.exit(f"expected a CUDA GPU, got {device.name}")
    path = RESULTS / f"gpu_tests_{Path(file_name(device)).stem}.jsonl"
    machine = Machine.current(gpu=device.name, capability=device.capability)
    command = "python scripts/test_on_gpu.py"
    failed = []
    for name in chosen:
        is_passed, num_passed = run_tests(name)
        if is_passed:
            record = gpu_records.passed_record(name, num_passed, machine, command)
            store.append(path, [record])
        else:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
