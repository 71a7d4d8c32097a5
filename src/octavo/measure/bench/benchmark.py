"""A benchmark: one op at one size, who takes part, and what a right result is.

A participant is one of the op's implementations or a peer, and is checked before it is timed. On a
GPU calls are replayed in a CUDA graph over several sets of inputs, so that neither launching nor
the L2 cache counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.internals import internals
from octavo.measure.bench.expect import expect_within
from octavo.measure.bench.timing import (
    capture,
    machine_of,
    sample_in_turn_ms,
    sample_sustained_ms,
)
from octavo.measure.records import Measurement, Scalar, timing
from octavo.measure.rows import Dialect, Row, parse_rows
from octavo.numerics.error import relative_rms
from octavo.numerics.quantize import Quantized
from octavo.ops.select import impl_names

with internals("torch"):
    from torch import _scaled_mm

# Bytes that the sets of inputs have together: several times an L2 cache.
ROTATED_BYTES = 250e6
MAX_SETS = 64
CACHED_SETS = 4
# What a graph takes at least: to start and end one must not count.
MIN_GRAPH_MS = 2.0
MAX_CALLS = 512

# Rounding a product and its result to BF16 costs 0.002 to 0.003 on normal values, quantizing both
# operands 0.037, and rounding to e4m3 less than 2^-4 of a value.
MAX_ERROR = {"FP8": 0.06, "BF16 by FP8": 0.04, "BF16": 0.01, "BF16 to FP8": 2**-4}

Call = Callable[[], Any]
Prepare = Callable[[Any], Call]


@dataclass(frozen=True)
class Participant:
    """Someone who can do the op: one of its implementations, or a peer.

    prepare: does all that the clock must not see, given inputs, and returns the call, or raises
    UnsupportedError. max_error: the largest relative RMS error. bytes: read and written by a call.
    is_peer: it is of another library, and where it fails or is wrong the others go on.
    """

    name: str
    operands: str
    prepare: Prepare
    max_error: float
    bytes: float
    notes: Mapping[str, Scalar] = field(default_factory=dict)
    is_peer: bool = False


def value_of(result: Tensor | Quantized) -> Tensor:
    """What a result stands for, quantized or not."""
    return result.dequantize() if isinstance(result, Quantized) else result


@dataclass(frozen=True)
class Benchmark:
    """One op at one size.

    make_inputs: takes a seed. truth: what `checked` should give, of inputs and a result. is_cached:
    inputs may lie in the L2 cache, where in a model the kernel before leaves them. baseline: the
    BF16 participant that speed-ups are over; the fastest one if left out.
    """

    op: str
    case: Mapping[str, Scalar]
    make_inputs: Callable[[int], Any]
    truth: Callable[[Any], Tensor]
    participants: tuple[Participant, ...]
    flops: float = 0.0
    checked: Callable[[Any, Any], Tensor] = lambda inputs, result: value_of(result)
    is_cached: bool = False
    baseline: str | None = None


@dataclass(frozen=True)
class Suite:
    """The benchmarks of an op: sizes for a CPU and for a GPU, and how one of a size is made."""

    small: tuple[Any, ...]
    large: tuple[Any, ...]
    make: Callable[[Any, torch.device, Path | None], Benchmark]  # size, device, folder of peers


def seeded(device: torch.device, draw: Callable[[torch.Generator], Any]) -> Callable[[int], Any]:
    """The `make_inputs` that draws inputs on the device of the generator it is given."""
    return lambda seed: draw(torch.Generator(device).manual_seed(seed))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal values in BF16."""
    return torch.randn(shape, device=generator.device, generator=generator).bfloat16()


def timed_impls(op: str, device: torch.device) -> list[str]:
    """The implementations to time: on a GPU all but the reference, which stops to wait for it."""
    return [name for name in impl_names(op) if name != "reference" or device.type == "cpu"]


