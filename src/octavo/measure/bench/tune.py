"""Finding launch settings: every candidate checked and timed, the winner kept as data."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import tuning
from octavo.kernels.append_kv import config as append_config
from octavo.kernels.attention import config as attention_config
from octavo.kernels.device import Device
from octavo.kernels.quantize import config as quantize_config
from octavo.kernels.scaled_mm import config as scaled_mm_config
from octavo.measure.bench import append_kv, attention, quantize, scaled_mm
from octavo.measure.bench.benchmark import Benchmark, run_benchmark
from octavo.measure.records import Measurement
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerChannel, PerToken
from octavo.numerics.quantize import Quantized

# A winner must beat the default by more than two runs of one kernel differ.
MARGIN = 1.02
Call = Callable[[], Any]


@dataclass(frozen=True)
class Search:
    """The settings that one problem may have, the default first, and how to run with them."""

    op: str
    problem: str
    benchmark: Benchmark
    configs: list[Any]
    prepare: Callable[[Any, Any], Call]  # (settings, inputs) -> call


def searches(op: str, device: Device) -> list[Search]:
    """What can be tuned for an op."""
    if op not in SEARCHES:
        expected = ", ".join(SEARCHES)
        raise ConfigError(f"expected an op with settings to tune, one of {expected}; got {op!r}")
    if device.capability is None:
        raise UnsupportedError(f"settings are tuned on the GPU they are for, got {device.name}")
    return SEARCHES[op](device)


def tune(search: Search, device: Device, folder: Path, command: str) -> list[Measurement]:
    """Time all candidates; the fastest wins if it beats the default. Returns their records."""
    names = {name_of(config): config for config in search.configs}
    like = search.benchmark.contenders[0]
    contenders = tuple(
        replace(like, name=name, prepare=partial(search.prepare, config))
        for name, config in names.items()
    )
    timed = replace(search.benchmark, contenders=contenders)
    records, _ = run_benchmark(timed, device.torch_device, command)
    times = {record.impl: record.values["median_ms"] for record in records}
    fastest, default = min(times, key=lambda name: times[name]), name_of(search.configs[0])
    winner = fastest if times[default] > MARGIN * times[fastest] else default
    tuning.save(search.op, search.problem, device, names[winner], folder)
    return [_tried(record, search.problem, record.impl == winner) for record in records]


def name_of(config: Any) -> str:
    """Settings as one word: their numbers in order."""
    return "x".join(str(int(number)) for number in astuple(config))


def _tried(record: Measurement, problem: str, is_winner: bool) -> Measurement:
    return replace(record, case={**record.case, "problem": problem, "is_winner": is_winner})


def _attention_searches(device: Device) -> list[Search]:
    found = []
    sizes = attention.LARGE
    for size, benchmark in zip(sizes, attention.benchmarks(device.torch_device, None), strict=True):
        _, length, _, _, head_dim, is_causal = size
        if is_causal:
            continue  # its tiles are those of the same head_dim without
        shape = attention_config.AttentionShape(torch.float8_e4m3fn, head_dim, length)
        default = attention_config.default(shape, device)
        configs = list(dict.fromkeys([default, *attention_config.candidates(shape, device)]))
        name = attention_config.problem(shape)
        found.append(Search("attention", name, benchmark, configs, _attend))
    return found


def _attend(
    config: attention_config.AttentionConfig, inputs: attention.Inputs
) -> Callable[[], Tensor]:
    from octavo.kernels.attention.triton import attention as run

    qkv = ops.quantize_qkv(*inputs, value_layout="transposed")

    def call() -> Tensor:
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


def _quantize_searches(device: Device) -> list[Search]:
    found = []
    benchmarks = quantize.benchmarks(device.torch_device, None)
    for size, benchmark in zip(quantize.LARGE, benchmarks, strict=True):
        name = quantize_config.problem(size, PerToken())
        assert name is not None
        configs = quantize_config.candidates(size, PerToken())
        found.append(Search("quantize", name, benchmark, configs, _quantize))
    return found


def _quantize(config: quantize_config.QuantizeConfig, x: Tensor) -> Callable[[], Quantized]:
    from octavo.kernels.quantize.triton import quantize as run

    return partial(
        run, x, PerToken(), E4M3, scale=None, margin=1.0, power_of_two=False, config=config
    )


def _scaled_mm_searches(device: Device) -> list[Search]:
    """Few rows, the activation quantized in front."""
    found = []
    benchmarks = scaled_mm.benchmarks(device.torch_device, None)
    for size, benchmark in zip(scaled_mm.LARGE, benchmarks, strict=True):
        shape = scaled_mm_config.MatmulShape(*size)
        name = scaled_mm_config.problem(shape, 0, is_fp8=True)
        if name is None or shape.rows != 16:
            continue  # from 1 to 16 rows the tile is the same
        configs = scaled_mm_config.candidates(shape, device, 0, is_fp8=True)
        found.append(Search("scaled_mm", name, benchmark, list(configs), _scaled_mm))
    return found


def _scaled_mm(config: Any, inputs: scaled_mm.Inputs) -> Callable[[], Tensor]:
    from octavo.kernels.scaled_mm.triton import scaled_mm as run

    weight = ops.quantize(inputs.b, PerChannel())
    options = {"out_dtype": torch.bfloat16, "activation": PerToken(), "config": config}
    return partial(run, inputs.a, weight, inputs.bias, **options)


def _append_searches(device: Device) -> list[Search]:
    found = []
    benchmarks = append_kv.benchmarks(device.torch_device, None)
    group = append_kv.NUM_HEADS // append_kv.NUM_KV_HEADS
    heads = (append_kv.NUM_KV_HEADS, group, append_kv.HEAD_DIM)
    for num_tokens, benchmark in zip(append_kv.NUM_TOKENS, benchmarks, strict=True):
        name = append_config.problem(num_tokens, *heads)
        default = append_config.default(device, *heads)
        configs = list(dict.fromkeys([default, *append_config.candidates(device)]))
        found.append(Search("append_kv", name, benchmark, configs, _append))
    return found


def _append(
    config: append_config.AppendConfig, inputs: append_kv.Inputs
) -> Callable[[], tuple[Tensor, append_kv.Inputs]]:
    from octavo.kernels.append_kv.triton import append_kv as run

    def call() -> tuple[Tensor, append_kv.Inputs]:
        query = run(
            *(inputs.view, inputs.key, inputs.value, inputs.slots),
            query=inputs.query,
            rotary=inputs.rotary,
            config=config,
        )
        assert query is not None
        return query, inputs

    return call


SEARCHES: dict[str, Callable[[Device], list[Search]]] = {
    "append_kv": _append_searches,
    "attention": _attention_searches,
    "quantize": _quantize_searches,
    "scaled_mm": _scaled_mm_searches,
}
