"""Areas beside the kernels, and the GPU tests that saw them."""

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.bench import areas, gate
from octavo.measure.records import Machine

TESTS = Path(__file__).parents[2]
MACHINE = Machine.current(gpu="GPU", capability=(9, 0))


@pytest.mark.parametrize("area", areas.AREAS)
def test_every_area_has_sources_and_tests(area):
    assert len(areas.sources_of(area)) >= 2
    assert areas.tests_of(area, TESTS)


def test_every_gpu_test_of_models_and_serving_is_in_an_area():
    expected = {
        path
        for folder in ("cache", "integrations", "layers", "serving")
        for path in (TESTS / folder).rglob("test_*.py")
        if areas.MARK in path.read_text()
    }
    assert {path for area in areas.AREAS for path in areas.tests_of(area, TESTS)} == expected


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An area of two files, and one beside it."""
    for name in ("a.py", "b_one.py", "b_two.py", "c.py"):
        (tmp_path / name).write_text(f'"""What {name} is."""\n\nx = 1  # why\n')
    made = areas.Area(sources=("a.py", "b_*.py"), without=("b_two.py",), tests=("test_*.py",))
    monkeypatch.setattr(areas, "SOURCES", tmp_path)
    monkeypatch.setattr(areas, "AREAS", {"house": made})
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
    record = areas.passed_record("house", 7, MACHINE, "pytest")
    assert record.values["num_passed"] == 7
    assert areas.untested("house", [record]) is None
    (house / file).write_text(content)
    missing = areas.untested("house", [record])
    assert missing is None if is_same else missing.startswith("house changed after")


def test_an_area_without_any_record(house):
    assert areas.untested("house", []).startswith("no record of house")


def test_names_and_patterns_without_files(house):
    with pytest.raises(ConfigError, match="one of house; got 'garden'"):
        areas.code_hash("garden")
    (house / "a.py").unlink()
    with pytest.raises(ConfigError, match=r"match a\.py"):
        areas.code_hash("house")


def test_only_files_with_gpu_tests_run(house, tmp_path):
    (tmp_path / "test_gpu.py").write_text("@pytest.mark.gpu\ndef test(): ...\n")
    (tmp_path / "test_cpu.py").write_text("def test(): ...\n")
    assert [path.name for path in areas.tests_of("house", tmp_path)] == ["test_gpu.py"]


def test_records_of_kernels_and_areas_do_not_mix(house):
    record = areas.passed_record("house", 1, MACHINE, "pytest")
    kernel = gate.kernel_names()[0]
    assert gate.untested([record])[kernel].startswith("never tested")
    other = gate.passed_record(kernel, 1, MACHINE, "pytest")
    assert areas.untested("house", [other]).startswith("no record")


@pytest.mark.parametrize("area", areas.AREAS)
def test_every_area_was_tested_on_a_gpu_as_it_is(area):
    records = [
        record
        for path in (TESTS.parent / "results").glob("gpu_tests_*.jsonl")
        for record in store.read(path)
    ]
    missing = areas.untested(area, records)
    if missing is not None and missing.startswith("no record"):
        pytest.skip(missing)
    assert missing is None
