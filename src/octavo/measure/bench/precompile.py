"""Compiling kernels in many processes before they are timed one after the other.

Each task runs one call, so that Triton's cache on disk has what the timing process will need.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import UnsupportedError

# Every process holds its own inputs on the GPU.
MAX_JOBS = 12


@dataclass(frozen=True)
class Task:
    """One call: a contender of a benchmark, or with `is_search` a candidate of a search."""

    op: str
    index: int
    entry: int
    peers: Path | None = None
    is_search: bool = False


def tasks_of_benchmarks(op: str, peers: Path | None) -> list[Task]:
    """One task for each contender of each benchmark of an op."""
    from octavo.kernels.device import default_device
    from octavo.measure.bench.kernels import benchmarks

    found = benchmarks(default_device().torch_device, [op], peers)
    return [
        Task(op, index, entry, peers)
        for index, benchmark in enumerate(found)
        for entry in range(len(benchmark.contenders))
    ]


def tasks_of_searches(op: str) -> list[Task]:
    """One task for each candidate of each search of an op."""
    from octavo.kernels.device import default_device
    from octavo.measure.bench.tune import searches

    return [
        Task(op, index, entry, is_search=True)
        for index, search in enumerate(searches(op, default_device()))
        for entry in range(len(search.configs))
    ]


def precompile(tasks: list[Task], jobs: int) -> Iterator[Task]:
    """Run all tasks, up to `jobs` at a time; yields each as it ends. A task that fails raises."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(min(jobs, MAX_JOBS), mp_context=context) as pool:
        futures = {pool.submit(run_task, task): task for task in tasks}
        for future in as_completed(futures):
            future.result()
            yield futures[future]


def run_task(task: Task) -> None:
    """The call of one task, if this machine can run it."""
    import torch

    from octavo.kernels.device import default_device
    from octavo.measure.bench.kernels import benchmarks
    from octavo.measure.bench.tune import searches

    device = default_device()
    try:
        if task.is_search:
            search = searches(task.op, device)[task.index]
            search.prepare(search.configs[task.entry], search.benchmark.make_inputs(0))()
        else:
            benchmark = benchmarks(device.torch_device, [task.op], task.peers)[task.index]
            benchmark.contenders[task.entry].prepare(benchmark.make_inputs(0))()
    except UnsupportedError:
        return  # listed when the benchmark itself runs
    finally:
        if device.capability is not None:
            torch.cuda.empty_cache()
