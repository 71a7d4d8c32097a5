"""Verdicts: yes, no and it depends, by stated thresholds, from records that belong together."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement
from octavo.measure.report import verdict as words
from octavo.measure.report.evidence import SPEEDS, make_verdicts, request_speedup
from octavo.measure.report.verdict import counted, in_order, verdict_lines

RESULTS = Path(__file__).parents[2] / "results"
MACHINE = Machine(cpu="A CPU", python="3.12", platform="Linux", gpu="A GPU")
OTHER = replace(MACHINE, gpu="Another GPU")
row = partial(Measurement, impl="octavo", machine=MACHINE, command="octavo bench")
SIZES = {"num_prompts": 48, "input_len": 20000, "output_len": 2000, "max_concurrency": 8}


def served(name, gain=None, *, weights=16e9, machine=MACHINE, model="m", **values):
    case = {"model": model, "dtype": "bfloat16", "row": name, "weight_bytes": weights, **SIZES}
    gains = {} if gain is None else {"output_throughput_gain": gain, **values}
    return row(
        op="throughput",
        case=case,
        values={"output_throughput": 1.0, **gains},
        baseline=None if gain is None else "auto",
        machine=machine,
    )


def read(name, recovery, error=0.1, *, machine=MACHINE, model="m", dtype="bf16"):
    case = {"model": model, "dtype": dtype, "recipe": name, "data": "enwik8", "context": 8192}
    values = {"perplexity": 10.0, "recovery_percent": recovery}
    values |= {} if error is None else {"recovery_standard_error_percent": error}
    about = {"chunk": 512, "num_windows": 4}
    return row(op="perplexity", case=case | about, values=values, baseline="bf16", machine=machine)


def timed(name, input_len, ttft, itl, **about):
    case = {"model": "m", "row": name, "batch_size": 1, "input_len": input_len, "output_len": 101}
    times = {"median": (100.0, 10.0), "p10": (99.0, 9.0), "p90": (101.0, 11.0)}
    values = {
        f"{which}_{what}_ms": ms
        for which, both in times.items()
        for what, ms in zip(("ttft", "itl"), both, strict=True)
    }
    values |= {"ttft_speedup": ttft, "itl_speedup": itl}
    return row(op="latency", case=case, values=values, baseline="auto", **about)


def only(records):
    (verdict,) = make_verdicts(records)
    return verdict


def test_yes_needs_speed_and_quality():
    verdict = only(
        [served("auto"), served("kv=tensor", 1.66, weights=8e9), read("kv=tensor", 99.4)]
    )
    assert (verdict.answer, verdict.rating) == ("yes", "good")
    assert verdict.workload == "48 × (20,000 + 2,000) tokens, 8 at once"
    assert verdict.facts == (
        "1.66× output tokens/s, memory 0.50× (weights), "
        "quality 99.4 % ± 0.1 (perplexity of enwik8, 8,192 tokens)."
    )
    assert verdict.notes == []


def test_what_is_missing_is_said_to_be_missing():
    verdict = only([served("fp8", 1.5)])
    assert (verdict.answer, verdict.rating) == ("yes, if quality holds", "fair")
    assert verdict.memory is None and verdict.quality is None
    assert verdict.facts == ("1.50× output tokens/s, memory not recorded, quality not measured.")
    assert verdict.notes == ["To find out: octavo eval perplexity"]
    alone = only([read("kv=tensor", 99.4)])
    assert (alone.answer, alone.rating) == ("yes, if it is faster here", "fair")
    assert alone.facts.startswith("speed not measured, memory not recorded, quality 99.4 %")
    assert alone.notes == ["To find out: octavo bench latency"]


@pytest.mark.parametrize(
    ("gain", "weights", "recovery", "answer", "rating"),
    [
        (0.9, 16e9, 99.5, "no, it is slower", "poor"),
        (1.0, 16e9, 99.5, "no, it is no faster", "poor"),
        (0.9, 8e9, 99.5, "it depends: slower, less memory", "fair"),
        (1.0, 8e9, 99.5, "it depends: no faster, less memory", "fair"),
        (1.5, 8e9, 94.0, "no, quality is lost", "poor"),
        (1.5, 8e9, 98.0, "it depends: check the quality", "fair"),
        (1.5, 17e9, 99.5, "it depends: faster, more memory", "fair"),
        (0.9, 16e9, 98.0, "no, it is slower", "poor"),
    ],
)
def test_no_and_it_depends(gain, weights, recovery, answer, rating):
    records = [served("auto"), served("kv", gain, weights=weights), read("kv", recovery)]
    assert (only(records).answer, only(records).rating) == (answer, rating)


def test_short_prompts_that_lose_make_it_depend():
    records = [timed("fp8", 256, 0.8, 0.9), timed("fp8", 8192, 1.4, 1.5)]
    verdict = only(records)
    assert verdict.answer == "it depends: 0.89× at 256 tokens" and verdict.rating == "fair"
    assert verdict.speed.text == "1.49×" and verdict.speed.about == "a whole answer at 8k tokens"
    assert verdict.losses == (
        "0.89× at 256 tokens",
        "first token 0.80× at 256 tokens",
        "between tokens 0.90× at 256 tokens",
    )
    assert verdict.notes[0] == f"Slower than auto: {', '.join(verdict.losses)}."


def test_a_slow_first_token_makes_it_depend_though_the_answer_is_faster():
    verdict = only([timed("fp8", 256, 0.5, 1.6)])
    assert verdict.speed.rating == "fair"
    assert verdict.answer == "it depends: first token 0.50× at 256 tokens"


def test_a_whole_answer_is_its_first_token_and_the_gaps():
    # 100 ms at twice the speed and 100 gaps of 10 ms at the same: 1200 ms became 1100.
    assert request_speedup(timed("fp8", 256, 2.0, 1.0)) == pytest.approx(1200 / 1100)
    without = replace(timed("fp8", 256, 1.0, 1.0), values={"median_ttft_ms": 1.0})
    assert request_speedup(without) is None and make_verdicts([without]) == []


@pytest.mark.parametrize(
    "other",
    [
        read("kv=tensor", 99.4, machine=OTHER),
        read("kv=tensor", 99.4, model="n"),
        read("kv=head", 99.4),
        read("kv=tensor", 99.4, dtype="float32"),
    ],
    ids=["machine", "model", "recipe", "dtype"],
)
def test_records_that_do_not_belong_together_are_never_mixed(other):
    verdicts = make_verdicts([served("auto"), served("kv=tensor", 1.5), other])
    assert len(verdicts) == 2
    assert sorted(one.answer for one in verdicts) == [
        "yes, if it is faster here",
        "yes, if quality holds",
    ]
    assert all(one.speed is None or one.quality is None for one in verdicts)


def test_the_same_recipe_in_the_words_of_two_commands():
    speed = served("fp8+head", 1.5)
    speed = replace(speed, case={**speed.case, "granularity": "head", "scaling": "static"})
    assert only([speed, read("fp8 head", 99.4)]).answer == "yes"


def test_memory_is_that_of_the_same_run():
    other = replace(served("auto", weights=1e9), command="another run")
    assert only([other, served("fp8", 1.5)]).memory is None
    with_cache = [served("auto"), served("fp8", 1.5)]
    with_cache = [
        replace(one, case={**one.case, "cache_bytes": size})
        for one, size in zip(with_cache, (16e9, 8e9), strict=True)
    ]
    memory = only(with_cache).memory
    assert (memory.text, memory.about) == ("0.75×", "weights and KV cache")
    more = replace(with_cache[1], case={**with_cache[1].case, "num_pages": 2})
    assert only([with_cache[0], more]).memory.about == "weights"


def test_the_recipe_with_the_best_answer_is_recommended_and_why():
    records = [served("auto"), served("kv", 1.2), served("kv+linear", 1.7), served("bf16", 3.0)]
    verdict = only(records)
    assert verdict.recipe == "kv+linear"
    assert verdict.choice == "The fastest: kv+linear 1.70×, kv 1.20×."
    lost = read("kv+linear", 80.0)
    verdict = only([*records, lost, read("kv", 99.5)])
    assert (verdict.recipe, verdict.answer) == ("kv", "yes")
    assert verdict.choice.startswith("The best of speed and quality: kv 1.20×, kv+linear")


def test_recipes_are_compared_where_both_were_measured():
    records = [timed("fp8", 256, 1.1, 1.1), timed("fp8", 131072, 3.0, 3.0)]
    records.append(timed("fp8+linear", 256, 1.4, 1.4, date="2026-01-01T00:00:00Z"))
    verdict = only(records)
    assert verdict.recipe == "fp8+linear" and verdict.speed.text == "1.40×"
    assert "at 256 tokens: fp8+linear 1.40×, fp8 1.10×" in verdict.choice


def test_the_newest_record_counts():
    old = replace(served("fp8", 1.1), date="2025-01-01T00:00:00Z")
    assert only([served("fp8", 1.5), old]).speed.text == "1.50×"


def test_broken_numbers_are_no_gain_and_no_quality():
    assert make_verdicts([served("fp8", gain) for gain in (math.nan, math.inf, 0.0, -1.0)]) == []
    lost = only([read("fp8 head", math.nan, error=math.nan)])
    assert lost.answer == "no, quality is lost" and "quality nan %" in lost.facts


def test_records_that_lack_what_a_section_needs_are_left_out():
    speed = served("fp8", 1.5)
    assert make_verdicts([replace(speed, values={"output_throughput_gain": 1.5})]) == []
    lost = read("fp8 head", 99.0)
    case = {name: value for name, value in lost.case.items() if name != "context"}
    assert make_verdicts([replace(lost, case=case)]) == []


def test_rows_without_fp8_and_other_libraries_have_no_verdict():
    vllm = replace(served("fp8", 2.0), impl="vllm")
    tower = {"model": "v", "images": 1, "resolution": "hd", "recipe": "fused-bf16"}
    fused = row(op="encoder", case=tower, values={"speedup": 1.3}, baseline="bf16")
    assert make_verdicts([served("auto"), served("auto+prefill=fa3", 1.2), vllm, fused]) == []


@pytest.mark.parametrize(
    ("percent", "about", "rating"),
    [
        (99.4, {"error": 0.2}, "good"),
        (99.4, {"error": 3.0}, "fair"),  # it may as well be 94 %
        (99.4, {}, "fair"),  # one sample has no error to be known
        (98.0, {"error": 0.1}, "fair"),
        (94.0, {"error": 0.1}, "poor"),
        (94.0, {"interval": (88.0, 100.0)}, "fair"),  # noise may have done it
        (94.0, {}, "poor"),
        (math.nan, {"error": math.nan}, "poor"),
    ],
)
def test_quality_by_its_value_and_its_interval(percent, about, rating):
    assert words.quality_reading(percent, "x", **about).rating == rating


def test_needles_have_the_interval_of_their_number():
    def asked(recipe, num_found, baseline=None):
        case = {"model": "m", "haystack": "text", "repetitions": 50, "recipe": recipe}
        case |= {"length": 8192, "depth": 0.5}
        values = {"num_found": num_found, "found_percent": 2.0 * num_found}
        return row(op="needle", case=case, values=values, baseline=baseline)

    found = only([asked("bf16", 50), asked("fp8 head", 50, "bf16")]).quality
    assert (found.text, found.about, found.rating) == ("100.0 %", "50 of 50 needles", "fair")
    assert found.low == pytest.approx(92.87, abs=0.01)  # Wilson's, by hand: 1 / (1 + 1.96² / 50)
    lost = only([asked("bf16", 50), asked("fp8 head", 40, "bf16")])
    assert lost.quality.text == "80.0 %" and lost.answer == "no, quality is lost"


def test_images_by_the_worst_of_them():
    def drawn(name, worst):
        values = {"psnr_db": 40.0, "worst_psnr_db": worst}
        case = {"model": "d", "row": name, "num_pictures": 4}
        return row(op="images", case=case, values=values, baseline="bf16")

    ratings = [only([drawn("fp8", worst)]).quality.rating for worst in (31.0, 25.0, 15.0)]
    assert ratings == ["good", "fair", "poor"]
    step = {"model": "d", "recipe": "linear", "inputs": "64 x 64"}
    values = {"speedup": 1.4, "median_ms": 1.0, "peak_bytes_ratio": 0.6}
    speed = row(op="diffusion_step", case=step, values=values, baseline="bf16")
    verdict = only([speed, drawn("fp8", 31.0)])
    assert verdict.answer == "yes" and verdict.memory.about == "peak memory"
    assert "quality 31.0 dB (PSNR of the worst of 4 images)" in verdict.facts


def test_advice_is_a_verdict_that_says_it_is_predicted():
    about = {"model": "m", "gpu": "H200", "context": 32768, "concurrency": 1}
    about |= {"recipe": '[kv_cache]\nformat = "e4m3"\n\n[linear]\n', "reasons": ""}
    advice = partial(row, op="advice")
    records = [
        advice(case=about | {"what": "a token"}, values={"speedup": 1.5}),
        advice(case=about | {"what": "weights"}, values={"before_bytes": 16e9, "after_bytes": 8e9}),
    ]
    verdict = only(records)
    assert (verdict.machine, verdict.recipe) == ("H200", "kv_cache + linear")
    assert verdict.facts.endswith("quality not measured, predicted.")
    assert verdict.rating == "fair" and verdict.memory.text == "0.50×"


def test_lines_name_the_machine_the_answer_and_the_reason():
    lines = list(verdict_lines([only([served("fp8", 1.5)])]))
    assert lines[0] == (None, "m, 48 × (20,000 + 2,000) tokens, 8 at once, recipe fp8 on A GPU")
    assert lines[1][0] == "fair" and lines[1][1].startswith("Use FP8: yes, if quality holds. 1.50×")


def test_the_most_complete_comes_first_and_machines_stay_together():
    records = [
        read("kv=head", 99.4, machine=OTHER),
        served("auto", model="n"),
        served("kv", 1.4, model="n"),
        read("kv", 99.9, model="n"),
        served("kv", 1.4, machine=OTHER),
        read("kv", 99.9, model="q"),
    ]
    verdicts = make_verdicts(records)
    assert [(one.machine, one.model) for one in verdicts] == [
        ("A GPU", "n"),
        ("A GPU", "q"),
        ("Another GPU", "m"),
        ("Another GPU", "m"),
    ]
    assert in_order(verdicts) == verdicts
    assert counted(verdicts) == "4 verdicts: 1 green, 3 amber." and counted(verdicts[:1]) == ""


def test_verdicts_on_the_repository_s_records():
    records = store.read(RESULTS)
    verdicts = make_verdicts(records)
    llama = next(v for v in verdicts if v.model == "llama-3.1-8b" and "48 ×" in v.workload)
    newest = max(
        (r for r in records if r.op == "throughput" and r.case["row"] == "fp8+linear"),
        key=lambda r: r.date,
    )
    assert llama.speed.number == newest.values["output_throughput_gain"]
    assert llama.recipe == "fp8+linear" and llama.quality is None
    assert {v.speed is None for v in verdicts} == {True, False}
    for one in verdicts:
        assert (one.quality is None) == ("quality not measured" in one.facts)
        assert (one.memory is None) == ("memory not recorded" in one.facts)
        for reading in filter(None, one.readings.values()):
            assert math.isfinite(reading.number)
    assert {r.op for r in records} >= SPEEDS.keys() - {"generate_call"}
