"""The grid of attention: which shapes, whose figures count, and what a run leaves to the next."""

from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import Device
from octavo.measure.bench import attention
from octavo.measure.bench.benchmark import Benchmark, Participant, run_benchmark
from octavo.measure.bench.kernels import SUITES, benchmarks, records_of, tasks
from octavo.measure.bench.timing import machine_of
from octavo.numerics.attention import AttentionSpec
from octavo.ops.attention import AttentionArguments

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GRID = ["attention_grid"]


def plain(*participants):
    """A benchmark whose right result is twice its inputs."""
    return Benchmark(
        op="double",
        case={"shape": "2"},
        make_inputs=lambda seed: torch.ones(2),
        truth=lambda inputs: 2 * inputs,
        participants=participants,
    )


def participant(name, factor=2.0, error=None, **notes):
    def prepare(inputs):
        def call():
            if error is not None:
                raise error
            return factor * inputs

        return call

    return Participant(name, "BF16", prepare, 0.01, 8.0, **notes)


def test_a_gpu_has_168_shapes_of_as_many_tokens():
    found = benchmarks(CUDA, GRID)
    sizes = SUITES["attention_grid"].large
    assert len(found) == len(sizes) == len({tuple(one.case.items()) for one in found}) == 168
    assert {size.num_tokens for size in sizes} == {32768}
    names = ("length", "head_dim", "num_heads", "num_kv_heads", "causal")
    assert [len({one.case[name] for one in found}) for name in names] == [6, 7, 1, 2, 2]
    first = found[0]
    assert first.case["shape"] == "64x512 heads 16/16 head_dim 64"
    peers = {"vllm-fa3", "fa3-fwd", "cudnn", "torch-cudnn", "torch-flash"}
    assert {one.name for one in first.participants if one.is_peer} == peers
    assert {one.name for one in first.participants if not one.is_peer} == {"gluon", "triton"}


def test_it_runs_where_it_is_asked_for():
    assert "attention_grid" not in {one.op for one in benchmarks(CPU)}
    assert {one.op for one in benchmarks(CPU)} == SUITES.keys() - {*GRID, "attention_levels"}


def test_parts_by_the_words_of_shapes():
    assert len(benchmarks(CUDA, GRID, shapes=["head_dim 64"])) == 24
    assert len(benchmarks(CUDA, GRID, shapes=["head_dim 64", "heads 16/2 head_dim 256"])) == 36
    with pytest.raises(ConfigError, match="words of a shape, such as '64x512 heads 16/16 head_"):
        benchmarks(CUDA, GRID, shapes=["head_dim 6"])


def test_what_is_compiled_beforehand_is_ours():
    all_tasks = tasks("attention_grid")
    chosen = benchmarks(CPU, GRID, shapes=["head_dim 72"])
    some = tasks("attention_grid", cases=[one.case for one in chosen])
    assert 0 < len(some) == len(all_tasks) // 2
    assert {task.index for task in some} == set(range(8, 16))


@pytest.mark.parametrize(("head_dim", "expected"), [(64, "gluon"), (192, "gluon"), (256, "triton")])
def test_the_implementation_that_hopper_chooses(head_dim, expected, monkeypatch):
    hopper = Device(type="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132)
    monkeypatch.setattr(attention, "default_device", lambda: hopper)
    for benchmark in benchmarks(CUDA, GRID, shapes=[f"head_dim {head_dim}"]):
        marked = [one for one in benchmark.participants if one.notes.get("is_selected")]
        assert [(one.name, one.operands) for one in marked] == [(expected, "FP8")]


def test_what_is_asked_of_the_selection_is_what_a_call_asks(monkeypatch):
    asked = []
    real = attention.select
    monkeypatch.setattr(attention, "select", lambda request: asked.append(request) or real(request))
    size = SUITES["attention_grid"].small[-1]
    benchmark = SUITES["attention_grid"].make(size, CPU, None)
    made = ops.quantize_qkv(*benchmark.make_inputs(0).qkv, value_layout="transposed")
    spec = AttentionSpec(causal=size.is_causal)
    given = (made.q, made.k, made.v, spec, made.scales)
    call = AttentionArguments(*given, None, None, None, None, False, made.value_layout, None)
    assert asked and all(request == call.request() for request in asked)


def test_inputs_are_made_once():
    made = []
    benchmark = replace(
        plain(participant("a"), participant("b")),
        make_inputs=lambda seed: made.append(seed) or torch.ones(2),
    )
    run_benchmark(benchmark, CPU, "pytest")
    assert made == [0]


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (participant("peer", error=RuntimeError("no head_dim 72\nat line 3")), "no head_dim 72"),
        (participant("peer", error=UnsupportedError("not installed")), "not installed"),
        (participant("peer", factor=3.0), "double by peer is wrong: expected a relative error"),
    ],
)
def test_a_peer_that_fails_is_listed_and_the_others_go_on(peer, reason):
    benchmark = plain(replace(peer, is_peer=True), participant("ours"))
    records, (objection,) = run_benchmark(benchmark, CPU, "pytest")
    assert [record.impl for record in records] == ["ours"]
    assert objection.name == "peer" and objection.reason.startswith(reason)
    assert "\n" not in objection.reason


@pytest.mark.parametrize(
    "own", [participant("a", factor=3.0), participant("a", error=RuntimeError())]
)
def test_ours_that_fails_ends_the_run(own):
    with pytest.raises((UnsupportedError, RuntimeError)):
        run_benchmark(plain(own, participant("b")), CPU, "pytest")


def test_records_of_the_same_gpu_and_versions_count():
    benchmark, other = benchmarks(CPU, GRID)[:2]
    records, _ = run_benchmark(benchmark, CPU, "pytest")
    machine = machine_of(CPU)
    assert records_of(benchmark, records, machine) == records
    assert not records_of(other, records, machine)
    assert not records_of(benchmark, records, machine, load_s=1.0)
    searched = [replace(one, case={**one.case, "problem": "short"}) for one in records]
    assert not records_of(benchmark, searched, machine)
    newer = replace(machine, versions={**machine.versions, "torch": "99"})
    assert not records_of(benchmark, records, newer)
    assert not records_of(benchmark, records, replace(machine, gpu="NVIDIA H200"))
    # A GPU counts by its name, whatever the CPU beside it.
    on_gpu = [replace(one, machine=replace(machine, gpu="NVIDIA H200")) for one in records]
    assert records_of(benchmark, on_gpu, replace(machine, gpu="NVIDIA H200", cpu="another"))
