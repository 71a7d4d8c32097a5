"""octavo bench sweep on a CPU, with tiny weights: run, killed, resumed."""

import shlex
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("transformers")
from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store
from octavo.measure.bench import engine
from octavo_testkit.fake_benchmarks import FakeBenchmarks

LATENCY = """
config = "tiny"
recipes = ["auto", "fp8"]
dtype = "float32"
layers = 1

[[latency]]
input_len = [5]
output_len = 2
num_iters = 1
num_iters_warmup = 0
"""
THROUGHPUT = """
[[throughput]]
num_prompts = 2
input_len = 8
output_len = 3
"""


def octavo(*arguments, command="sweep"):
    return run(make_app(COMMANDS), ["bench", command, *map(str, arguments)])


@pytest.fixture
def files(tmp_path):
    (tmp_path / "sweep.toml").write_text(LATENCY)
    return tmp_path / "sweep.toml", "-o", tmp_path / "records.jsonl"


def test_failed_measured_and_skipped(files, capsys, monkeypatch):
    benchmarks = FakeBenchmarks(monkeypatch)
    benchmarks.failing = {("latency", "fp8")}
    assert octavo(*files) == 1
    captured = capsys.readouterr()
    assert "error: latency, fp8, 5 in, 2 out, 1 at once: boom" in captured.err
    assert "measured" in captured.out and "failed" in captured.out
    benchmarks.failing = set()
    assert octavo(*files) == 0
    captured = capsys.readouterr()
    assert "skipped, its records are in" in captured.err and "latency, auto, 5 in" in captured.err
    assert [(r.case["row"], r.baseline) for r in store.read(files[2])] == [
        ("auto", None),
        ("fp8", "auto"),
    ]


@pytest.mark.slow
def test_a_recipe_that_is_wrong_fails_and_may_be_tried_again(files, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(engine.MAX_ERROR, "e4m3", 1e-9)
        patched.setitem(engine.TIMES_PLAIN, "e4m3", 0)
        assert octavo(*files) == 1
    assert "error: latency, fp8, 5 in, 2 out, 1 at once: fp8 is wrong" in capsys.readouterr().err
    assert octavo(*files) == 0
    plain, fp8 = store.read(files[2])
    assert (plain.case["row"], fp8.case["row"]) == ("auto", "fp8")
    assert fp8.baseline == "auto" and fp8.values["itl_speedup"] > 0


def test_a_dry_run_says_what_would_run(files, capsys):
    assert octavo(*files, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["would run"] * 2
    assert lines[0].startswith("would run: octavo bench latency --config tiny")
    assert not files[2].exists()


def test_help_teaches(capsys):
    assert octavo("--help") == 0
    text = capsys.readouterr().out
    for line in ("[engine]", "[[latency]]", "[[throughput]]", 'recipes = ["auto", "fp8"'):
        assert line in text


@pytest.mark.parametrize(
    ("text", "message"),
    [("recipe = []", "unknown key 'recipe': did you mean 'recipes'?"), ("x", "sweep.toml: ")],
)
def test_what_is_refused(files, capsys, text, message):
    files[0].write_text(text)
    assert octavo(*files) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_killed_and_resumed(files, capsys):
    """SIGKILL once the first combination has its records; what was there is not run again."""
    files[0].write_text(LATENCY.replace("num_iters = 1", "num_iters = 40") + THROUGHPUT)
    command = [sys.executable, "-m", "octavo", "bench", "sweep", *map(str, files)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (files[2].exists() and files[2].stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = store.read(files[2])
    assert 1 <= len(before) < 4
    assert octavo(*files) == 0
    assert capsys.readouterr().out.count("skipped") == len(before)
    records = store.read(files[2])
    assert records[: len(before)] == before
    assert [(r.op, r.case["row"]) for r in records] == [
        (op, row) for op in ("latency", "throughput") for row in ("auto", "fp8")
    ]
    assert [r.baseline for r in records] == [None, "auto", None, "auto"]


@pytest.mark.slow
def test_the_command_of_a_record_repeats_it(files, capsys):
    files[0].write_text(LATENCY + THROUGHPUT)
    assert octavo(*files) == 0
    again = files[2].with_name("again.jsonl")
    for record in store.read(files[2]):
        _, _, kind, *flags = shlex.split(record.command)
        again.unlink(missing_ok=True)
        assert octavo(*flags, "-o", again, command=kind) == 0
        found = store.read(again)[-1]
        assert (found.op, found.case) == (record.op, record.case)
        assert found.baseline == record.baseline
