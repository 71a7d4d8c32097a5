"""The table of diffusion steps, from records made up."""

import importlib.util
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"


@pytest.fixture
def steps():
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TABLES["steps"]


def record(recipe, median_ms, speedup, *, day=1, graphs=False, **values):
    case = {
        "model": "flux.1-dev",
        "inputs": "4096 + 512 tokens",
        "layers": "all",
        "recipe": recipe,
        "attention": "octavo FP8" if "attention" in recipe else "cudnn BF16",
        "compiled": True,
        "graphs": graphs,
    }
    return Measurement(
        op="diffusion_step",
        impl="octavo",
        case=case,
        values={"median_ms": median_ms, "speedup": speedup, "relative_rms": 0.02, **values},
        machine=Machine.current(gpu="NVIDIA H200", capability=(9, 0)),
        command="octavo bench diffusion",
        baseline="diffusers BF16, cudnn, compiled",
        date=f"2026-01-0{day}T00:00:00Z",
    )


RECIPES = (
    *("bf16", "bf16-faster", "linear", "attention", "linear+attention"),
    *("linear+attention+modulation", "linear-block", "linear-static", "linear-static+attention"),
    "linear-static+attention-static",
)


def test_every_recipe_has_words(steps, tmp_path):
    for recipe in RECIPES:
        store.append(tmp_path / "diffusion_h200.jsonl", [record(recipe, 1.0, 1.0)])
    assert "modulation with FP8 weights (octavo FP8 attention)" in steps(tmp_path)


def test_no_records_are_a_sentence(steps, tmp_path):
    assert steps(tmp_path).startswith("No step in full size has a record yet")


def test_the_newest_of_each_row(steps, tmp_path):
    store.append(
        tmp_path / "diffusion_h200.jsonl",
        [
            record("bf16", 130.04, 1.0, peak_bytes_ratio=1.0),
            record("linear+attention", 99.0, 1.31, graphs=True),
            record("linear+attention", 91.5, 1.42, graphs=True, day=2),
        ],
    )
    text = steps(tmp_path)
    assert (
        "**flux.1-dev** (random weights, all blocks, 4096 + 512 tokens) on an NVIDIA H200" in text
    )
    assert "The baseline is diffusers BF16, cudnn, compiled, in the same run as each row" in text
    assert "| BF16 (cudnn BF16 attention) | 130.0 | 1.00× | 1.00× | 0.020 |" in text
    wanted = "| FP8 linear layers and attention, by CUDA graphs (octavo FP8 attention) | 91.5 |"
    assert wanted in text and "99.0" not in text


def test_rows_older_than_their_bf16_say_so(steps, tmp_path):
    old = record("linear", 99.0, 1.31)
    rows = [old, record("bf16", 130.0, 1.0, day=2), record("linear+attention", 91.5, 1.4, day=2)]
    store.append(tmp_path / "diffusion_h200.jsonl", rows)
    lines = [line for line in steps(tmp_path).splitlines() if "earlier" in line]
    assert len(lines) == 1
    assert lines[0].startswith("| FP8 linear layers, an earlier run (cudnn BF16 attention)")
