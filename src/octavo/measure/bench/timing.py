"""How long a call takes: warm-up, then repeated samples on the device's own clock."""

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from octavo.errors import UnsupportedError
from octavo.kernels.device import describe
from octavo.measure.bench.expect import expect
from octavo.measure.records import Machine, timing

MIN_SAMPLES = 3  # of a call, however long it takes
Name = TypeVar("Name", bound=Hashable)


def machine_of(device: torch.device | str) -> Machine:
    """What records say of the machine, and of this device of it."""
    described = describe(device)
    return Machine.current(gpu=described.gpu, capability=described.capability)


def capture(calls: list[Callable[[], object]]) -> Callable[[], None]:
    """All `calls` as one CUDA graph to be replayed, for kernels shorter than their launch.

    Calls with inputs of their own, more than the L2 cache holds together, find nothing in it.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # kept, so that none takes another's memory
    kept = (calls, results)  # what the calls read must stay where it was

    def replay(graph: torch.cuda.CUDAGraph = graph, kept: object = kept) -> None:
        graph.replay()

    return replay


def sample_in_turn_ms(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    warmup_ms: float = 60.0,
    num_samples: int = 15,
    limit_ms: float = math.inf,
) -> list[list[float]]:
    """Milliseconds of single calls, each in turn, so that what drifts does so for all of them.

    On a GPU each is timed by events on its stream, so that launching is not counted. The warm-up
    brings the clocks up. limit_ms: no more samples once those of one call took so long together.
    """
    once = _once_cuda if device.type == "cuda" else _once_cpu
    spent = 0.0
    while calls and spent < warmup_ms:
        spent += sum(once(call) for call in calls)
    rounds: list[list[float]] = []
    for _ in range(num_samples):
        rounds.append([once(call) for call in calls])
        longest = max(map(sum, zip(*rounds, strict=True)), default=0.0)
        if len(rounds) >= MIN_SAMPLES and longest >= limit_ms:
            break
    return [list(samples) for samples in zip(*rounds, strict=True)]


def fastest(calls: Mapping[Name, Callable[[], object]], device: torch.device) -> Name:
    """The name of the call with the shortest median."""
    samples = sample_in_turn_ms(list(calls.values()), device, num_samples=5)
    medians = dict(zip(calls, map(statistics.median, samples), strict=True))
    return min(medians, key=lambda name: medians[name])


def sample_sustained_ms(
    call: Callable[[], object], *, load_s: float, num_samples: int = 15
) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of a call that has had the GPU to itself for `load_s` seconds.

    Beside them the values sm_mhz and watts of a record: by then the clock is what the power limit
    leaves for this call, as in a model that makes no other.
    """
    expect(load_s > 0, "a load of more than 0 seconds", load_s)
    started = time.monotonic()
    while time.monotonic() - started < load_s:
        _once_cuda(call)
    samples = [_once_cuda(call) for _ in range(num_samples)]
    sm_mhz, watts = _meter(call)
    return samples, {"sm_mhz": sm_mhz, "watts": watts}


def time_alone(
    call: Callable[[], object], device: torch.device, *, num_samples: int
) -> dict[str, float]:
    """Values of a record: times of a call by itself and, on a GPU, its clock and power.

    A GPU is loaded with the call for a second first.
    """
    if device.type != "cuda":
        return timing(*sample_in_turn_ms([call], device, warmup_ms=0.0, num_samples=3))
    samples, seen = sample_sustained_ms(call, load_s=1.0, num_samples=num_samples)
    return timing(samples) | seen


def _meter(call: Callable[[], object]) -> tuple[float, float]:
    """The GPU's clock in MHz and its power in W, read while `call` runs again and again."""
    uuid = torch.cuda.get_device_properties().uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.sm,power.draw"]
    try:
        meter = subprocess.Popen(
            [*query, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        raise UnsupportedError("expected nvidia-smi to read the clock, got none in PATH") from None
    while meter.poll() is None:
        _once_cuda(call)
    text, _ = meter.communicate()
    try:
        sm_mhz, watts = map(float, text.split(","))
    except ValueError:
        raise UnsupportedError(f"expected clock and power of nvidia-smi, got {text!r}") from None
    return sm_mhz, watts


def _once_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _once_cuda(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))
