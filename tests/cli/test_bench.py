"""octavo bench on this machine."""

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store


def test_kernels_prints_and_records(capsys, tmp_path):
    path = tmp_path / "records.jsonl"
    assert run(make_app(COMMANDS), ["bench", "kernels", "-o", str(path)]) == 0
    text = capsys.readouterr().out
    records = store.read(path)
    assert {record.op for record in records} == {"quantize", "attention", "scaled_mm"}
    assert all(record.op in text and record.command == "octavo bench kernels" for record in records)


def test_a_folder_that_does_not_exist(capsys, tmp_path):
    path = tmp_path / "none" / "records.jsonl"
    assert run(make_app(COMMANDS), ["bench", "kernels", "-o", str(path)]) == 1
    assert "error:" in capsys.readouterr().err
