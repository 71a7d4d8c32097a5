"""`make test` runs all of its stages, and says at the end which of them failed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def run_make(target, folder, *, fails=""):
    """`make target` with tools that only note their calls; the one named `fails` fails."""
    tools, log = folder / "bin", folder / "calls"
    tools.mkdir()
    for name in ("pip", "python", "ruff", "mypy", "pytest"):
        code = 1 if name == fails else 0
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\nexit {code}\n')
        (tools / name).chmod(0o755)
    for ready in (".ready", ".demo-ready", ".slow-ready"):
        (folder / ready).touch()
    # make would hand its own flags and targets to a make below it
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    result = subprocess.run(
        ["make", target, f"VENV={folder}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    return result, log.read_text().splitlines()


def test_stages_behind_a_failed_one_run(tmp_path):
    result, calls = run_make("test", tmp_path, fails="ruff")
    tools = [call.split()[0] for call in calls]
    assert tools == ["ruff", "mypy", "pytest", "pytest", "pytest"]
    assert result.returncode != 0
    assert "failed: lint" in result.stdout.splitlines()


def test_every_failed_stage_is_named(tmp_path):
    result, calls = run_make("test", tmp_path, fails="pytest")
    assert len(calls) == 6
    assert result.returncode != 0
    assert "failed: test-covered test-others test-kernels" in result.stdout.splitlines()


def test_without_failures_make_succeeds(tmp_path):
    result, _ = run_make("test", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "passed: lint types test-covered test-others test-kernels" in result.stdout


def test_slow_tests_run_with_the_newest_triton_too_and_some_of_them_alone(tmp_path):
    result, calls = run_make("test-slow", tmp_path, fails="pytest")
    assert result.returncode != 0
    assert sum("test_launching.py" in call for call in calls) == 1
    assert sum(call.startswith("pytest") for call in calls) == 4
    (alone,) = (call for call in calls if "slow and alone" in call)
    assert "-n " not in alone
    assert sum("not alone" in call for call in calls) == 3
