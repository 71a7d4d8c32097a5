"""How long a call takes: warm-up, then repeated samples on the device's own clock."""

import time
from collections.abc import Callable

import torch

from octavo.errors import ConfigError


def sample_ms(
    call: Callable[[], object],
    device: torch.device,
    *,
    warmup_ms: float = 50.0,
    budget_ms: float = 300.0,
    min_samples: int = 5,
    max_samples: int = 1000,
) -> list[float]:
    """Milliseconds of single calls: at least `min_samples`, then until the budget is spent.

    On a GPU each call is timed by events on its stream, so that launching is not counted.
    """
    if not 1 <= min_samples <= max_samples:
        raise ConfigError(
            f"expected 1 ≤ min_samples ≤ max_samples, got {min_samples} and {max_samples}"
        )
    once = _once_cuda if device.type == "cuda" else _once_cpu
    _repeat(call, once, budget_ms=warmup_ms, min_samples=1, max_samples=max_samples)
    return _repeat(
        call, once, budget_ms=budget_ms, min_samples=min_samples, max_samples=max_samples
    )


def sample_graph_ms(
    calls: list[Callable[[], object]], *, warmup_ms: float = 60.0, num_samples: int = 15
) -> list[float]:
    """Milliseconds of one call on a GPU, from replays of a CUDA graph that holds all `calls`.

    For kernels shorter than their launch. Calls with inputs of their own, more than the L2 cache
    holds together, find nothing in it. The warm-up brings the clocks up: on an H200 a decode of
    130 µs takes up to 17 µs longer without it.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # so that no result takes another's memory
    device = torch.device("cuda")
    samples = sample_ms(
        graph.replay,
        device,
        warmup_ms=warmup_ms,
        budget_ms=0.0,
        min_samples=num_samples,
        max_samples=max(num_samples, 10_000),
    )
    return [sample / len(kept) for sample in samples]


def _repeat(
    call: Callable[[], object],
    once: Callable[[Callable[[], object]], float],
    *,
    budget_ms: float,
    min_samples: int,
    max_samples: int,
) -> list[float]:
    samples: list[float] = []
    while len(samples) < max_samples and (len(samples) < min_samples or sum(samples) < budget_ms):
        samples.append(once(call))
    return samples


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
