"""The table of layers that matter, from records made up."""

import importlib.util
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"
MACHINE = Machine.current()
ABOUT = {
    "model": "small-image",
    "dtype": "float32",
    "by": "group",
    "num_prompts": 4,
    "num_inference_steps": 20,
    "num_timesteps": 3,
}


@pytest.fixture
def table(tmp_path):
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(records):
        if records:
            store.append(tmp_path / "sensitivity_cpu.jsonl", records)
        return module.TABLES["sensitivity"](tmp_path)

    return make


def record(op, values, *, day=1, about=ABOUT, **case):
    return Measurement(
        op=op,
        impl="fp8",
        case={**about, **case},
        values=values,
        machine=MACHINE,
        command="x",
        date=f"2026-11-{day:02d}T00:00:00Z",
    )


def row(name, error, *, kept="", is_proposed=False, **others):
    values = {"error": error, "worst_error": 2 * error, "num_layers": 5, "weight_share": 0.125}
    case = {"layer": f"transformer.{name}", "pattern": name, "is_proposed": is_proposed}
    return record("sensitivity", values, kept=kept, **case, **others)


def total(name, error, **others):
    return record("sensitivity_of_all", {"error": error, "floor": 0.0}, layer=name, **others)


TOTALS = [total("all", 0.05), total("all but those proposed", 0.02)]


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_no_record_is_a_sentence(table):
    assert table([]).startswith("No scan has a record yet")


def test_rows_by_their_error_and_all_at_once(table):
    text = table([row("a.*.b", 0.01), row("out", 0.0321, kept="an output projection"), *TOTALS])
    head, first, second, everything = rows_of(text)
    assert head[:3] == ["layers", "number", "error (%)"]
    assert first == ["`out`", "5", "3.21", "6.42", "12.5", "an output projection"]
    assert second == ["`a.*.b`", "5", "1.00", "2.00", "12.5", "–"]
    assert everything[0].startswith("all that do not stay") and everything[2] == "5.00"
    assert "in float32, 4 prompts, 3 of 20 steps; the first 2 of 2 kinds" in text
    assert "nothing is proposed" in text


def test_what_is_proposed_is_named_with_what_it_leaves(table):
    text = table([row("a.*.b", 0.01, is_proposed=True), row("c", 0.001), *TOTALS])
    assert rows_of(text)[-1][2] == "2.00" and "Proposed: `a.*.b`." in text


def test_the_newest_scan_counts_and_only_the_first_rows(table):
    old = [row("old", 0.9), *TOTALS]
    about = {**ABOUT, "num_prompts": 5}
    new = [row(f"l{i}", 0.01 * (i + 1), day=2, about=about) for i in range(15)]
    new += [
        total("all", 0.5, day=2, about=about),
        total("all but those proposed", 0.5, about=about),
    ]
    found = rows_of(table([*new, *old]))
    assert [cells[0] for cells in found[1:13]] == [f"`l{i}`" for i in range(14, 2, -1)]
    assert len(found) == 14
