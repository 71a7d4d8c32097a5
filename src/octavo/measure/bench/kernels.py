"""All benchmarks of `octavo bench kernels`, by op, and the search for launch settings.

A search checks and times every candidate, and keeps the winner as data. `precompile` runs one call
each in many processes, so that Triton's cache on disk has what the timing process will need.
"""

import multiprocessing
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import UnsupportedError
from octavo.kernels import tuning
from octavo.kernels.append_kv import config as append_config
from octavo.kernels.attention import config as attention_config
from octavo.kernels.device import Device, default_device
from octavo.kernels.quantize import config as quantize_config
from octavo.kernels.scaled_mm import config as scaled_mm_config
from octavo.measure.bench import attention, linear, paged_attention
from octavo.measure.bench.benchmark import Benchmark, Call, Suite, run_benchmark
from octavo.measure.bench.expect import expect, expect_one_of
from octavo.measure.bench.peers import Inputs
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerChannel, PerToken
from octavo.ops.select import forget_calls

SUITES: dict[str, Suite] = {
    "append_kv": linear.APPEND_KV,
    "attention": attention.ATTENTION,
    "attention_grid": attention.ATTENTION_GRID,
    "attention_levels": attention.ATTENTION_LEVELS,
    "decode_attention": paged_attention.DECODE_ATTENTION,
    "encoder_attention": attention.ENCODER_ATTENTION,
    "linear_gelu": linear.LINEAR_GELU,
    "matvec": linear.MATVEC,
    "packed_attention": attention.PACKED_ATTENTION,
    "prefill_attention": paged_attention.PREFILL_ATTENTION,
    "quantize": linear.QUANTIZE,
    "quantize_qkv": linear.QUANTIZE_QKV,
    "scaled_mm": linear.SCALED_MM,
}

# All but those that run where they are asked for: many shapes, and choices that few make.
USUAL = [name for name in SUITES if name not in ("attention_grid", "attention_levels")]


