"""Kernels and areas beside them, and the GPU tests that saw them."""

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.bench import gpu_records
from octavo.measure.records import Machine

TESTS = Path(__file__).parents[2]
MACHINE = Machine.current(gpu="GPU", capability=(9, 0))


@pytest.mark.parametrize("area", gpu_records.AREAS)
def test_every_area_has_sources_and_tests(area):
    assert len(gpu_records.sources_of(area)) >= 2
    assert gpu_records.tests_of(area, TESTS)


def test_every_gpu_test_of_models_and_serving_is_in_an_area():
    expected = {
        path
        for folder in ("cache", "demo", "integrations", "layers", "serving")
        for path in (TESTS / folder).rglob("test_*.py")
        if gpu_records.MARK in path.read_text()
    }
    assert {
        path for area in gpu_records.AREAS for path in gpu_records.tests_of(area, TESTS)
    } == expected


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An area of two files, and one beside it."""
    for name in ("a.py", "b_one.py", "b_two.py", "c.py"):
        (tmp_path / name).write_text(f'"""What {name} is."""\n\nx = 1  # why\n')
    made = gpu_records.Area(sources=("a.py", "b_*.py"), without=("b_two.py",), tests=("test_*.py",))
    monkeypatch.setattr(gpu_records, "SOURCES", tmp_path)
    monkeypatch.setattr(gpu_records, "AREAS", {"house": made})
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content", "is_same"),
    [
        ("a.py", '"""Another\n\ntext."""\nx = 1\n', True),
        ("a.py", "x = 2\n", False),
        ("b_one.py", "x = 2\n", False),
        ("b_two.py", "x = 2\n", True),
        ("b_three.py", "x = 1\n", False),
        ("c.py", "x = 2\n", True),
    ],
)
def test_only_code_of_the_area_counts(house, file, content, is_same):
    record = gpu_records.passed_record("house", 7, MACHINE, "pytest")
    assert record.values["num_passed"] == 7
    assert gpu_records.untested("house", [record]) is None
    (house / file).write_text(content)
    missing = gpu_records.untested("house", [record])
    assert missing is None if is_same else missing.startswith("house changed after")


def test_an_area_without_any_record(house):
    assert gpu_records.untested("house", []).startswith("no record of house")


def test_names_and_patterns_without_files(house):
    with pytest.raises(ConfigError, match="house; got 'garden'"):
        gpu_records.code_hash("garden")
    (house / "a.py").unlink()
    with pytest.raises(ConfigError, match=r"match a\.py"):
        gpu_records.code_hash("house")


def test_only_files_with_gpu_tests_run(house, tmp_path):
    (tmp_path / "test_gpu.py").write_text("@pytest.mark.gpu\ndef test(): ...\n")
    (tmp_path / "test_cpu.py").write_text("def test(): ...\n")
    assert [path.name for path in gpu_records.tests_of("house", tmp_path)] == ["test_gpu.py"]


def test_records_of_kernels_and_areas_do_not_mix(house):
    record = gpu_records.passed_record("house", 1, MACHINE, "pytest")
    kernel = gpu_records.kernel_names()[0]
    assert gpu_records.untested(kernel, [record]).startswith("no record")
    other = gpu_records.passed_record(kernel, 1, MACHINE, "pytest")
    assert gpu_records.untested("house", [other]).startswith("no record")


@pytest.mark.parametrize("name", [*gpu_records.kernel_names(), *gpu_records.AREAS])
def test_all_of_it_was_tested_on_a_gpu_as_it_is(name):
    records = [
        record
        for path in (TESTS.parent / "results").glob("gpu_tests_*.jsonl")
        for record in store.read(path)
    ]
    missing = gpu_records.untested(name, records)
    if name in gpu_records.AREAS and missing is not None and missing.startswith("no record"):
        pytest.skip(missing)
    assert missing is None


def test_every_kernel_has_tests():
    for kernel in gpu_records.kernel_names():
        names = [path.name for path in gpu_records.tests_of(kernel, TESTS)]
        assert f"test_{kernel}.py" in names
    assert "test_quantize_qkv.py" not in [
        path.name for path in gpu_records.tests_of("quantize", TESTS)
    ]


def test_every_test_of_a_kernel_runs_on_a_gpu():
    run = {
        path
        for kernel in gpu_records.kernel_names()
        for path in gpu_records.tests_of(kernel, TESTS)
    }
    folder = TESTS / "kernels"
    compiled = set(folder.glob("test_*_compiled.py"))
    touch_none = ("device", "launch", "launching", "tuning")
    others = {folder / f"test_{name}.py" for name in touch_none}
    assert run | compiled | others == set(folder.glob("test_*.py"))


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
    monkeypatch.setattr(gpu_records, "KERNELS", folder)
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
def test_only_code_of_a_kernel_counts(kernels, file, content, is_same):
    record = gpu_records.passed_record("add", 7, MACHINE, "pytest")
    assert record.values["num_passed"] == 7
    assert gpu_records.untested("add", [record]) is None
    (kernels / file).write_text(content)
    missing = gpu_records.untested("add", [record])
    assert missing is None if is_same else missing.startswith("add changed after its last GPU test")


def test_a_kernel_changes_with_those_it_runs():
    behind = {path.parent.name for path in gpu_records.sources_of("prefill")}
    assert {"prefill", "attention", "kernels"} <= behind
    assert "quantize" in {path.parent.name for path in gpu_records.sources_of("scaled_mm")}


def test_a_kernel_without_any_record(kernels):
    assert gpu_records.untested("add", []).startswith("no record of add")


def test_a_kernel_that_does_not_exist(kernels):
    with pytest.raises(ConfigError, match="one of add, .*; got 'sub'"):
        gpu_records.code_hash("sub")
