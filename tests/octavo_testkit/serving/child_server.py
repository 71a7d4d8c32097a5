"""A server in a process of its own."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])


GAUGES = (
    *("octavo_requests_open", "octavo_requests_running", "octavo_requests_waiting"),
    "octavo_pages_in_use",
)


class ChildServer:
    """A process of listen.py, its address, and what it has said."""

    def __init__(self, process, base_url, log_file):
        self.process, self.base_url = process, base_url
        self._log_file = log_file

    def memory(self):
        """Bytes of its memory, and the number of its objects, connections and tasks."""
        self.process.send_signal(signal.SIGUSR1)
        return json.loads(self.process.stdout.readline())

    def num_sockets(self):
        """How many of its file descriptors are sockets."""
        return sum(map(_is_socket, Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def log(self):
        """All that it wrote to stderr so far."""
        self._log_file.seek(0)
        return self._log_file.read()

    def request_lines(self):
        """The log's lines about requests that reached the engine."""
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in lines if "answer_id" in line]

    def wait_until_it_answers(self, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.base_url}/health", timeout=5):
                    return
            except urllib.error.URLError:
                assert self.process.poll() is None and time.monotonic() < deadline, self.log()
                time.sleep(0.05)

    def metrics(self):
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=5) as response:
            text = response.read().decode()
        found = re.findall(r"^(octavo\S+) (\S+)$", text, re.M)
        return {name: float(value) for name, value in found}

    def settled_metrics(self, timeout_s=20):
        """The metrics, once nothing is in use."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.metrics()
            in_use = {name: found[name] for name in GAUGES if found[name]}
            if not in_use:
                return found
            assert time.monotonic() < deadline, f"never given back: {in_use}"
            time.sleep(0.05)


def _is_socket(fd):
    try:
        return os.readlink(fd).startswith("socket:")
    except FileNotFoundError:  # closed since it was listed
        return False


@contextlib.contextmanager
def child_server(kind, grace_s=5.0, step_s=0.0, num_files=None, **settings):
    """A ChildServer that answers; killed at the end if it has not ended by then.

    num_files: how many it may open unless it asks for more.
    """
    settings["grace_s"] = grace_s
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [str(port), str(step_s), json.dumps(settings)]
    command = [sys.executable, "-m", "octavo_testkit.serving.listen", kind, *options]
    if num_files is not None:
        command = ["sh", "-c", f'ulimit -Sn {num_files}; exec "$@"', "sh", *command]
    # A file: nobody reads while a crowd is served, and a pipe would fill.
    with tempfile.TemporaryFile("w+") as log_file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
        )
        server = ChildServer(process, f"http://127.0.0.1:{port}", log_file)
        try:
            server.wait_until_it_answers()
            yield server
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
