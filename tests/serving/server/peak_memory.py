"""How much memory this process takes at most while something runs."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 2**20


@dataclass
class Growth:
    """What the peak of resident memory was above its beginning, in MiB."""

    mib: float = 0.0


def _peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def growth():
    """Filled in at the end; skips where the kernel keeps no peak that can be started anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"no peak of resident memory here: {error}")
    found, before = Growth(), _peak_bytes()
    yield found
    found.mib = (_peak_bytes() - before) / MIB