def our_impls(
    op: str,
    device: torch.device,
    operands: str,
    num_bytes: float,
    prepare: Callable[[str, Any], Call] | None = None,
) -> list[Participant]:
    """The implementations of an op; prepare: the call of one by name, or ops.<op>(*inputs)."""
    take = prepare or (lambda impl, inputs: partial(getattr(ops, op), *inputs, impl=impl))
    limit = MAX_ERROR[operands]
    return [
        Participant(name, operands, partial(take, name), limit, num_bytes)
        for name in timed_impls(op, device)
    ]


@dataclass(frozen=True)
class Objection:
    """Who could not take part, and why."""

    op: str
    name: str
    operands: str
    reason: str


def read_rows(texts: Sequence[str], dialect: Dialect, plain: Sequence[str]) -> list[Row]:
    """The rows of a benchmark of BF16 models; plain: the plain words that it knows."""
    rows = parse_rows(texts, dialect)
    if others := [row.name for row in rows if row.is_plain and row.name not in plain]:
        raise ConfigError(f"expected plain rows of {', '.join(plain)}; got {', '.join(others)}")
    return rows


@dataclass(frozen=True)
class Ceilings:
    """The fastest rates seen on this machine; FP8's is None where it has no FP8 products."""

    gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None = None

    def percent(self, operands: str, tflops: float, gb_per_s: float) -> float:
        """How much of the nearer ceiling a speed reaches."""
        peak = self.fp8_tflops if operands.startswith("FP8") else None
        return 100 * max(tflops / (peak or self.bf16_tflops), gb_per_s / self.gb_per_s)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure this machine's best: sum a large tensor, and multiply large matrices with torch."""
    is_gpu = device.type == "cuda"

    def median_ms(call: Call) -> float:
        (samples,) = sample_in_turn_ms([capture([call]) if is_gpu else call], device)
        return timing(samples)["median_ms"]

    size, num_values = (8192, 2**30) if is_gpu else (512, 2**24)
    x = torch.zeros(num_values // 8, dtype=torch.int64, device=device)
    gb_per_s = num_values / 1e6 / median_ms(x.sum)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    flops = 2.0 * size**3 / 1e9
    bf16_tflops = flops / median_ms(partial(torch.mm, a, b))
    fp8_tflops = None
    if is_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        fp8_tflops = flops / median_ms(partial(_scaled_mm, a8, b8, one, one, **options))
    return Ceilings(gb_per_s, bf16_tflops, fp8_tflops)


Entered = tuple[Participant, Call, dict[str, float]]  # who is right, with values of the record


def run_benchmark(
    benchmark: Benchmark,
    device: torch.device,
    command: str,
    ceilings: Ceilings | None = None,
    load_s: float | None = None,
    sample_s: float = math.inf,
) -> tuple[list[Measurement], list[Objection]]:
    """The records of all who took part, and who could not.

    ceilings: records say how much of the nearer one was reached. load_s: time each participant
    after it alone has loaded the GPU for so long, instead of all of them in turn. sample_s: about
    how long those in turn may take each.
    """
    if load_s is not None and device.type != "cuda":
        raise ConfigError(f"expected a GPU to measure under load, got {device.type}")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what graphs of the benchmark before had, peers cannot use
    benchmark = replace(benchmark, make_inputs=cache(benchmark.make_inputs))
    entered, objections = _enter(benchmark)
    for (one, _, values), (samples, seen) in zip(
        entered, _sample_all(benchmark, entered, device, load_s, 1e3 * sample_s), strict=True
    ):
        values |= timing(samples, flops=benchmark.flops, bytes=one.bytes) | seen
        if ceilings is not None:
            seconds = values["median_ms"] / 1e3
            tflops, gb_per_s = benchmark.flops / seconds / 1e12, one.bytes / seconds / 1e9
            values["of_ceiling_percent"] = ceilings.percent(one.operands, tflops, gb_per_s)
    in_bf16 = [
        (values["median_ms"], one.name)
        for one, _, values in entered
        if one.operands == "BF16" and benchmark.baseline in (None, one.name)
    ]
    baseline_ms, baseline = min(in_bf16, default=(math.nan, None))
    load = {} if load_s is None else {"load_s": load_s}
    record = partial(
        Measurement,
        op=benchmark.op,
        machine=machine_of(device),
        command=command,
        baseline=None if baseline is None else f"{baseline} BF16",
    )
    records = []
    for one, _, values in entered:
        if baseline is not None:
            values["speedup"] = baseline_ms / values["median_ms"]
        case = {**benchmark.case, **load, "operands": one.operands, **one.notes}
        records.append(record(impl=one.name, case=case, values=values))
    return records, objections


def _enter(benchmark: Benchmark) -> tuple[list[Entered], list[Objection]]:
    """Who gives what is right, with the error, and who cannot take part.

    Raises if one is wrong that is no peer.
    """
    inputs = benchmark.make_inputs(0)
    truth = benchmark.truth(inputs)
    entered: list[Entered] = []
    objections: list[Objection] = []
    for one in benchmark.participants:
        wanted = f"a relative error of at most {one.max_error} for {dict(benchmark.case)}"
        check = partial(expect_within, one.max_error, who=f"{benchmark.op} by {one.name}")
        refusals = (UnsupportedError, RuntimeError) if one.is_peer else (UnsupportedError,)
        try:
            call = one.prepare(inputs)
            error = relative_rms(benchmark.checked(inputs, call()), truth)
            if one.is_peer:
                check(error, what=wanted)
        except refusals as reason:
            text = str(reason).partition("\n")[0]
            objections.append(Objection(benchmark.op, one.name, one.operands, text))
            continue
        check(error, what=wanted)
        entered.append((one, call, {"relative_rms": error}))
    return entered, objections


def _sample_all(
    benchmark: Benchmark,
    entered: list[Entered],
    device: torch.device,
    load_s: float | None,
    limit_ms: float,
) -> list[tuple[list[float], dict[str, float]]]:
    """Milliseconds of everyone's calls, taken in turn unless under load, and what else was seen."""
    if device.type != "cuda":
        in_turn = sample_in_turn_ms([call for _, call, _ in entered], device, limit_ms=limit_ms)
        return [(samples, {}) for samples in in_turn]
    sets = [_calls(benchmark, one, call) for one, call, _ in entered]
    graphs = [capture(calls) for calls in sets]
    sampled: list[tuple[list[float], dict[str, float]]]
    if load_s is None:
        in_turn = sample_in_turn_ms(graphs, device, limit_ms=limit_ms)
        sampled = [(samples, {}) for samples in in_turn]
    else:
        sampled = [sample_sustained_ms(graph, load_s=load_s) for graph in graphs]
    return [
        ([ms / len(calls) for ms in samples], seen)
        for calls, (samples, seen) in zip(sets, sampled, strict=True)
    ]


def _calls(benchmark: Benchmark, participant: Participant, call: Call) -> list[Call]:
    """One call for each set of inputs, again and again until a graph of them is long enough."""
    num_sets = CACHED_SETS
    if not benchmark.is_cached:
        num_sets = min(MAX_SETS, max(1, math.ceil(ROTATED_BYTES / participant.bytes)))
    more = [participant.prepare(benchmark.make_inputs(seed)) for seed in range(1, num_sets)]
    calls = [call, *more]
    if benchmark.is_cached:
        calls = [partial(_dropped, one) for one in calls]
    (samples,) = sample_in_turn_ms(
        [capture(calls)], torch.device("cuda"), warmup_ms=0.0, num_samples=3
    )
    return calls * max(1, min(math.ceil(MIN_GRAPH_MS / min(samples)), MAX_CALLS // len(calls)))


def _dropped(call: Call) -> None:
    """A call whose result is dropped: the next one has its memory."""
    call()
