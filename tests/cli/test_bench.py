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


def test_a_grid_that_was_cut_off_goes_on(capsys, tmp_path, monkeypatch):
    from octavo.measure.bench import benchmark

    path, measure, seen = tmp_path / "grid.jsonl", benchmark.run_benchmark, []

    def stopped(one, *others):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(one.case)
        return measure(one, *others)

    grid = ["bench", "kernels", "--op", "attention_grid", "--sample-time", "0.001"]
    grid += ["--shape", "head_dim 64", "--resume", "-o", str(path)]
    monkeypatch.setattr(benchmark, "run_benchmark", stopped)
    assert run(make_app(COMMANDS), grid) == 130
    first = store.read(path)
    assert [r.case["causal"] for r in first] == [False] * 4 + [True] * 2
    assert {r.values["num_samples"] for r in first} <= set(range(3, 16))
    capsys.readouterr()

    monkeypatch.setattr(benchmark, "run_benchmark", measure)
    assert run(make_app(COMMANDS), grid) == 0
    text = capsys.readouterr()
    assert "5 of 8 shapes are left" in text.err
    records = store.read(path)
    cases = [(r.impl, *r.case.items()) for r in records]
    assert records[: len(first)] == first and len(cases) == len(set(cases)) == 16
    # What ran before is in the tables, too.
    assert text.out.count("heads 4/4") == text.out.count("heads 4/2") == 2
    assert "median" not in text.out

    assert run(make_app(COMMANDS), grid) == 0
    assert "0 of 8 shapes are left" in capsys.readouterr().err
    assert store.read(path) == records


def test_going_on_needs_a_file(capsys):
    assert run(make_app(COMMANDS), ["bench", "kernels", "--op", "quantize", "--resume"]) == 1
    assert "--output, which is not given" in capsys.readouterr().err
