"""Run the tests of each kernel on this machine's GPU, and record which code passed.

One record for each kernel whose tests all passed; exit code 1 if any failed. The tests run in as
many processes as there are cores, up to 14, if pytest-xdist is there: most of the time goes into
compiling.

    python scripts/test_on_gpu.py [KERNEL ...]

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
from octavo.measure.bench.gate import kernel_names, passed_record, tests_of
from octavo.measure.records import Machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
TESTS = ROOT / "tests" / "kernels"


def run_tests(kernel: str) -> tuple[bool, int]:
    """(whether all passed, how many did)."""
    files = map(str, tests_of(kernel, TESTS))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(14, os.cpu_count() or 1))]
    if importlib.util.find_spec("pytest_benchmark"):
        command += ["-p", "no:benchmark"]  # it warns about xdist, and warnings are errors
    result = subprocess.run(command, capture_output=True, text=True)
    tail = result.stdout.strip().splitlines()
    print(kernel, tail[-1] if tail else result.stderr[-500:], flush=True)
    if result.returncode:
        print("\n".join(line[:300] for line in tail if line.startswith(("FAILED", "E "))))
    passed = re.search(r"(\d+) passed", result.stdout)
    num_passed = int(passed[1]) if passed else 0
    return result.returncode == 0 and num_passed > 0, num_passed


def main() -> None:
    """Test the kernels named on the command line, or all of them."""
    chosen, device = sys.argv[1:] or kernel_names(), default_device()
    if device.capability is None:
        sys.exit(f"expected a CUDA GPU, got {device.name}")
    path = RESULTS / f"gpu_tests_{Path(file_name(device)).stem}.jsonl"
    machine = Machine.current(gpu=device.name, capability=device.capability)
    command = "python scripts/test_on_gpu.py"
    failed = []
    for kernel in chosen:
        is_passed, num_passed = run_tests(kernel)
        if is_passed:
            store.append(path, [passed_record(kernel, num_passed, machine, command)])
        else:
            failed.append(kernel)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
