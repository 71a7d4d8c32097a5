"""Benchmarks check before they time."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.bench.benchmark import Ceilings, measure_ceilings, run_benchmark
from octavo.measure.bench.kernels import SUITES, benchmarks
from octavo.numerics.quantize import quantize as run
from octavo.ops.select import impl_names
from octavo.reference.attention import varlen_attention

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
        expected = {(one.name, one.operands) for one in benchmark.participants}
        assert took_part | {(one.name, one.operands) for one in objections} == expected
        cases = [(record.impl, *sorted(record.case.items())) for record in records]
        assert len(set(cases)) == len(cases)
        for record in records:
            values = record.values
            assert record.op == benchmark.op
            assert 0 < values["p20_ms"] <= values["median_ms"] <= values["p80_ms"]
            assert values["bytes"] > 0
            if record.baseline is not None:
                assert values["speedup"] > 0


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("attention", {"vllm-fa3", "fa3-fwd", "cudnn", "torch-cudnn", "torch-flash"}),
        ("packed_attention", {"vllm-fa3", "fa3-fwd", "cudnn"}),
        ("encoder_attention", {"vllm-fa3", "fa3-fwd", "torch-cudnn"}),
    ],
)
def test_the_peers_of_attention_on_a_gpu(op, expected):
    ours = {"octavo", *impl_names("attention")}
    for benchmark in benchmarks(torch.device("cuda"), [op]):
        assert {one.name for one in benchmark.participants} - ours == expected


@pytest.mark.parametrize("op", ["packed_attention", "encoder_attention"])
def test_a_wrong_end_of_any_sequence_shows(op):
    (benchmark,) = benchmarks(CPU, [op])
    inputs = benchmark.make_inputs(0)
    ends, truth = inputs.packing.cu_seqlens_q[1:].tolist(), benchmark.truth(inputs)
    whole, _ = varlen_attention(*inputs.qkv, inputs.packing, compute=torch.float64)
    torch.testing.assert_close(benchmark.checked(inputs, whole), truth, rtol=0, atol=1e-12)
    for end in ends:
        wrong = whole.clone()
        wrong[end - 1] = 0
        assert not torch.equal(benchmark.checked(inputs, wrong), truth)
    assert len(truth) == sum(min(64, end - start) for start, end in pairwise([0, *ends]))


def test_an_encoder_scales_in_two_ways():
    (benchmark,) = benchmarks(CPU, ["encoder_attention"])
    records, _ = timed(benchmark)
    ways = {record.case["scaling"] for record in records if record.impl == "octavo"}
    assert ways == {"static", "dynamic with history"}
    assert {record.baseline for record in records} == {"reference BF16"}
    # Whoever reads and writes BF16 moves the same bytes.
    assert len({record.values["bytes"] for record in records}) == 1


def test_a_dense_result_of_images_is_checked_as_a_packed_one():
    (benchmark,) = benchmarks(CPU, ["encoder_attention"])
    inputs = benchmark.make_inputs(0)
    dense, packed = inputs.qkv[0].unflatten(0, (3, 50)), inputs.qkv[0]
    assert torch.equal(benchmark.checked(inputs, dense), benchmark.checked(inputs, packed))


def test_the_baseline_is_the_fastest_in_bf16():
    (benchmark,) = benchmarks(CPU, ["attention"])
    records, _ = timed(benchmark)
    assert {record.baseline for record in records} == {"reference BF16"}
    of_itself = next(record for record in records if record.case["operands"] == "BF16")
    assert of_itself.values["speedup"] == 1.0


def test_a_baseline_by_name_though_ours_is_bf16_as_well():
    for benchmark in benchmarks(CPU, ["matvec"]):
        records, objections = timed(benchmark)
        assert [one.name for one in objections] == ["triton"]
        times = {record.impl: record.values["median_ms"] for record in records}
        assert set(times) == {"reference", "torch"}
        for record in records:
            assert record.baseline == "torch BF16"
            assert record.values["speedup"] == times["torch"] / times[record.impl]


def test_matvec_counts_the_weights_bytes():
    sizes = {}
    for benchmark in benchmarks(torch.device("cuda"), ["matvec"]):
        assert [one.name for one in benchmark.participants] == ["triton", "torch"]
        (num_bytes,) = {one.bytes for one in benchmark.participants}
        sizes[benchmark.case["shape"]] = num_bytes
    assert sizes["14336x4096"] == 14336 * 4096 * 2
    assert {"4096x2880", "512x2880", "2880x4096", "128256x4096"} < set(sizes)


def test_a_wrong_result_is_not_timed(quantize):
    wrong = replace(quantize, truth=lambda inputs: torch.zeros_like(inputs[0]))
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


def test_how_much_of_the_ceiling():
    ceilings = Ceilings(gb_per_s=4000, bf16_tflops=800, fp8_tflops=1300)
    assert ceilings.percent("FP8", 650, 400) == 50
    assert ceilings.percent("BF16", 600, 400) == 75
    assert ceilings.percent("BF16 to FP8", 0, 3000) == 75
    assert ceilings.percent("FP8", 10, 3600) == 90
    assert Ceilings(4000, 800).percent("FP8", 400, 0) == 50


def test_the_ceilings_of_this_machine(quantize):
    ceilings = measure_ceilings(CPU)
    assert ceilings.gb_per_s > 0.1 and ceilings.bf16_tflops > 0 and ceilings.fp8_tflops is None
    records, _ = run_benchmark(quantize, CPU, "pytest", ceilings)
    assert all(record.values["of_ceiling_percent"] > 0 for record in records)


def test_load_is_for_gpus(quantize):
    with pytest.raises(ConfigError, match="expected a GPU to measure under load, got cpu"):
        run_benchmark(quantize, CPU, "pytest", load_s=1.0)


@pytest.mark.gpu
def test_records_under_load_say_so():
    device = torch.device("cuda")
    records, _ = run_benchmark(benchmarks(device, ["quantize"])[0], device, "pytest", load_s=0.2)
    assert records and all(record.case["load_s"] == 0.2 for record in records)
    assert all(record.values["watts"] > 30 for record in records)


def test_an_op_without_benchmarks():
    with pytest.raises(ConfigError, match="expected an op, one of .*; got 'flatten'"):
        benchmarks(CPU, ["flatten"])
