"""Programs that a model has written, each run in a sandbox: no network, and limits on all else.

Linux alone has what this needs: namespaces of users and of the network. Where they are not to be
had, as in many containers, nothing runs.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.errors import UnsupportedError
from octavo.measure.evaluate import code_launcher

CONNECT = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2)
    print("connected")
except OSError:
    print("cut off")
"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one program. cpu_s and memory_bytes: of each of its processes; disk_bytes: of all files.

    output_bytes: of a file, and of what it prints. wall_s: a busy machine gives it its time late.
    """

    cpu_s: int = 6
    wall_s: float = 20.0
    memory_bytes: int = 2 * 2**30
    output_bytes: int = 16 * 2**20
    disk_bytes: int = 64 * 2**20
    num_processes: int = 8


@dataclass(frozen=True)
class Ended:
    """What a program printed, and how it ended: its exit code, None if its time was up."""

    output: bytes
    exit_code: int | None


def run_program(program: str, given: str = "", limits: Limits | None = None) -> Ended:
    """Run a program of Python on the input `given`; UnsupportedError where that is unsafe."""
    own = Limits() if limits is None else limits
    with tempfile.TemporaryDirectory(prefix="octavo-code-") as name:
        folder = Path(name)
        (folder / "work").mkdir()
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "input").write_text(given, encoding="utf-8", errors="replace")
        with open(folder / "input", "rb") as source, open(folder / "output", "wb+") as target:
            exit_code = _run(folder, source.fileno(), target.fileno(), own)
            target.seek(0)
            return Ended(target.read(own.output_bytes), exit_code)


def _run(folder: Path, source: int, target: int, limits: Limits) -> int | None:
    numbers = json.dumps(asdict(limits))
    process = subprocess.Popen(
        # Without site-packages: nothing is imported on the way to the program.
        [sys.executable, "-I", "-S", code_launcher.__file__, str(folder / "work")]
        + [str(folder / "program.py"), numbers],
        stdin=source,
        stdout=target,
        stderr=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    try:
        _, problem = process.communicate(timeout=limits.wall_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The launcher and the first process of its namespace are a group; all else ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode == code_launcher.FAILED and problem:
        raise UnsupportedError(
            "programs that a model writes run only where their network can be cut off, by Linux "
            f"namespaces that this user may make; got {problem.decode(errors='replace').strip()}. "
            "In a container this takes --security-opt seccomp=unconfined or a virtual machine"
        )
    return process.returncode


def check_sandbox() -> None:
    """UnsupportedError unless a program here is without network, though the machine has one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = run_program(CONNECT.format(port=server.getsockname()[1]))
    if ended.output.strip() != b"cut off":
        raise UnsupportedError(
            "expected a sandbox that cuts off the network, got one where a program "
            f"{'could connect' if ended.output else f'ended with {ended.exit_code}'}"
        )
