"""The tables of needles in the docs."""

import importlib.util
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TABLES


def record(model, recipe, length, depth, percent, day=1):
    return Measurement(
        op="needle",
        impl="transformers",
        case={
            "model": model,
            "recipe": recipe,
            "length": length,
            "depth": depth,
            "num_keys": 1,
            "repetitions": 2,
        },
        values={"found_percent": percent},
        machine=Machine.current(gpu="NVIDIA H200", capability=(9, 0)),
        command="octavo eval needle",
        date=f"2026-01-0{day}T00:00:00Z",
    )


def test_depths_are_one_cell_and_new_records_replace_old_ones(tables, tmp_path):
    store.append(
        tmp_path / "needle_h200.jsonl",
        [
            record("retrieval-model", "bf16", 8192, 0.0, 100.0),
            record("retrieval-model", "bf16", 8192, 1.0, 0.0),
            record("retrieval-model", "bf16", 8192, 1.0, 50.0, day=2),
            record("retrieval-model", "fp8 unit", 8192, 0.0, 25.0),
            record("other", "fp8 head", 1024, 0.5, 12.0),
        ],
    )
    found = tables["retrieval"](tmp_path)
    assert "| BF16 | 75 |" in found and "| FP8, two-level accumulation | 25 |" in found
    assert "on an NVIDIA H200: 2 depths, 2 prompts" in found and "other" not in found
    assert "| FP8, static scales per head | 12 |" in tables["needles"](tmp_path)


def test_no_records_are_a_sentence(tables, tmp_path):
    assert tables["needles"](tmp_path).startswith("No model has a record yet")
