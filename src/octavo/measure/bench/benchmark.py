"""A benchmark: one op at one size, who takes part, and what a right result is.

Whoever takes part is checked before it is timed. On a GPU calls are replayed in a CUDA graph over
several sets of inputs, so that neither launching nor the L2 cache counts.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import describe
from octavo.measure.bench.ceilings import Ceilings
from octavo.measure.bench.timing import capture, sample_in_turn_ms, sample_ms, sample_sustained_ms
from octavo.measure.records import Machine, Measurement, Scalar, timing
from octavo.numerics.error import relative_rms
from octavo.ops.select import impl_names

# Bytes that the sets of inputs have together: several times an L2 cache.
ROTATED_BYTES = 250e6
MAX_SETS = 64
CACHED_SETS = 4
# What a graph takes at least: to start and end one must not count.
MIN_GRAPH_MS = 2.0
MAX_CALLS = 512


@dataclass(frozen=True)
class Contender:
    """Someone who can do the op: one of its implementations, or a peer.

    prepare: takes a set of inputs, does all that the clock must not see, and returns the call;
    raises UnsupportedError if it cannot do this. max_error: the relative RMS error against the
    truth above which a time does not count. bytes: what one call must read and write.
    """

    name: str
    operands: str
    prepare: Callable[[Any], Callable[[], Any]]
    max_error: float
    bytes: float
    notes: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """One op at one size.

    make_inputs: takes a seed. truth: what a call should give, of the part of a result that
    `checked` returns. is_cached: inputs and results may lie in the L2 cache, where in a model the
    kernel before leaves them. baseline: the BF16 contender that speed-ups are over; the fastest one
    if left out.
    """

    op: str
    case: Mapping[str, Scalar]
    make_inputs: Callable[[int], Any]
    truth: Callable[[Any], Tensor]
    contenders: tuple[Contender, ...]
    flops: float = 0.0
    checked: Callable[[Any], Tensor] = lambda result: result
    is_cached: bool = False
    baseline: str | None = None


@dataclass(frozen=True)
class Objection:
    """Who could not take part, and why."""

    op: str
    name: str
    operands: str
    reason: str


@dataclass(frozen=True)
class Sampled:
    """Milliseconds of a contender's calls, and what else was seen meanwhile."""

    ms: list[float]
    values: Mapping[str, float] = field(default_factory=dict)


def timed_impls(op: str, device: torch.device) -> list[str]:
    """The implementations to time: on a GPU all but the reference, which stops to wait for it."""
    return [name for name in impl_names(op) if name != "reference" or device.type == "cpu"]


def run_benchmark(
    benchmark: Benchmark,
    device: torch.device,
    command: str,
    ceilings: Ceilings | None = None,
    load_s: float | None = None,
) -> tuple[list[Measurement], list[Objection]]:
    """The records of all who took part, and who could not.

    Each record has the speed-up over the benchmark's baseline in the same run, and names it; and,
    if the ceilings are known, how much of the nearer one it reached. load_s: time each contender
    after it alone has loaded the GPU for so long, instead of all of them in turn.
    """
    if load_s is not None and device.type != "cuda":
        raise ConfigError(f"expected a GPU to measure under load, got {device.type}")
    inputs = benchmark.make_inputs(0)
    truth = benchmark.truth(inputs)
    entered: list[tuple[Contender, Callable[[], Any], float]] = []
    objections: list[Objection] = []
    for contender in benchmark.contenders:
        try:
            call = contender.prepare(inputs)
            error = relative_rms(benchmark.checked(call()), truth)
        except UnsupportedError as reason:
            objections.append(
                Objection(benchmark.op, contender.name, contender.operands, str(reason))
            )
            continue
        if not error <= contender.max_error:
            raise UnsupportedError(
                f"{benchmark.op} by {contender.name} is wrong: expected a relative error of at "
                f"most {contender.max_error}, got {error:.3g} for {dict(benchmark.case)}"
            )
        entered.append((contender, call, error))
    results = [
        (
            contender,
            timing(sampled.ms, flops=benchmark.flops, bytes=contender.bytes)
            | {"relative_rms": error, **sampled.values},
        )
        for (contender, _, error), sampled in zip(
            entered, _sample_all(benchmark, entered, device, load_s), strict=True
        )
    ]
    if load_s is not None:
        benchmark = replace(benchmark, case={**benchmark.case, "load_s": load_s})
    records = list(_records(benchmark, results, device, command))
    if ceilings is not None:
        records = [_with_ceiling(record, ceilings) for record in records]
    return records, objections


