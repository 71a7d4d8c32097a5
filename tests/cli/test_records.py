"""Records of commands: kept as they come, printed by case, and documents of JSON beside them."""

import json
import threading

import pytest

from octavo.cli import records as module
from octavo.cli.records import Collected, StillProgress, write_results
from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.bench.benchmark import Objection
from octavo.measure.records import Machine, Measurement


def record(size, impl):
    return Measurement(
        op="x",
        impl=impl,
        case={"size": size},
        values={"median_ms": 1.0},
        machine=Machine.current(),
        command="octavo",
        baseline="torch",
    )


def test_records_are_kept_at_once_and_printed_by_case(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    collected = Collected(path)
    for size in (1, 2):
        collected.keep(
            [record(size, "a"), record(size, "b")], [Objection("x", "c", "FP8", "too large")]
        )
        assert len(store.read(path)) == 2 * size
    collected.print_tables("size", ("impl", "median_ms"), "size {size}, baseline {baseline}")
    text = capsys.readouterr().out
    assert "size 1, baseline torch" in text and "size 2, baseline torch" in text
    assert text.count("too large") == 1 and f"Records: {path}" in text


def test_a_folder_that_is_not_there_is_an_error_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="expected an existing folder"):
        Collected(tmp_path / "none" / "r.jsonl")


def test_a_document_or_one_for_each(tmp_path, capsys):
    write_results(tmp_path / "v.json", {("fp8", 5): {"a": 1}}, is_several=False)
    assert json.loads((tmp_path / "v.json").read_text()) == {"a": 1}
    write_results(tmp_path / "v.json", {("fp8", 5): {}, ("auto", 5): {}}, is_several=True)
    assert {p.name for p in tmp_path.iterdir()} == {"v.json", "v-fp8-5.json", "v-auto-5.json"}
    assert capsys.readouterr().err.count("Result: ") == 3


def test_the_bar_is_drawn_now_and_then_by_whoever_steps(monkeypatch):
    drawn, now = [], [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(StillProgress, "refresh", lambda self: drawn.append(now[0]))
    before = threading.active_count()
    with StillProgress() as progress:
        assert threading.active_count() == before
        task = progress.add_task("x", total=100)
        del drawn[:]
        for _ in range(50):
            progress.step(task, "tokens")
            now[0] += 0.1
        assert progress.tasks[0].completed == 50 and progress.tasks[0].description == "tokens"
        assert len(drawn) == 3
