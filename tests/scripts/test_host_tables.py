"""The table of eager calls of generate(), from records made up."""

import importlib.util
from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Machine, Measurement

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"


def record(recipe, ms, speedup, *, prompt=16384, day=1):
    case = {"model": "llama-3.1-8b", "layers": 32, "prompt": prompt, "new_tokens": 34, "batch": 1}
    return Measurement(
        op="generate_call",
        impl="octavo",
        case={**case, "recipe": recipe},
        values={"median_ms": ms, "speedup": speedup, "relative_rms": 0.02},
        machine=Machine.current(gpu="NVIDIA H200", capability=(9, 0)),
        command="octavo bench generate --calls",
        date=f"2026-11-0{day}T00:00:00Z",
        baseline="stock",
    )


def test_the_newest_time_of_each_recipe(tmp_path):
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = module.TABLES["calls"]
    assert table(tmp_path) == ""
    (tmp_path / "host").mkdir()
    records = [record("stock", 30.5, 1.0), record("kv", 25.5, 1.2), record("kv", 20.5, 1.5, day=2)]
    store.append(tmp_path / "host" / "generate_h200.jsonl", records)
    lines = table(tmp_path).splitlines()
    assert lines[0] == "On an NVIDIA H200, random weights."
    assert lines[4:] == [
        "| llama-3.1-8b, 1 × 16,384 | stock | 30.50 | 1.000 | 0.02000 |",
        "| llama-3.1-8b, 1 × 16,384 | kv | 20.50 | 1.500 | 0.02000 |",
    ]
