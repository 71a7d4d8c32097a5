"""Benchmarks check before they time."""

from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.errors import UnsupportedError
from octavo.measure.bench.kernels import benchmarks, run_benchmarks

CPU = torch.device("cpu")


@pytest.fixture
def quantize():
    return next(b for b in benchmarks(CPU) if b.op == "quantize")


@pytest.mark.parametrize("index", range(4))
def test_each_benchmark_is_right_and_timed(index):
    benchmark = benchmarks(CPU)[index]
    (record,) = run_benchmarks([benchmark], CPU, "pytest")
    assert record.op == benchmark.op and record.impl == "reference"
    assert 0 < record.values["relative_rms"] <= benchmark.max_error
    assert 0 < record.values["p20_ms"] <= record.values["median_ms"] <= record.values["p80_ms"]
    assert record.values["bytes"] == benchmark.bytes


def test_a_wrong_result_is_not_timed(quantize):
    wrong = replace(quantize, truth=lambda: torch.zeros(1024, 1024))
    with pytest.raises(UnsupportedError, match="quantize with impl='reference' is wrong"):
        list(run_benchmarks([wrong], CPU, "pytest"))


def test_every_registered_implementation_is_measured(quantize):
    from octavo.numerics.quantize import quantize as run

    ops.register_impl("quantize", "other", run)
    try:
        records = list(run_benchmarks([quantize], CPU, "pytest"))
    finally:
        ops.unregister_impl("quantize", "other")
    assert [record.impl for record in records] == ["other", "reference"]
