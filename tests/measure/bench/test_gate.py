"""Kernels and the GPU tests that saw them."""

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.bench import gate
from octavo.measure.records import Machine

TESTS = Path(__file__).parents[2] / "kernels"
MACHINE = Machine.current(gpu="GPU", capability=(9, 0))


def test_every_kernel_has_tests():
    for kernel in gate.kernel_names():
        names = [path.name for path in gate.tests_of(kernel, TESTS)]
        assert f"test_{kernel}.py" in names
    assert "test_quantize_qkv.py" not in [path.name for path in gate.tests_of("quantize", TESTS)]


def test_every_test_of_a_kernel_runs_on_a_gpu():
    run = {path for kernel in gate.kernel_names() for path in gate.tests_of(kernel, TESTS)}
    compiled = set(TESTS.glob("test_*_compiled.py"))
    touch_none = ("device", "launch", "launching", "tuning")
    others = {TESTS / f"test_{name}.py" for name in touch_none}
    assert run | compiled | others == set(TESTS.glob("test_*.py"))


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    (folder / "add").mkdir(parents=True)
    (folder / "primitives.py").write_text("x = 1\n")
    (folder / "add" / "config.py").write_text("from octavo.kernels.primitives import x\n")
    (folder / "tuned").mkdir()
    (folder / "add" / "triton.py").write_text(
        "b = 2  # why\n\n\ndef f():\n    return '# no comment'\n"
    )
    monkeypatch.setattr(gate, "KERNELS", folder)
    return folder


@pytest.mark.parametrize(
    ("file", "content", "is_same"),
    [
        ("add/triton.py", "# more\nb = 2\ndef f():\n    return '# no comment'\n", True),
        ("add/triton.py", "b = 2\ndef f():\n    return '# another'\n", False),
        (
            "add/triton.py",
            '"""A\nb."""\nb = 2\n\ndef f():\n    """C\n\n    d."""\n    return \'# no comment\'\n',
            True,
        ),
        ("add/triton.py", "b = 2\ndef f():\n    'a'.x\n    return '# no comment'\n", False),
        ("add/triton.py", "b = 3\ndef f():\n    return '# no comment'\n", False),
        ("add/config.py", "x = 2\n", False),
        ("primitives.py", "x = 2\n", False),
        ("device.py", "y = 1\n", True),  # which nothing here imports
        ("tuned/gpu.json", '{"add": {"long": {"num_warps": 2}}}', False),
        ("tuned/gpu.json", '{"sub": {"long": {"num_warps": 2}}}', True),
    ],
)
def test_only_code_counts(kernels, file, content, is_same):
    record = gate.passed_record("add", 7, MACHINE, "pytest")
    assert record.values["num_passed"] == 7
    assert gate.untested([record]) == {}
    (kernels / file).write_text(content)
    missing = gate.untested([record])
    assert missing == ({} if is_same else {"add": missing.get("add")})
    if not is_same:
        assert missing["add"].startswith("changed after its last GPU test")


def test_a_kernel_changes_with_those_it_runs():
    behind = {path.parent.name for path in gate._files_behind("prefill")}
    assert {"prefill", "attention", "kernels"} <= behind
    assert "quantize" in {path.parent.name for path in gate._files_behind("scaled_mm")}


def test_a_kernel_without_any_record(kernels):
    assert gate.untested([])["add"].startswith("never tested")


def test_a_kernel_that_does_not_exist(kernels):
    with pytest.raises(ConfigError, match="one of add; got 'sub'"):
        gate.code_hash("sub")


def test_every_kernel_was_tested_on_a_gpu_as_it_is():
    records = [
        record
        for path in (TESTS.parents[1] / "results").glob("gpu_tests_*.jsonl")
        for record in store.read(path)
    ]
    assert gate.untested(records) == {}
