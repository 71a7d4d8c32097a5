"""Finding launch settings: every candidate checked and timed, the winner kept as data."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import tuning
from octavo.kernels.attention import config as attention_config
from octavo.kernels.device import Device
from octavo.measure.bench import attention
from octavo.measure.bench.benchmark import Benchmark, Contender, run_benchmark
from octavo.measure.records import Measurement
from octavo.numerics.attention import AttentionSpec

# A winner must beat the default by more than two runs of one kernel differ.
MARGIN = 1.02


@dataclass(frozen=True)
class Search:
    """The settings that one problem may have, as a benchmark with a contender for each."""

    op: str
    problem: str
    default: Any
    benchmark: Benchmark
    configs: dict[str, Any]  # name of the contender -> settings


def searches(op: str, device: Device) -> list[Search]:
    """What can be tuned for an op."""
    known: dict[str, Callable[[Device], list[Search]]] = {"attention": _attention_searches}
    if op not in known:
        raise ConfigError(
            f"expected an op with settings to tune, one of {', '.join(known)}; got {op!r}"
        )
    if device.capability is None:
        raise UnsupportedError(f"settings are tuned on the GPU they are for, got {device.name}")
    return known[op](device)


def tune(search: Search, device: Device, folder: Path, command: str) -> list[Measurement]:
    """Time all candidates; keep the fastest if it beats the default. Returns their records."""
    records, _ = run_benchmark(search.benchmark, device.torch_device, command)
    times = {record.impl: record.values["median_ms"] for record in records}
    fastest = min(times, key=lambda name: times[name])
    default_name = _name(search.default)
    is_better = times[default_name] > MARGIN * times[fastest]
    winner = fastest if is_better else default_name
    tuning.save(search.op, search.problem, device, search.configs[winner], folder)
    return [
        replace(record, case={**record.case, "is_winner": record.impl == winner})
        for record in records
    ]


def _name(config: Any) -> str:
    return "x".join(map(str, astuple(config)))


def _attention_searches(device: Device) -> list[Search]:
    return list(_attention_search(device))


def _attention_search(device: Device) -> Iterator[Search]:
    for size, benchmark in zip(
        attention.LARGE, attention.benchmarks(device.torch_device, None), strict=True
    ):
        *_, length, _, _, head_dim, is_causal = size
        if is_causal:
            continue  # tiles and warps are those of the same head_dim without
        shape = attention_config.AttentionShape(torch.float8_e4m3fn, head_dim, length)
        default = attention_config.default(shape, device)
        configs = {
            _name(config): config
            for config in dict.fromkeys([default, *attention_config.candidates(shape, device)])
        }
        num_bytes = benchmark.contenders[0].bytes
        contenders = tuple(
            Contender(name, "FP8", partial(_attend, config), attention.MAX_ERROR["FP8"], num_bytes)
            for name, config in configs.items()
        )
        problem = attention_config.problem(shape)
        one = replace(benchmark, contenders=contenders)
        yield Search("attention", problem, default, one, configs)


def _attend(
    config: attention_config.AttentionConfig, inputs: attention.Inputs
) -> Callable[[], torch.Tensor]:
    from octavo import ops
    from octavo.kernels.attention.triton import attention as run

    qkv = ops.quantize_qkv(*inputs, value_layout="transposed")

    def call() -> torch.Tensor:
        out, _ = run(
            *(qkv.q, qkv.k, qkv.v, AttentionSpec(), qkv.scales),
            packing=None,
            sinks=None,
            key_mask=None,
            out_dtype=torch.bfloat16,
            value_layout=qkv.value_layout,
            config=config,
        )
        return out

    return call
