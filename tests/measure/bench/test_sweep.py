"""Sweeps: what a file may say, what is known as the same combination, and what goes on."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.bench.sweep import (
    SweepFile,
    combinations,
    run_sweep,
    stored_records,
)
from octavo.measure.records import Machine
from octavo_testkit.fake_benchmarks import FakeBenchmarks

TEXT = """
config = "tiny"
recipes = ["auto", "fp8"]
dtype = "float32"
layers = 1

[engine]
page_size = 16

[[latency]]
input_len = [5, "0.25k"]
output_len = 3

[[throughput]]
num_prompts = 4
input_len = 8
output_len = "1k"
max_concurrency = 2
"""


def load(tmp_path, text=TEXT):
    (tmp_path / "sweep.toml").write_text(text)
    return SweepFile.load(tmp_path / "sweep.toml")


@pytest.fixture
def benchmarks(monkeypatch):
    return FakeBenchmarks(monkeypatch)


def run(tmp_path, text=TEXT):
    sweep = load(tmp_path, text)
    path = tmp_path / "records.jsonl"
    outcomes = list(run_sweep(sweep, combinations(sweep), path, device="cpu"))
    reasons = {outcome.reason for outcome in outcomes if outcome.state == "failed"}
    assert reasons <= {"boom", "RuntimeError: out of memory"}
    return [(o.combination.load.kind, o.combination.row.name, o.state) for o in outcomes]


ALL = [(kind, row) for kind in ("latency", "throughput") for row in ("auto", "fp8")]


def test_a_file_and_its_commands(tmp_path):
    first, second, third, _ = combinations(load(tmp_path))
    assert first.command == (
        "octavo bench latency --config tiny --layers 1 --dtype float32 --max-num-batched-tokens "
        "2048 --gpu-memory-utilization 0.9 --page-size 16 --input-len 5,256 --output-len 3 "
        "--batch-size 1 --num-iters 3 --num-iters-warmup 1 --seed 0 --kv-cache-dtype auto"
    )
    assert second.command == first.command + " --kv-cache-dtype fp8"
    assert "bench throughput" in third.command and "--output-len 1024" in third.command
    assert str(second) == "latency, fp8, 5, 256 in, 3 out, 1 at once"
    assert str(third) == "throughput, auto, 4 × 8 in, 1,024 out, 2 at once"


def test_stopped_in_the_middle_it_goes_on_with_what_is_left(tmp_path, benchmarks):
    benchmarks.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert benchmarks.ran == ALL[:3]
    benchmarks.stop_at = None
    states = ["skipped", "skipped", "skipped", "measured"]
    assert run(tmp_path) == [(*one, state) for one, state in zip(ALL, states, strict=True)]
    assert benchmarks.ran == ALL
    records = store.read(tmp_path / "records.jsonl")
    # The last one is compared with the first recipe's record of the run before.
    assert [r.baseline for r in records] == [None, None, "auto", "auto", None, "auto"]
    assert [state for *_, state in run(tmp_path)] == ["skipped"] * 4


def test_one_that_fails_is_reported_and_the_others_go_on(tmp_path, benchmarks):
    benchmarks.failing = {("latency", "auto"), ("throughput", "fp8")}
    assert [state for *_, state in run(tmp_path)] == ["failed", "measured", "measured", "failed"]
    # Without the first one's record there is nothing to compare with.
    assert {r.baseline for r in store.read(tmp_path / "records.jsonl")} == {None}
    benchmarks.failing = set()
    assert [state for *_, state in run(tmp_path)] == ["measured", "skipped", "skipped", "measured"]


def test_what_is_another_combination(tmp_path, benchmarks):
    run(tmp_path)
    other = TEXT.replace("page_size = 16", "page_size = 32")
    assert [state for *_, state in run(tmp_path, other)] == ["measured"] * 4
    longer = TEXT.replace("[5, ", "[5, 7, ")
    assert [state for *_, state in run(tmp_path, longer)][:2] == ["measured"] * 2
    assert [state for *_, state in run(tmp_path, longer)] == ["skipped"] * 4


def test_a_recipe_s_file_that_has_changed_is_another_combination(tmp_path, benchmarks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'config = "tiny"\nrecipes = ["r.toml"]\n[[latency]]\ninput_len = [5]\n'
    recipe = tmp_path / "r.toml"
    recipe.write_text('kv_cache = "fp8"\n')
    assert [state for *_, state in run(tmp_path, text)] == ["measured"]
    assert [state for *_, state in run(tmp_path, text)] == ["skipped"]
    recipe.write_text('kv_cache = "fp8"\nskip_layers = ["0"]\n')
    assert [state for *_, state in run(tmp_path, text)] == ["measured"]


def test_other_versions_machines_and_halves_do_not_count(tmp_path, benchmarks):
    run(tmp_path)
    records, machine = store.read(tmp_path / "records.jsonl"), Machine.current()
    (one, *_) = combinations(load(tmp_path))
    assert [r.case["input_len"] for r in stored_records(one, records, machine)] == [5, 256]
    assert stored_records(one, records[1:], machine) == ()
    old = replace(machine, versions={**machine.versions, "octavo": "0.0.1"})
    assert stored_records(one, records, old) == ()
    assert stored_records(one, records, replace(machine, gpu="NVIDIA H200")) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("dtype", "dtipe"), "sweep.toml: unknown key 'dtipe': did you mean 'dtype'"),
        (("page_size", "page"), "engine: unknown key 'page'"),
        (("num_prompts", "num_prompt"), "did you mean 'num_prompts'"),
        (('config = "tiny"', ""), "expected a model or a config"),
        (('["auto", "fp8"]', '["auto", "auto"]'), "expected different recipes"),
        (('"fp8"', '"int4"'), "expected words out of bf16, "),
        (("[5, ", '["5x", '), "expected a number of tokens"),
        (('input_len = [5, "0.25k"]', ""), "input_len"),
        (("[[latency]]", "[[latency]"), "sweep.toml: "),
        (("output_len = 3", "output_len = 1"), "2 or more tokens"),
        (("max_concurrency = 2", "max_concurrency = 0"), "1 or more open requests"),
    ],
)
def test_what_is_refused(tmp_path, change, message):
    assert change[0] in TEXT
    with pytest.raises(ConfigError, match=r".*") as info:
        load(tmp_path, TEXT.replace(*change))
    assert message in str(info.value)


def test_no_workload_and_one_twice(tmp_path):
    head, latency, *_ = TEXT.replace("[[throughput]]", "[[latency]]").split("[[latency]]")
    with pytest.raises(ConfigError, match="expected one or more workloads"):
        load(tmp_path, head)
    with pytest.raises(ConfigError, match="one twice"):
        load(tmp_path, f"{head}[[latency]]{latency}[[latency]]{latency}")
    with pytest.raises(ConfigError, match="No such file"):
        SweepFile.load(tmp_path / "nothing.toml")


def test_the_example_of_the_docs_is_a_sweep(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "benchmark.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("my-recipe.toml").write_text('kv_cache = "fp8"\n')
    found = combinations(load(tmp_path, example))
    assert [one.load.kind for one in found] == ["latency"] * 4 + ["throughput"] * 4
    assert "--compile" in found[0].command
