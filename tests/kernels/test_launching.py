"""Every kernel is compiled and launched for GPUs that are not here, by the installed Triton.

`make test-slow` runs this with the Triton of the other tests and with the newest one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("launching.py")
# How many of the 27 calls launch a kernel at least. On sm_80 the reference runs FP8;
# elsewhere two large products are torch's own.
NUM_LAUNCHING = {80: 8, 89: 25, 90: 25, 100: 25}
# Function calls of a playback, Python's and C's: at most so many, for each launch, and for each of
# TMA's descriptors, which Triton makes anew; 3.9 takes a few more than 3.6. Times would vary.
MAX_CALLS = (90, 30, 16)
# And how many are played from a tape when they repeat: not the reference.
NUM_PLAYED = {80: 8, 89: 25, 90: 27, 100: 25}


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_every_kernel_is_compiled_launched_and_played(capability, tmp_path):
    """What a playback launches is what Triton was given before, with the same tensors."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    # Triton 3.9 warns of launches that leave its default of fused products to it.
    no_default = ["-W", "error:TRITON_DEFAULT_FP_FUSION:UserWarning"]
    command = [sys.executable, *no_default, str(PROGRAM), str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    *rows, last = [json.loads(line) for line in result.stdout.splitlines()]
    for row in rows:
        assert "error" not in row, f"{row['name']}: {row['error']}"
        first, *others = row["launches"]
        assert others == [first] * 2, row["name"]
        if capability == 90:
            num_described = sum(str(x).count("tensor map") for given in first for x in given)
            most = MAX_CALLS[0] + MAX_CALLS[1] * len(first) + MAX_CALLS[2] * num_described
            assert row["function_calls"] <= most, row["name"]
    assert last["playbacks"] >= NUM_PLAYED[capability], last
    assert sum(bool(row["launches"][0]) for row in rows) >= NUM_LAUNCHING[capability]