def _sample_all(
    benchmark: Benchmark,
    entered: list[tuple[Contender, Callable[[], Any], float]],
    device: torch.device,
    load_s: float | None,
) -> list[Sampled]:
    """Milliseconds of every contender's calls, taken in turn unless under load."""
    if device.type != "cuda":
        return [Sampled(sample_ms(call, device)) for _, call, _ in entered]
    sets = [_calls(benchmark, contender, call) for contender, call, _ in entered]
    sets = [calls * _num_rounds(calls) for calls in sets]
    graphs = [capture(calls) for calls in sets]
    if load_s is None:
        sampled = [Sampled(samples) for samples in sample_in_turn_ms(graphs, device)]
    else:
        loads = [sample_sustained_ms(graph, load_s=load_s) for graph in graphs]
        sampled = [
            Sampled(load.samples_ms, {"sm_mhz": load.sm_mhz, "watts": load.watts}) for load in loads
        ]
    return [
        replace(one, ms=[ms / len(calls) for ms in one.ms])
        for calls, one in zip(sets, sampled, strict=True)
    ]


def _num_rounds(calls: list[Callable[[], Any]]) -> int:
    """How often a graph goes through `calls`, so that it is long enough to be timed."""
    graph, device = capture(calls), torch.device("cuda")
    (samples,) = sample_in_turn_ms([graph], device, warmup_ms=0.0, num_samples=3)
    enough = math.ceil(MIN_GRAPH_MS / min(samples))
    return max(1, min(enough, MAX_CALLS // len(calls)))


def _calls(
    benchmark: Benchmark, contender: Contender, call: Callable[[], Any]
) -> list[Callable[[], Any]]:
    """One call for each set of inputs."""
    num_sets = CACHED_SETS
    if not benchmark.is_cached:
        num_sets = min(MAX_SETS, max(1, math.ceil(ROTATED_BYTES / contender.bytes)))
    more = [contender.prepare(benchmark.make_inputs(seed)) for seed in range(1, num_sets)]
    calls = [call, *more]
    if benchmark.is_cached:
        calls = [partial(_dropped, one) for one in calls]
    return calls


def _dropped(call: Callable[[], Any]) -> None:
    """A call whose result is dropped: the next one has its memory."""
    call()


def _records(
    benchmark: Benchmark,
    results: list[tuple[Contender, dict[str, float]]],
    device: torch.device,
    command: str,
) -> Iterator[Measurement]:
    described = describe(device)
    machine = Machine.current(gpu=described.gpu, capability=described.capability)
    in_bf16 = [
        (values["median_ms"], contender.name)
        for contender, values in results
        if contender.operands == "BF16" and benchmark.baseline in (None, contender.name)
    ]
    baseline_ms, baseline = min(in_bf16, default=(math.nan, None))
    for contender, values in results:
        if baseline is not None:
            values = values | {"speedup": baseline_ms / values["median_ms"]}
        yield Measurement(
            op=benchmark.op,
            impl=contender.name,
            case={**benchmark.case, "operands": contender.operands, **contender.notes},
            values=values,
            machine=machine,
            command=command,
            baseline=None if baseline is None else f"{baseline} BF16",
        )


def _with_ceiling(record: Measurement, ceilings: Ceilings) -> Measurement:
    operands = str(record.case["operands"])
    percent = ceilings.percent(operands, record.tflops, record.gb_per_s)
    return replace(record, values={**record.values, "of_ceiling_percent": percent})
