"""`octavo serve` as a process of its own, for as long as a benchmark needs it."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octavo.errors import OctavoError

# Between two looks at whether the server is ready.
POLL_S = 0.2
# Until a server that was asked to end is killed; it gives open requests GRACE_S.
GRACE_S, KILL_S = 5, 20
# Of what a server that failed had to say.
MAX_LOG = 2000


@contextmanager
def own_server(arguments: Sequence[str], *, ready_s: float = 600.0) -> Iterator[str]:
    """The URL of a server with these arguments of `octavo serve`, which ends with the block.

    OctavoError with its last words if it ends before it is ready, or is not in ready_s seconds.
    """
    port = _free_port()
    command = [sys.executable, "-m", "octavo", "serve", *arguments]
    # Last, so that they are not what was asked for: the benchmark must find it.
    command += ["--host", "127.0.0.1", "--port", str(port), "--grace", str(GRACE_S)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            reason = _wait_until_ready(process, url, ready_s)
            if reason is not None:
                log.seek(0)
                words = log.read().decode(errors="replace")[-MAX_LOG:].strip()
                raise OctavoError(f"expected octavo serve to start, but {reason}: {words}")
            yield url
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, ready_s: float) -> str | None:
    """None once the server is healthy; else why it is not."""
    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"it ended with {process.returncode}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return None
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(POLL_S)
    return f"it was not ready in {ready_s:g} s"


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
