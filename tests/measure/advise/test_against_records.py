"""Advice against results/: speed-ups within 15 %, and the recipe that won, own records left out.

A config without records is skipped; once it has some, it is tested without a change here.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from octavo.measure import store
from octavo.measure.advise.advise import advise
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.measured import compare
from octavo.measure.advise.predict import plan_of, shape_of
from octavo.measure.advise.shape import Workload
from octavo.measure.bench.encoder import RESOLUTIONS
from octavo.recipe import AttentionSettings

RESULTS = Path(__file__).parents[3] / "results"
MAX_ERROR_PERCENT = 15
# A recipe as fast as this share of the fastest one has won as well.
TIE = 0.98
H200 = find_gpu("h200")
CONFIGS = {
    "Llama-3.1-8B": "llama-3.1-8b",
    "gpt-oss-20b": "gpt-oss-like",
    "head_dim 256": None,  # whichever has records
    "Qwen3-VL-30B-A3B": "qwen3-vl-30b-a3b",
    "FLUX.1": "flux.1-dev",
}
OPS = ("latency", "throughput", "encoder", "diffusion_step")


@cache
def records():
    return store.read(RESULTS)


def rows_of(config):
    """The records of a config; skips where there are none."""
    name = CONFIGS[config]
    rows = [r for r in records() if r.op in OPS and r.machine.gpu == H200.name]
    if name is None:
        decoders = {str(r.case["model"]) for r in rows if r.op == "latency"}
        large = [n for n in sorted(decoders) if (s := shape_of(n)) and s.decoder.head_dim == 256]
        name = large[0] if large else None
    found = [row for row in rows if row.case["model"] == name]
    if not found:
        pytest.skip(f"{config}: no record yet")
    if config == "FLUX.1":
        pytest.importorskip("diffusers")
    return name, found


def predicted(one):
    return one.values.get("predicted_speedup")


@pytest.mark.parametrize("config", CONFIGS)
def test_speedups_are_near_those_measured(config):
    name, _ = rows_of(config)
    compared = compare(records(), H200, name)
    known = [one for one in compared if predicted(one) is not None]
    assert len(known) > len(compared) / 2
    assert [one for one in known if abs(one.values["error_percent"]) > MAX_ERROR_PERCENT] == []
    # What is not predicted are short prompts, which wait for the host: its times scatter.
    unknown = [one.case for one in compared if one not in known]
    assert all(case["what"].startswith("TTFT") and "host" in case["note"] for case in unknown)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_recipe_is_the_one_that_won(config):
    name, rows = rows_of(config)
    by_op = {row.op for row in rows}
    if "throughput" in by_op or "latency" in by_op:
        check_decoder(name, rows)
    if "encoder" in by_op:
        check_tower(name, rows)
    if "diffusion_step" in by_op:
        check_step(name, rows)


def advice_for(name, **workload):
    return advise(shape_of(name), H200, Workload(**workload), records(), leave_out=[name])


def check_decoder(name, rows):
    measured, about = {}, {}
    for row in rows:
        if row.op == "throughput":
            measured[key(plan_of(row))] = row.values["output_throughput"]
            about = {
                "context": row.case["input_len"],
                "output_len": row.case["output_len"],
                "concurrency": row.case["max_concurrency"],
            }
    if not measured:
        longest = max(row.case["input_len"] for row in rows if row.op == "latency")
        about = {"context": longest, "output_len": 128, "concurrency": 1}
        for row in rows:
            if row.op == "latency" and row.case["input_len"] == longest:
                measured[key(plan_of(row))] = 1 / row.values["median_itl_ms"]
    recipe = advice_for(name, **about).recipe
    is_linear = recipe.linear is not None and any(plan[2] for plan in measured)
    chosen = (recipe.kv_cache is not None, bool(recipe.skip_layers), is_linear)
    assert measured[chosen] >= TIE * max(measured.values())


def key(plan):
    return plan.is_kv_fp8, plan.skips_windows, plan.is_linear_fp8


def check_tower(name, rows):
    for resolution in {str(row.case["resolution"]) for row in rows if row.op == "encoder"}:
        of_size = [r for r in rows if r.op == "encoder" and r.case["resolution"] == resolution]
        winner = min(of_size, key=lambda row: row.values["median_ms"])
        size, num_images = RESOLUTIONS[resolution], int(winner.case["images"])
        recipe = advice_for(name, image_size=size, num_images=num_images).recipe
        is_fp8 = isinstance(recipe.vision_attention, AttentionSettings)
        assert is_fp8 == (winner.case["recipe"] in ("dynamic", "static"))


def check_step(name, rows):
    """The chosen recipe won in every run that has it; static scales, which it cannot have yet, are
    advised beside it if they were quicker."""
    advice = advice_for(name)
    parts = [part for part in ("linear", "attention") if getattr(advice.recipe, part) is not None]
    chosen, runs = "+".join(parts) or "bf16", {}
    for row in rows:
        if row.op == "diffusion_step" and row.case.get("compiled"):
            best, recipe = runs.setdefault(row.command, {}), str(row.case["recipe"])
            best[recipe] = max(best.get(recipe, 0), row.values["speedup"])
    with_chosen = [best for best in runs.values() if chosen in best]
    assert with_chosen
    for best in with_chosen:
        assert best[chosen] >= TIE * max(x for recipe, x in best.items() if "static" not in recipe)
    has_static = any("static" in max(best, key=best.get) for best in runs.values())
    assert not has_static or any("calibrate --pipeline" in text for text in advice.warnings)


@pytest.mark.slow
def test_steps_are_compared_over_bf16():
    """Records as `octavo bench diffusion` writes them, with figures made up."""
    pytest.importorskip("diffusers")
    template = next(row for row in records() if row.op == "encoder")
    made = [
        replace(
            template,
            op="diffusion_step",
            case={
                "model": "flux.1-dev",
                "layers": layers,
                "recipe": recipe,
                "compiled": True,
                "graphs": True,
            },
            values={"median_ms": ms, "speedup": 30.0 / ms},
        )
        for recipe, ms in (("bf16", 30.0), ("linear", 20.0), ("linear+attention", 15.0))
        for layers in ("all", 2)
    ]
    compared = compare([*records(), *made], H200, "flux.1-dev")
    linear = [one for one in compared if one.case["row"] == "linear"]
    assert [one.values["measured_speedup"] for one in linear] == [1.5, 1.5]
    assert len(compared) == 4
    # 19 and 38 blocks have the share of linear layers and attention that 2 and 2 have, nearly.
    assert predicted(compared[0]) == pytest.approx(predicted(compared[1]), rel=0.05)
    assert 1.2 < predicted(compared[0]) < 1.5
    own = compare([*records(), *made], H200, "flux.1-dev", is_left_out=False)
    assert predicted(own[0]) != predicted(compared[0])


def test_a_prediction_that_is_off_is_seen():
    """The test above can fail: records that say something else are far from the prediction."""
    changed = [
        replace(row, values={**row.values, "itl_speedup": 2.0})
        if row.op == "latency" and "itl_speedup" in row.values
        else row
        for row in records()
    ]
    compared = compare(changed, H200, "llama-3.1-8b")
    assert any(abs(one.values.get("error_percent", 0)) > MAX_ERROR_PERCENT for one in compared)


def test_own_records_do_not_count_when_left_out():
    """However wrong a config's own records are, its prediction stays."""
    name = "llama-3.1-8b"
    wrong = [
        replace(row, values={**row.values, "median_itl_ms": 100.0})
        if row.op in OPS and row.case["model"] == name
        else row
        for row in records()
    ]
    for is_left_out in (True, False):
        before, after = (
            list(map(predicted, compare(rows, H200, name, is_left_out=is_left_out)))
            for rows in (records(), wrong)
        )
        assert (before == after) == is_left_out


def test_compared_rows_are_records():
    compared = compare(records(), H200, "gpt-oss-like")
    assert {(row.op, row.case["model"], row.machine.gpu) for row in compared} == {
        ("advise", "gpt-oss-like", H200.name)
    }
    assert any(row.case.get("note", "").startswith("bound by launches") for row in compared)
    values = compared[0].values
    ratio = values["predicted_speedup"] / values["measured_speedup"]
    assert values["error_percent"] == pytest.approx(100 * (ratio - 1))
