"""The runner: one record for each participant and cell, kept as they come and not made twice."""

from contextlib import contextmanager

import pytest

from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.records import Machine
from octavo.measure.run import (
    Outcome,
    Participant,
    Progress,
    Records,
    Workload,
    command_line,
    ready,
    run_workload,
)

MACHINE = Machine.current()


def participant(name, factor, opened=None):
    @contextmanager
    def enter():
        if opened is not None:
            opened.append(name)
        yield lambda cell: factor * cell

    about = {"model": "m"}
    return Participant(name=name, impl="test", about=about, machine=MACHINE, open=enter)


def workload(**changes):
    settings = {
        "op": "double",
        "command": "c",
        "cells": {cell: {"size": cell} for cell in (1, 2)},
        "measure": lambda work, cell: Outcome({"score": work(cell)}, {"is_measured": True}),
        "compare": lambda own, first: {"ratio": own["score"] / first["score"]},
    }
    return Workload(**{**settings, **changes})


def test_one_record_for_each_participant_and_cell():
    told = []
    rows = [participant("a", 1), participant("b", 3)]
    found = run_workload(rows, workload(), Records(on_record=told.append))
    assert told == found and len(found) == 4
    assert [(r.case["recipe"], r.case["size"]) for r in found] == [
        *(("a", 1), ("a", 2)),
        *(("b", 1), ("b", 2)),
    ]
    assert found[0].baseline is None and "ratio" not in found[0].values
    assert found[3].values == {"score": 6, "ratio": 3} and found[3].baseline == "a"
    assert found[3].case["is_measured"] and found[3].case["model"] == "m"
    (first, *_) = run_workload(rows, workload(row_key="row"))
    assert first.case["row"] == "a" and "recipe" not in first.case
    for some in ([], [rows[0], rows[0]]):
        with pytest.raises(ConfigError, match="rows of different names"):
            run_workload(some, workload())


def test_a_summary_follows_from_the_other_cells(tmp_path):
    path, opened, skipped = tmp_path / "records.jsonl", [], []
    rows = [participant("a", 1, opened), participant("b", 3, opened)]
    cells = {1: {"size": 1}, 2: {"size": 2}, "all": {"size": "all"}}
    total = ("all", lambda values: {"score": sum(own["score"] for own in values.values())})
    asked = workload(
        cells=cells, summary=total, measure=lambda work, cell: Outcome({"score": work(cell)})
    )
    whole = run_workload(rows, asked, Records.of_file(path))
    assert [r.values["score"] for r in whole] == [1, 2, 3, 3, 6, 9] and whole[5].values[
        "ratio"
    ] == 3
    assert store.read(path) == whole and opened == ["a", "b"]
    # All is there: nobody has to work.
    again = run_workload(
        rows, asked, Records.of_file(path, is_resumed=True), on_skip=skipped.append
    )
    assert again == whole and opened == ["a", "b"] and skipped == [1, 2, 1, 2]
    # A cell that is missing is measured again, and so is the summary.
    told = []
    rest = run_workload(rows, asked, Records([r for r in whole if r is not whole[4]], told.append))
    assert rest == whole and opened == ["a", "b", "b"]
    assert [r.case["size"] for r in told] == [2, "all"]
    # Without --resume the file only grows.
    run_workload(rows, asked, Records.of_file(path))
    assert len(store.read(path)) == 12


def test_records_need_a_place(tmp_path):
    with pytest.raises(ConfigError, match="--resume goes on with the records of --output"):
        Records.of_file(None, is_resumed=True)
    with pytest.raises(ConfigError, match="expected an existing folder"):
        Records.of_file(tmp_path / "no" / "r.jsonl")
    assert run_workload([participant("a", 1)], workload(), Records.of_file(None))


def test_progress_ends_at_its_total():
    seen = []
    progress = Progress(lambda *step: seen.append(step), "reading", 5)
    for count in (2, 2, 2):
        progress.add(count)
    assert seen == [("reading", 2, 5), ("reading", 4, 5), ("reading", 5, 5)]
    with ready("work")() as work:
        assert work == "work"


def test_command_lines_can_be_run_again():
    flags = {"--data": "a b", "--none": None, "--row": ("x", "y"), "--margin": 1.5}
    text = command_line("octavo", "eval", None, "model", flags=flags)
    assert text == "octavo eval model --data 'a b' --row x --row y --margin 1.5"


def test_a_command_leaves_out_what_was_not_given():
    flags = {"--a": None, "--b": False, "--c": True, "--d": ["x", "y z"], "--e": [], "--f": 0}
    line = command_line("octavo", "bench", "latency", "my model", flags=flags)
    assert line == "octavo bench latency 'my model' --c --d x --d 'y z' --f 0"
