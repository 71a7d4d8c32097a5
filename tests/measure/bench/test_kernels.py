"""Benchmarks check before they time."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.bench.benchmark import run_benchmark
from octavo.measure.bench.kernels import SUITES, benchmarks
from octavo.numerics.quantize import quantize as run

CPU = torch.device("cpu")


def timed(benchmark):
    return run_benchmark(benchmark, CPU, "pytest")


@pytest.fixture
def quantize():
    return benchmarks(CPU, ["quantize"])[0]


@pytest.mark.parametrize("op", SUITES)
def test_each_benchmark_is_right_and_timed(op):
    for benchmark in benchmarks(CPU, [op]):
        records, objections = timed(benchmark)
        took_part = {(record.impl, record.case["operands"]) for record in records}
        expected = {(one.name, one.operands) for one in benchmark.contenders}
        assert took_part | {(one.name, one.operands) for one in objections} == expected
        for record in records:
            values = record.values
            assert record.op == benchmark.op
            assert 0 < values["p20_ms"] <= values["median_ms"] <= values["p80_ms"]
            assert values["bytes"] > 0
            if record.baseline is not None:
                assert values["speedup"] > 0


def test_the_baseline_is_the_fastest_in_bf16():
    (benchmark,) = benchmarks(CPU, ["attention"])
    records, _ = timed(benchmark)
    assert {record.baseline for record in records} == {"reference BF16"}
    of_itself = next(record for record in records if record.case["operands"] == "BF16")
    assert of_itself.values["speedup"] == 1.0


def test_a_wrong_result_is_not_timed(quantize):
    wrong = replace(quantize, truth=torch.zeros_like)
    with pytest.raises(UnsupportedError, match="quantize by reference is wrong"):
        timed(wrong)


def test_who_cannot_take_part_is_listed(quantize):
    _, objections = timed(quantize)
    (triton,) = objections
    assert triton.name == "triton" and "needs a CUDA GPU" in triton.reason


def test_every_registered_implementation_is_measured():
    ops.register_impl("quantize", "other", partial(run))
    try:
        records, _ = timed(benchmarks(CPU, ["quantize"])[0])
    finally:
        ops.unregister_impl("quantize", "other")
    assert {"other", "reference", "copy"} == {record.impl for record in records}


def test_an_op_without_benchmarks():
    with pytest.raises(ConfigError, match="expected an op, one of .*; got 'flatten'"):
        benchmarks(CPU, ["flatten"])
