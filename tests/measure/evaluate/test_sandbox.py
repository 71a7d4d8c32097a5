"""Programs in the sandbox: planted bad ones end within their limits, and the network is cut off."""

import socket
import subprocess
import tempfile
import time

import pytest

pytest.importorskip("transformers")

from octavo.errors import UnsupportedError
from octavo.measure.evaluate import sandbox
from octavo.measure.evaluate.code_data import Problem, generated_problems
from octavo.measure.evaluate.code_judge import CodeJudge, is_same_output, read_code
from octavo.measure.evaluate.sandbox import Limits, check_sandbox, run_program

LIMITS = Limits(cpu_s=1, wall_s=6.0, memory_bytes=2**29, output_bytes=2**20, disk_bytes=2**22)
FORKS = """
import os, time
n = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
        n += 1
    except OSError:
        break
print(n < 8)
"""
ENDLESS_FORKS = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
ESCAPES = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(12345)
print("parent")
"""
FILLS = """
number = 0
try:
    while True:
        with open(f"file{number}", "wb") as file:
            file.write(bytes(2**19))
        number += 1
except OSError as error:
    print(number, error.strerror)
"""
WRITES = """
import os
for place in ("/tmp", "/dev/shm", "/var/tmp", "/etc", os.path.expanduser("~root"), {here!r}):
    try:
        open(os.path.join(place, "octavo-was-here"), "w")
        print("wrote", place)
    except OSError:
        pass
print(sorted(os.environ), os.getuid() != 0)
"""
SENDS = """
import socket
ways = (socket.SOCK_DGRAM, ("8.8.8.8", 53)), (socket.SOCK_STREAM, ("127.0.0.1", {port}))
for kind, address in ways:
    try:
        made = socket.socket(socket.AF_INET, kind)
        made.settimeout(2)
        made.connect(address)
        made.send(b"x")
        print("sent")
    except OSError:
        pass
"""


def can_cut_off() -> bool:
    try:
        check_sandbox()
    except UnsupportedError:
        return False
    return True


def processes() -> str:
    """The command lines of all processes."""
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


needs_namespaces = pytest.mark.skipif(
    not can_cut_off(), reason="no namespaces for this user: programs are refused here"
)


@needs_namespaces
def test_a_program_reads_and_prints():
    ended = run_program("print(input()[::-1], end='')", "abc\n", LIMITS)
    assert (ended.output, ended.exit_code) == (b"cba", 0)
    assert run_program("import sys; sys.exit(125)", "", LIMITS).exit_code == 125


@needs_namespaces
@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("while True: pass", b""),
        pytest.param("import time; time.sleep(1000)", b"", marks=pytest.mark.slow),
        ("x = bytearray(2**30); print('got it')", b""),
        (FORKS, b"True\n"),
        (ENDLESS_FORKS, b""),
        (ESCAPES, b"parent\n"),
        (FILLS, b"8 No space left on device\n"),
    ],
    ids=["loop", "sleep", "memory", "forks", "fork bomb", "escape", "files"],
)
def test_a_bad_program_ends_within_its_limits(program, printed, monkeypatch):
    folders = []  # other tests run programs at the same time

    class Noted(tempfile.TemporaryDirectory):
        def __init__(self, **options):
            super().__init__(**options)
            folders.append(self.name)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Noted)
    begun = time.monotonic()
    ended = run_program(program, "", LIMITS)
    assert time.monotonic() - begun < LIMITS.wall_s + 6
    assert ended.output == printed
    (folder,) = folders
    while folder in processes():  # killed ones end when they are next scheduled
        assert time.monotonic() - begun < LIMITS.wall_s + 26
        time.sleep(0.1)


@needs_namespaces
def test_a_flood_of_output_is_cut():
    ended = run_program("while True: print('x' * 10_000)", "", LIMITS)
    assert len(ended.output) <= LIMITS.output_bytes and ended.exit_code != 0


@needs_namespaces
def test_files_of_the_machine_are_read_only_and_the_environment_is_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    ended = run_program(WRITES.format(here=str(tmp_path)), "", LIMITS)
    assert b"wrote" not in ended.output and b"SECRET" not in ended.output
    assert ended.output.endswith(b"True\n") and list(tmp_path.iterdir()) == []


@needs_namespaces
def test_the_network_is_cut_off():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = run_program(SENDS.format(port=port), "", LIMITS)
        assert (ended.output, ended.exit_code) == (b"", 0)


def test_a_machine_that_cannot_cut_it_off_runs_nothing(monkeypatch, tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import sys; print('unshare: not permitted', file=sys.stderr); sys.exit(125)"
    )
    monkeypatch.setattr(sandbox.code_launcher, "__file__", str(launcher))
    with pytest.raises(UnsupportedError, match="got unshare: not permitted. In a container"):
        CodeJudge([])


def test_a_sandbox_with_network_is_refused(monkeypatch, tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import runpy, sys; runpy.run_path(sys.argv[2])")
    monkeypatch.setattr(sandbox.code_launcher, "__file__", str(launcher))
    with pytest.raises(UnsupportedError, match="a program could connect"):
        check_sandbox()


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        (" 1 2 \n3", "1 2\n3\n\n", True),
        ("1.0 2", "1 2", True),
        ("YES", "yes", False),
        ("1\n2\n3", "1\n2", False),
        ("1 2", "1", False),
        ("", "1", False),
        ("", "", True),
        ("0.1", "0.10000001", False),
    ],
)
def test_output_is_compared_as_in_the_benchmark(printed, expected, is_same):
    assert is_same_output(printed, expected) == is_same


def test_the_last_block_is_the_program():
    text = "First:\n```python\nx = 1\n```\nBetter:\n```py\nx = 2\n```\nDone."
    assert read_code(text) == "x = 2\n"
    for none in ("print(1)", "```python\n```", "```python\nprint(1)"):
        assert read_code(none) is None


@pytest.fixture(scope="module")
def judge():
    return CodeJudge(generated_problems(2), LIMITS)


def solution(problem: Problem, change: str = "") -> str:
    words = problem.text.split("times ")[1]
    factor, more = words.split(", plus ")[0], words.split("plus ")[1].rstrip(".")
    if problem.function:
        body = f"        return {factor} * sum(numbers) + {more}{change}"
        return f"```python\n{problem.starter}\n{body}\n```"
    body = f"print({factor} * sum(map(int, input().split())) + {more}{change})"
    return f"Thus:\n```python\nn = int(input())\n{body}\n```"


@needs_namespaces
def test_programs_are_right_if_they_pass_all_tests(judge):
    reads, calls = generated_problems(2)
    for problem in (reads, calls):
        code, is_right = judge.judge(solution(problem), problem.name)
        assert is_right and code is not None and "sum(" in code
        assert not judge.judge(solution(problem, " + 1"), problem.name)[1]
        assert not judge.judge("```python\nraise SystemExit\n```", problem.name)[1]
        assert judge.judge("I cannot.", problem.name) == (None, False)
    # What a function prints is not its result, and List is imported.
    noisy = solution(calls).replace("        return", "        print('noise')\n        return")
    assert judge.judge(noisy, calls.name)[1]
    assert not judge.judge("```python\nimport os; os._exit(0)\n```", calls.name)[1]
    assert judge.name.startswith("sandbox, 1 s a test, Python 3")
