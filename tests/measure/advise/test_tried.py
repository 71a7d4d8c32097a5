"""What octavo was tried with: the file agrees with records, compile tests and docs."""

import re
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.advise import tried
from octavo.measure.report.tables import to_markdown

ROOT = Path(__file__).parents[3]
SUPPORT = (ROOT / "docs" / "reference" / "support.md").read_text("utf-8")
OF_CAPABILITY = re.compile(r'parametrize\("capability", \[([\d, ]+)\]')


@pytest.fixture(scope="module")
def machines():
    return [row.machine for row in store.read(ROOT / "results")]


def versions_of(machines, package):
    found = {m.versions[package] for m in machines if package in m.versions}
    return {version.partition("+")[0] for version in found}


@pytest.mark.parametrize("package", tried.packages())
def test_run_on_a_gpu_is_what_records_say(machines, package):
    """Both ways: no version is claimed without a record, none with records is left out."""
    claimed = {v for v, how in tried.packages()[package].items() if how == "gpu"}
    assert claimed == versions_of([m for m in machines if m.gpu], package)
    on_cpu = versions_of([m for m in machines if not m.gpu], package)
    assert on_cpu <= tried.packages()[package].keys()


def test_gpus_are_those_of_records_and_compile_tests(machines):
    ran = {(m.capability, m.gpu) for m in machines if m.gpu}
    own = tried.architectures().values()
    assert {(one.capability, gpu) for one in own for gpu in one.gpus} == ran
    assert all((one.how == "gpu") == bool(one.gpus) for one in own)
    texts = [file.read_text("utf-8") for file in (ROOT / "tests/kernels").glob("*_compiled.py")]
    lists = [found for text in texts for found in OF_CAPABILITY.findall(text)]
    compiled = {divmod(int(number), 10) for found in lists for number in found.split(",")}
    assert compiled == tried.architectures().keys()


def test_the_docs_have_this_table():
    table = SUPPORT.partition("<!-- table: tried -->\n")[2].partition("<!-- end -->")[0]
    assert table.strip() == to_markdown(tried.tried_table()).strip()


def test_the_docs_say_the_same_of_hardware():
    """By the columns of the table of hardware, whose heads name compute capabilities."""
    lines = [line.strip("|").split("|") for line in SUPPORT.splitlines() if line.startswith("| ")]
    heads = next(cells for cells in lines if "sm_89 (L4" in "".join(cells))
    rows = {cells[0].strip(): cells for cells in lines}
    for one in tried.architectures().values():
        sm = "sm_{}{}".format(*one.capability)
        place = next(i for i, head in enumerate(heads) if sm in head)
        ran = rows["has been **run**"][place]
        assert (ran.strip() == "never") == (one.how != "gpu")
        assert all(gpu.removeprefix("NVIDIA ") in ran for gpu in one.gpus)
        assert sm in rows["is compiled in tests"][place]


def test_gpus_that_octavo_never_ran_on_are_told():
    assert tried.caution_of_gpu("NVIDIA H200", (9, 0)) is None
    same = tried.caution_of_gpu("NVIDIA H100 80GB HBM3", (9, 0))
    assert same == (
        "octavo was never run on NVIDIA H100 80GB HBM3; its kernels for Hopper (sm_90) were run on "
        "NVIDIA H200."
    )
    assert "any other GPU of Ada (sm_89): its kernels are compiled" in tried.caution_of_gpu(
        "NVIDIA L4", (8, 9)
    )
    assert "nor are its kernels compiled for sm_120" in tried.caution_of_gpu("RTX 5090", (12, 0))


def test_versions_that_octavo_never_ran_with_are_told(monkeypatch):
    rows = {"torch": {"2.11.0": "gpu", "2.13.0": "cpu"}, "triton": {"3.9.0": "compiled"}}
    monkeypatch.setattr(tried, "packages", lambda: rows)

    def told(has_gpu, **versions):
        return list(tried.cautions_of_versions(versions, has_gpu=has_gpu))

    assert told(True, torch="2.11.0+cu130") == []
    assert told(False, torch="2.13.0+cpu") == []
    assert told(True, torch="2.13.0", numpy="1.0") == [
        "octavo was never run on a GPU with torch 2.13.0: run on a CPU only."
    ]
    assert told(False, triton="3.9.0") == [
        "octavo was never run on a GPU with triton 3.9.0: compiled only."
    ]
    assert told(False, torch="2.99.0") == [
        "octavo was never tried with torch 2.99.0; it was with 2.11.0 (run on a GPU), 2.13.0 (run "
        "on a CPU only)."
    ]