def benchmarks(
    device: torch.device,
    names: list[str] | None = None,
    peers: Path | None = None,
    shapes: Sequence[str] = (),
) -> list[Benchmark]:
    """The benchmarks of some ops, or of the usual ones.

    peers: a folder with other libraries' kernels. shapes: only those with one of these words.
    """
    expect_one_of("an op, one", SUITES, *(names or ()))
    suites = [SUITES[name] for name in names or USUAL]
    is_large = device.type == "cuda"
    found = [
        suite.make(size, device, peers)
        for suite in suites
        for size in (suite.large if is_large else suite.small)
    ]
    words = re.compile("|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in shapes))
    known = [str(one.case["shape"]) for one in found]
    chosen = [one for one, shape in zip(found, known, strict=True) if words.search(shape)]
    expect(bool(chosen), f"words of a shape, such as {known[0]!r}", ", ".join(shapes))
    return chosen


def records_of(
    benchmark: Benchmark,
    records: Collection[Measurement],
    machine: Machine,
    load_s: float | None = None,
) -> list[Measurement]:
    """A benchmark's records among these, from the same GPU and versions."""

    def place(machine: Machine) -> object:
        return machine.gpu or machine.cpu, machine.versions

    return [
        record
        for record in records
        if (record.op, record.case.get("load_s")) == (benchmark.op, load_s)
        and "problem" not in record.case  # of a search
        and benchmark.case.items() <= record.case.items()
        and place(record.machine) == place(machine)
    ]


# A winner must beat the default by more than two runs of one kernel differ.
MARGIN = 1.02
# Every process that compiles holds its own inputs on the GPU.
MAX_JOBS = 12
Problem = tuple[str, list[Any]]  # its name, and the settings it may have, the default first


@dataclass(frozen=True)
class Search:
    """A benchmark whose participants are the settings that one problem may have.

    configs: the settings by the names of the participants, the default first.
    """

    problem: str
    benchmark: Benchmark
    configs: Mapping[str, Any]

    @staticmethod
    def of(problem: Problem, benchmark: Benchmark, prepare: Callable[[Any, Any], Call]) -> "Search":
        """The search with a benchmark's inputs; prepare: (settings, inputs) -> call."""
        name, configs = problem
        named = {name_of(config): config for config in configs}
        like = benchmark.participants[0]
        candidates = tuple(
            replace(like, name=word, prepare=partial(prepare, config))
            for word, config in named.items()
        )
        return Search(name, replace(benchmark, participants=candidates), named)


def searches(op: str, device: Device) -> list[Search]:
    """What can be tuned for an op."""
    expect_one_of("an op with settings to tune, one", SEARCHES, op)
    if device.capability is None:
        raise UnsupportedError(f"settings are tuned on the GPU they are for, got {device.name}")
    find_problem, prepare = SEARCHES[op]
    return [
        Search.of(problem, SUITES[op].make(size, device.torch_device, None), prepare)
        for size in SUITES[op].large
        if (problem := find_problem(size, device)) is not None
    ]


def tune(search: Search, device: Device, folder: Path, command: str) -> list[Measurement]:
    """Time all candidates; the fastest wins if it beats the default. Returns their records."""
    records, _ = run_benchmark(search.benchmark, device.torch_device, command)
    times = {record.impl: record.values["median_ms"] for record in records}
    fastest, default = min(times, key=lambda name: times[name]), next(iter(search.configs))
    winner = fastest if times[default] > MARGIN * times[fastest] else default
    tuning.save(search.benchmark.op, search.problem, device, search.configs[winner], folder)
    forget_calls()  # those that were taped have the settings of before
    found = []
    for record in records:
        case = {**record.case, "problem": search.problem, "is_winner": record.impl == winner}
        found.append(replace(record, case=case))
    return found


def name_of(config: Any) -> str:
    """Settings as one word: their numbers in order."""
    return "x".join(str(int(number)) for number in astuple(config))


def _attention_problem(size: attention.Size, device: Device) -> Problem | None:
    if size.is_causal:
        return None  # its tiles are those of the same head_dim without
    shape = attention_config.AttentionShape(E4M3.dtype, size.head_dim, max(size.lengths))
    default = attention_config.default(shape, device)
    configs = list(dict.fromkeys([default, *attention_config.candidates(shape, device)]))
    return attention_config.problem(shape), configs


def _attend(config: attention_config.AttentionConfig, inputs: Inputs) -> Call:
    from octavo.kernels.attention.triton import attention as run

    qkv = ops.quantize_qkv(*inputs.qkv, value_layout="transposed")
    options: Any = {"packing": None, "sinks": None, "key_mask": None, "out_dtype": torch.bfloat16}
    options |= {"value_layout": qkv.value_layout, "config": config}

    def call() -> Tensor:
        return run(qkv.q, qkv.k, qkv.v, AttentionSpec(), qkv.scales, **options)[0]

    return call


def _quantize_problem(size: Any, device: Device) -> Problem | None:
    name = quantize_config.problem(size, PerToken())
    assert name is not None
    return name, quantize_config.candidates(size, PerToken())


def _quantize(config: quantize_config.QuantizeConfig, inputs: Any) -> Call:
    from octavo.kernels.quantize.triton import quantize as run

    x, granularity = inputs
    options: Any = {"scale": None, "margin": 1.0, "power_of_two": False, "config": config}
    return partial(run, x, granularity, E4M3, **options)


def _scaled_mm_problem(size: Any, device: Device) -> Problem | None:
    """Few rows, the activation quantized in front."""
    shape = scaled_mm_config.MatmulShape(*size)
    name = scaled_mm_config.problem(shape, 0, is_fp8=True)
    if name is None or shape.rows != 16:
        return None  # from 1 to 16 rows the tile is the same
    return name, list(scaled_mm_config.candidates(shape, device, 0, is_fp8=True))


def _scaled_mm(config: Any, inputs: linear.Operands) -> Call:
    from octavo.kernels.scaled_mm.triton import scaled_mm as run

    weight = ops.quantize(inputs.b, PerChannel())
    options = {"out_dtype": torch.bfloat16, "activation": PerToken(), "config": config}
    return partial(run, inputs.a, weight, inputs.bias, **options)


def _append_problem(num_tokens: Any, device: Device) -> Problem | None:
    group = linear.NUM_HEADS // linear.NUM_KV_HEADS
    heads = (linear.NUM_KV_HEADS, group, linear.HEAD_DIM)
    default = append_config.default(device, *heads)
    configs = list(dict.fromkeys([default, *append_config.candidates(device)]))
    return append_config.problem(num_tokens, *heads), configs


def _append(config: append_config.AppendConfig, inputs: linear.NewTokens) -> Call:
    from octavo.kernels.append_kv.triton import append_kv as run

    return inputs.append(run, config=config)


SEARCHES: dict[str, tuple[Callable[[Any, Device], Problem | None], Callable[[Any, Any], Call]]] = {
    "append_kv": (_append_problem, _append),
    "attention": (_attention_problem, _attend),
    "quantize": (_quantize_problem, _quantize),
    "scaled_mm": (_scaled_mm_problem, _scaled_mm),
}


@dataclass(frozen=True)
class Task:
    """One call to compile: a participant of a benchmark, or with `is_search` a candidate."""

    op: str
    index: int
    entry: int
    peers: Path | None = None
    is_search: bool = False


def tasks(
    op: str,
    peers: Path | None = None,
    *,
    is_search: bool = False,
    cases: Collection[Mapping[str, Scalar]] | None = None,
) -> list[Task]:
    """One task for each participant but peers of each benchmark of an op, or of each search.

    cases: only those of these benchmarks.
    """
    return [
        Task(op, index, entry, peers, is_search)
        for index, benchmark in enumerate(_benchmarks(op, peers, is_search))
        if cases is None or benchmark.case in cases
        for entry, one in enumerate(benchmark.participants)
        if not one.is_peer
    ]


def _benchmarks(op: str, peers: Path | None, is_search: bool) -> list[Benchmark]:
    device = default_device()
    if is_search:
        return [search.benchmark for search in searches(op, device)]
    return benchmarks(device.torch_device, [op], peers)


def precompile(tasks: list[Task], jobs: int) -> Iterator[Task]:
    """Run all tasks, up to `jobs` at a time; yields each as it ends. A task that fails raises."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(min(jobs, MAX_JOBS), mp_context=context) as pool:
        for future in as_completed([pool.submit(run_task, task) for task in tasks]):
            yield future.result()


def run_task(task: Task) -> Task:
    """The call of one task, if this machine can run it."""
    try:
        benchmark = _benchmarks(task.op, task.peers, task.is_search)[task.index]
        benchmark.participants[task.entry].prepare(benchmark.make_inputs(0))()
    except UnsupportedError:
        pass  # listed when the benchmark itself runs
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return task
