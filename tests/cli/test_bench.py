"""octavo bench on this machine."""

import json

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store


def test_kernels_prints_and_records(capsys, tmp_path):
    path = tmp_path / "records.jsonl"
    command = ["bench", "kernels", "--op", "quantize", "--op", "scaled_mm"]
    assert run(make_app(COMMANDS), [*command, "-o", str(path)]) == 0
    text = capsys.readouterr().out
    records = store.read(path)
    assert {record.op for record in records} == {"quantize", "scaled_mm"}
    expected = "octavo bench kernels --op quantize --op scaled_mm"
    assert all(record.op in text and record.command == expected for record in records)
    assert "Not measured here" in text and "needs a CUDA GPU" in text


def test_kernels_as_json(capsys):
    assert run(make_app(COMMANDS), ["bench", "kernels", "--op", "quantize", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["impl"] for row in rows} == {"reference", "copy"}


def test_a_folder_that_does_not_exist(capsys, tmp_path):
    path = tmp_path / "none" / "records.jsonl"
    assert run(make_app(COMMANDS), ["bench", "kernels", "--op", "quantize", "-o", str(path)]) == 1
    assert "error:" in capsys.readouterr().err


def test_an_op_that_does_not_exist(capsys):
    assert run(make_app(COMMANDS), ["bench", "kernels", "--op", "flatten"]) == 1
    assert "got 'flatten'" in capsys.readouterr().err
