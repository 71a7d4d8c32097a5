"""Reads and compares answers of mathematics with math-verify, in a process that can be killed.

math-verify stops what takes too long by a signal, which reaches neither other threads nor the
inside of a product of huge numbers: `9**9**9` would hold up the evaluation for ever.
"""

import contextlib
import importlib.metadata
import json
import subprocess
import sys
import threading
from pathlib import Path

from octavo.errors import UnsupportedError
from octavo.extras import install_command, need
from octavo.measure.evaluate import math_worker

START_S, LIMIT_S = 120.0, 30.0


class MathJudge:
    """Tells what a text answers, and whether that is the true answer. For many threads.

    limit_s: an answer that takes longer cannot be read.
    """

    num_workers = 1

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        need("judging answers of mathematics", "math_verify")
        self.name = f"math-verify {importlib.metadata.version('math-verify')}"
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def judge(self, text: str, true: str) -> tuple[str | None, bool]:
        """The answer that a text ends up with, None if none can be read, and whether it is right.

        An answer that needs too much time or memory cannot be read.
        """
        with self._lock:
            self._process = self._process or self._start()
            told = _ask(self._process, json.dumps([text, true]), self._limit_s)
            if told is None:
                _end(self._process)
                self._process = None
        return told or (None, False)

    def close(self) -> None:
        """End the process; the next answer starts another one."""
        with self._lock:
            if self._process is not None:
                _end(self._process)
            self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        # -P: the script's folder has a requests.py, which must not stand in for the package.
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(math_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        problem, is_ready = _ask(process, None, START_S) or ("no answer", False)
        if not is_ready:
            _end(process)
            raise UnsupportedError(
                f"expected math-verify to start, got {problem}: {install_command('math')}"
            )
        return process


def _ask(
    process: "subprocess.Popen[str]", line: str | None, limit_s: float
) -> tuple[str | None, bool] | None:
    """The process's next answer, to this line if there is one; None if it ended without any."""
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        if line is not None:
            print(line, file=process.stdin, flush=True)
        told = process.stdout.readline()
    except BrokenPipeError:
        told = ""
    finally:
        timer.cancel()
    if not told:
        return None
    found, is_right = json.loads(told)
    return found, is_right


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
