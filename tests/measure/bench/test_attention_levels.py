"""Levels of accumulation: who runs each, and what it loses."""

import pytest
import torch

from octavo.kernels.device import Device
from octavo.measure.bench import attention
from octavo.measure.bench.benchmark import run_benchmark
from octavo.measure.bench.kernels import USUAL, benchmarks
from octavo.numerics.attention import AttentionSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LEVELS = ["attention_levels"]


def test_a_gpu_has_three_lengths_full_and_causal():
    found = benchmarks(CUDA, LEVELS)
    cases = {(one.case["shape"], one.case["causal"], one.case["value_mean"]) for one in found}
    assert cases == {
        (f"1x{length} heads 8/8 head_dim 128", is_causal, mean)
        for length in (8192, 32768, 131072)
        for is_causal in (False, True)
        for mean in (0.0, 1.0)
    }
    assert len(found) == len(cases)
    assert "attention_levels" not in USUAL


def test_values_have_the_mean_that_records_name():
    for size in (one for one in attention.ATTENTION_LEVELS.large if one.num_tokens == 8192):
        made = attention.ATTENTION_LEVELS.make(size, CPU, None).make_inputs(0)
        means = [float(x.double().mean()) for x in made.qkv]
        assert means == pytest.approx([0, 0, size.value_mean], abs=0.01)


def test_records_have_the_level_and_its_error(monkeypatch):
    asked = []
    real = attention.ops.attention

    def seen(q, k, v, spec, *others, **options):
        asked.append((spec, options["impl"]))
        return real(q, k, v, spec, *others, **options)

    monkeypatch.setattr(attention.ops, "attention", seen)
    (benchmark,) = benchmarks(CPU, LEVELS)
    records, objections = run_benchmark(benchmark, CPU, "pytest", sample_s=0)
    assert [record.case["promote_every"] for record in records] == ["none", 4, 1]
    assert {record.impl for record in records} == {"reference"}
    assert all(record.case["is_selected"] for record in records)
    wanted = {AttentionSpec(promote_every=every) for every in (None, 4, 1)}
    assert {spec for spec, impl in asked if impl == "reference"} == wanted
    # Two tiles: every four is never.
    one, later, two = (record.values["relative_rms"] for record in records)
    assert 0.001 < two < one == later < 0.02
    # Each level of an implementation that cannot run is listed.
    assert [one.name for one in objections] == ["gluon", "triton"] * 3


def test_what_one_level_loses_ends_no_run():
    (benchmark,) = benchmarks(CPU, LEVELS)
    limits = {one.notes["promote_every"]: one.max_error for one in benchmark.participants}
    assert limits == {"none": 1.0, 4: 1.0, 1: attention.MAX_ERROR["FP8"]}


def test_hopper_has_no_kernel_but_triton_for_other_levels(monkeypatch):
    hopper = Device(type="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132)
    monkeypatch.setattr(attention, "default_device", lambda: hopper)
    for benchmark in benchmarks(CUDA, LEVELS):
        chosen = {
            one.notes["promote_every"]: one.name
            for one in benchmark.participants
            if one.notes["is_selected"]
        }
        assert chosen == {"none": "triton", 4: "triton", 1: "gluon"}
        assert not any(one.is_peer for one in benchmark.participants)
