"""octavo report: files in, a page out, and errors that name the line."""

import sys
from functools import partial

import pytest

from octavo.cli.main import COMMANDS, make_app, run
from octavo.errors import ConfigError, UnsupportedError
from octavo.measure import store
from octavo.measure.records import Machine, Measurement

MACHINE = Machine.current(gpu="NVIDIA H200", capability=(9, 0))
row = partial(
    Measurement, op="throughput", impl="octavo", machine=MACHINE, command="octavo bench throughput"
)
RECORD = row(case={"model": "mine", "row": "fp8"}, values={"output_throughput": 5.0})


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results"
    folder.mkdir()
    store.append(folder / "throughput.jsonl", [RECORD])
    return folder


def report(*arguments):
    return run(make_app(COMMANDS), ["report", *map(str, arguments)])


def test_a_page_from_the_folder_results(results, tmp_path, capsys):
    assert report("--md", "r.md", "--csv", "r.csv", "--title", "Mine") == 0
    page = (tmp_path / "report.html").read_text()
    assert "<title>Mine</title>" in page and "Throughput: mine" in page
    assert "1 records of results" in page
    assert (tmp_path / "r.md").read_text().startswith("# Mine\n")
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 2
    assert capsys.readouterr().out == "wrote report.html\nwrote r.md\nwrote r.csv\n"


def test_files_and_folders_each_once(results, tmp_path):
    other = tmp_path / "other.jsonl"
    store.append(other, [row(case={"model": "yours", "row": "x"}, values={"output_throughput": 1})])
    arguments = [results, results / "throughput.jsonl", other]
    assert report(*arguments, "-o", "page.html", "--csv", "all.csv") == 0
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 3


def test_pictures_beside_the_records_are_inside_the_page(results, tmp_path):
    (results / "sheet.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    cases = [{"model": "dit", "row": "fp8", "picture": f"{name}.png"} for name in ("sheet", "lost")]
    scores = {"psnr_db": 36.0, "worst_psnr_db": 30.0}
    records = [row(op="images", case=case, values=scores, baseline="bf16") for case in cases[:1]]
    records += [row(op="images", case=cases[1] | {"row": "x"}, values=scores, baseline="bf16")]
    store.append(results / "images.jsonl", records)
    assert report("--csv", "all.csv", "-o", "page.html", results / "images.jsonl") == 0
    page = (tmp_path / "page.html").read_text()
    assert '<img src="data:image/png;base64,iVBORw0KGgo="' in page
    assert "The image lost.png of x is not shown: there is no such file." in page
    assert "sheet.png" in (tmp_path / "all.csv").read_text()


def test_a_line_that_is_no_record_is_named(results, tmp_path, capsys):
    file = results / "throughput.jsonl"
    file.write_text(file.read_text() + '{"a": 1}\n')
    assert report() == 1
    assert "throughput.jsonl:2: expected a record of schema 1" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "found none at nowhere"),
        (["empty"], "expected *.jsonl files in the folder empty, found none"),
        (["blank.jsonl"], "expected records to show, got none"),
        (["-o", "no/report.html"], "expected an existing folder for no/report.html"),
        (["-o", "a.html", "--md", "a.html"], "expected different files, got a.html, a.html"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said(results, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").touch()
    assert report(*arguments) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("expected more"), "expected more"),
        (UnsupportedError("needs transformers"), "needs transformers"),
        (ImportError("no transformers"), "no transformers"),
        (KeyError("layers"), "a record has no &#39;layers&#39;"),
    ],
    ids=["config", "unsupported", "import", "key"],
)
def test_advice_that_cannot_be_compared_is_said(results, tmp_path, monkeypatch, error, words):
    from octavo.measure.advise import measured

    def refuse(records, gpu):
        raise error

    monkeypatch.setattr(measured, "compare_all", refuse)
    assert report() == 0
    note = f"Advice for NVIDIA H200 is not compared: {words}."
    assert note in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("arguments", [["--no-advice"], ["other.jsonl"]], ids=["flag", "other ops"])
def test_advice_is_left_out_unless_there_is_something_to_compare(
    results, tmp_path, monkeypatch, arguments
):
    monkeypatch.setitem(sys.modules, "octavo.measure.advise.measured", None)  # raises if imported
    kernel = row(op="quantize", case={"shape": "1", "operands": "FP8"}, values={"median_ms": 1.0})
    store.append(tmp_path / "other.jsonl", [kernel])
    assert report(*arguments) == 0
    assert "Advice" not in (tmp_path / "report.html").read_text().split("<script>")[0]
    assert report() == 0
    assert "Advice for NVIDIA H200 is not compared" in (tmp_path / "report.html").read_text()


def test_advice_is_compared_with_what_was_measured(results, tmp_path, monkeypatch):
    from octavo.measure.advise import measured

    case = {"model": "mine", "what": "ITL", "row": "fp8"}
    values = {"measured_speedup": 2.0, "predicted_speedup": 1.9, "error_percent": -5.0}
    found = [row(op="advise", case=case, values=values)]
    monkeypatch.setattr(measured, "compare_all", lambda records, gpu: found)
    assert report() == 0
    assert "Advice: predicted against measured" in (tmp_path / "report.html").read_text()


def test_before_and_after(results, tmp_path, capsys):
    before = tmp_path / "before.jsonl"
    store.append(before, [row(case=dict(RECORD.case), values={"output_throughput": 4.0})])
    assert report("--against", before, "--no-advice", "--md", "r.md") == 0
    assert "before.jsonl: 1 better, 0 worse, 0 the same." in " ".join(
        capsys.readouterr().out.split()
    )
    page = (tmp_path / "report.html").read_text()
    assert page.index("What changed") < page.index("Throughput: mine") and "+25.0 %" in page
    assert "## Before and after" in (tmp_path / "r.md").read_text()
    other = tmp_path / "other.jsonl"
    store.append(other, [row(case={"model": "x", "row": "fp8"}, values={"output_throughput": 1})])
    (tmp_path / "report.html").unlink()
    assert report("--against", other, "--no-advice") == 1
    assert "run the same commands before and after" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "report.html").exists()
