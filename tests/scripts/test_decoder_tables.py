"""The table of perplexities, from records made up."""

import importlib.util
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"
MACHINE = Machine.current(gpu="NVIDIA H200", capability=(9, 0))


@pytest.fixture
def perplexity(tmp_path):
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def table(records):
        store.append(tmp_path / "perplexity_h200.jsonl", records)
        return module.TABLES["perplexity"](tmp_path)

    return table


def read(recipe, ratio=None, error=None, *, dtype="bf16", chunk=4, day=1, **case):
    values = {"perplexity": 12.0}
    if ratio is not None:
        values |= {"perplexity_ratio": ratio, "recovery_percent": 100 / ratio}
    if error is not None:
        values["recovery_standard_error_percent"] = error
    about = {"model": "small", "dtype": dtype, "data": "text", "recipe": recipe, "context": 8192}
    about |= {"chunk": chunk, "count": "later", "num_windows": 4, **case}
    return Measurement(
        op="perplexity",
        impl="transformers",
        case=about,
        values=values,
        machine=MACHINE,
        command="x",
        date=f"2026-11-{day:02d}T00:00:00Z",
    )


def rows_of(text):
    """The cells of every line of tables, heads included."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_columns_are_how_a_text_was_read(perplexity):
    both = "fp8 head+rotate+center"
    text = perplexity(
        [
            read("float32", dtype="float32"),
            read(both, 1.0039, 0.07, dtype="float32"),
            read(both, 1.5, 10.0, dtype="float32", chunk=64),
            read("bf16", chunk=512),
            read(both, 1.0076, 0.06, chunk=512),
            read("fp8 tensor", 1.2, 0.5, chunk=512),
            read(both, 1.00593, 0.0264, chunk=1),
            read(both, 1.00606, 0.0568),
        ]
    )
    name = "static, per head, keys rotated and centered"
    assert rows_of(text) == [
        [
            "cache",
            "BF16, 4 at a time",
            "BF16, token by token",
            "BF16, chunks of 512",
            "float32, 4 at a time",
            "float32, chunks of 64",
        ],
        ["static, per tensor", "", "", "1.2000 ± 0.0072", "", ""],
        [
            name,
            "1.0061 ± 0.0006",
            "1.0059 ± 0.0003",
            "1.0076 ± 0.0006",
            "1.0039 ± 0.0007",
            "1.5000 ± 0.2250",
        ],
    ]
    assert text.startswith("small on an NVIDIA H200, 4 windows of 8192 tokens of text. ")


def test_columns_without_a_record_are_left_out(perplexity):
    text = perplexity([read("float32", dtype="float32"), read("fp8 head", 1.02, 0.1, chunk=1)])
    assert rows_of(text)[0] == ["cache", "BF16, token by token"]


def test_recipes_are_in_words_and_in_order(perplexity):
    words = {
        "fp8 unit": "scales of 1.0",
        "fp8 tensor": "static, per tensor",
        "fp8 head": "static, per head",
        "fp8_e5m2 head+skip=0-1": "fp8_e5m2, static, per head, layers 0-1 skipped",
        "fp8 token": "per token and head",
        "fp8 head+rotate": "static, per head, keys rotated",
        "fp8 token+rotate+center": "per token and head, keys rotated and centered",
        "recipe.json": "recipe.json",
    }
    _, *rows = rows_of(perplexity([read(recipe, 1.01, 0.1) for recipe in reversed(words)]))
    # Of the two per head, the one that came first.
    expected = [*words]
    expected[2], expected[3] = expected[3], expected[2]
    assert [row[0] for row in rows] == [words[recipe] for recipe in expected]


def test_every_recipe_of_the_command_has_words(perplexity):
    names = [f"fp8 {name}" for name in ("unit", "tensor", "head", "token")]
    names += [f"fp8 head+{change}" for change in ("rotate", "center")]
    _, *rows = rows_of(perplexity([read(name, 1.01, 0.1) for name in names]))
    assert len({row[0] for row in rows}) == len(names)
    assert not any("fp8" in row[0] or "+" in row[0] for row in rows)


def test_the_newest_record_counts(perplexity):
    text = perplexity(
        [
            read("fp8 head", 1.01, 0.1, day=1),
            read("fp8 head", 1.03, 0.1, day=3),
            read("fp8 head", 1.02, 0.1, day=2),
            read("fp8 token", 1.04, 0.1),
            read("fp8 token", 1.05, 0.1),
        ]
    )
    assert [row[1] for row in rows_of(text)[1:]] == ["1.0300 ± 0.0011", "1.0500 ± 0.0011"]


def test_one_window_has_no_standard_error_and_models_have_their_own_tables(perplexity):
    text = perplexity(
        [read("fp8 head", 1.02, num_windows=1), read("fp8 head", 1.03, 0.1, model="large")]
    )
    assert [row[1] for row in rows_of(text)] == [
        *("BF16, 4 at a time", "1.0200"),
        *("BF16, 4 at a time", "1.0300 ± 0.0011"),
    ]
    assert "1 window of 8192 tokens" in text and "\nlarge on an NVIDIA H200, 4 windows" in text
