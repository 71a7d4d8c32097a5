"""What one eager call costs the host: octavo's calls on tiny tensors, beside torch's own.

On a GPU the clock stops when everything is launched, before the GPU is waited for. On a CPU a
call's time includes its work, so budgets do not apply.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import ops
from octavo.layers.linear import Fp8Linear
from octavo.measure.bench.benchmark import MAX_ERROR, Call, normal
from octavo.measure.bench.expect import expect_within
from octavo.measure.bench.timing import machine_of
from octavo.measure.records import Measurement, timing
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import relative_rms
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerTensor
from octavo.numerics.qkv import QuantizedQkv
from octavo.numerics.quantize import dequantize
from octavo.numerics.value_layout import ValueLayout
from octavo.recipe import LinearSettings
from octavo.reference.paged import paged_attention
from octavo.testing.cases import PagedCase
from octavo.testing.inputs import make_decode_inputs

FEATURES = 1024
ROWS = (1, 16, 512)
NUM_HEADS, HEAD_DIM, NUM_TOKENS = 8, 64, 128
NUM_SEQUENCES, CONTEXT = 2, 100
# The unit that budgets count in.
UNIT = f"F.linear, 16 x {FEATURES}"
LINEAR_BUDGET, VISION_BUDGET, DECODE_BUDGET, PLAN_BUDGET = 3.5, 7.0, 6.0, 2.5
# How many calls are launched before the GPU is waited for; its queue holds about 1,000 kernels.
NUM_LAUNCHED = {"cuda": 100, "cpu": 3}
NUM_ROUNDS = {"cuda": 15, "cpu": 3}


@dataclass(frozen=True)
class HostCall:
    """A call on tiny tensors, how right it must be, and what it may cost.

    truth: what `checked` should make of the call's result. max_error: relative RMS. budget: how
    many times as long as `UNIT` the call may take; None for torch's calls and for parts of others.
    """

    impl: str
    name: str
    call: Call
    truth: Tensor
    max_error: float
    checked: Callable[[Any], Tensor] = lambda result: result
    budget: float | None = None

    def error(self) -> float:
        """The relative error of a first call; raises if the call is wrong."""
        error = relative_rms(self.checked(self.call()), self.truth)
        return expect_within(self.max_error, error, f"{self.name} by {self.impl}")


def run_host(device: torch.device, command: str) -> list[Measurement]:
    """The records of all calls; every result is checked first."""
    with torch.inference_mode():
        calls = host_calls(device)
        errors = [one.error() for one in calls]
        samples = _sample_us([one.call for one in calls], device)
    times = [{n.replace("_ms", "_us"): x for n, x in timing(own).items()} for own in samples]
    units = [own["median_us"] for one, own in zip(calls, times, strict=True) if one.name == UNIT]
    machine = machine_of(device)
    records = []
    for one, error, values in zip(calls, errors, times, strict=True):
        values |= {"over_linear": values["median_us"] / units[0], "relative_rms": error}
        if one.budget is not None and device.type == "cuda":
            values["budget"] = one.budget
        records.append(
            Measurement(
                op="host",
                impl=one.impl,
                case={"call": one.name, "device": device.type},
                values=values,
                machine=machine,
                command=command,
                baseline=UNIT,
            )
        )
    return records


def host_calls(device: torch.device) -> list[HostCall]:
    """All calls, each with inputs made for it."""
    generator = torch.Generator(device).manual_seed(0)
    return [call for make in (_linear, _vision, _decoding) for call in make(generator, device.type)]


def _sample_us(calls: list[Call], device: torch.device) -> list[list[float]]:
    """Microseconds of each call: means of many launches, one for each of several rounds."""
    num_launched = NUM_LAUNCHED[device.type]

    def once(call: Call) -> float:
        start = time.perf_counter()
        for _ in range(num_launched):
            call()
        spent_us = (time.perf_counter() - start) * 1e6
        if device.type == "cuda":
            torch.cuda.synchronize()
        return spent_us / num_launched

    for call in calls:  # what first calls compile and allocate does not count
        once(call)
    rounds = [[once(call) for call in calls] for _ in range(NUM_ROUNDS[device.type])]
    return [list(samples) for samples in zip(*rounds, strict=True)]


def _linear(generator: torch.Generator, device: str) -> list[HostCall]:
    plain = nn.Linear(FEATURES, FEATURES, device=device, dtype=torch.bfloat16)
    nn.init.normal_(plain.weight, generator=generator)
    inputs = {rows: normal(generator, rows, FEATURES) for rows in ROWS}
    scale = float(max(x.abs().max() for x in inputs.values())) / E4M3.max
    static = LinearSettings(scaling="static")
    layers = {
        "F.linear": plain,
        "Fp8Linear dynamic": Fp8Linear.from_linear(plain, LinearSettings()),
        "Fp8Linear static": Fp8Linear.from_linear(plain, static, input_scale=scale),
    }

    def entry(name: str, rows: int) -> HostCall:
        layer, x, is_ours = layers[name], inputs[rows], name != "F.linear"
        truth = F.linear(x.double(), plain.weight.double(), plain.bias.double())
        return HostCall(
            "octavo" if is_ours else "torch",
            f"{name}, {rows} x {FEATURES}",
            partial(layer, x),
            truth,
            MAX_ERROR["FP8" if is_ours else "BF16"],
            budget=LINEAR_BUDGET if is_ours else None,
        )

    x = inputs[16]
    add = HostCall("torch", f"add, 16 x {FEATURES}", partial(torch.add, x, x), 2 * x, 0.0)
    return [add, *(entry(name, rows) for name in layers for rows in ROWS)]


def _vision(generator: torch.Generator, device: str) -> list[HostCall]:
    q, k, v = (normal(generator, 1, NUM_TOKENS, NUM_HEADS, HEAD_DIM) for _ in range(3))
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    query, key, value = (x.double() for x in heads_first)
    truth = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    # As EncoderAttention stores values.
    layout: ValueLayout = "transposed" if device == "cuda" else "rows"
    quantize: Callable[..., QuantizedQkv] = partial(ops.quantize_qkv, q, k, v, value_layout=layout)
    known = quantize()

    def attend(qkv: QuantizedQkv) -> Tensor:
        spec = AttentionSpec()
        return ops.attention(qkv.q, qkv.k, qkv.v, spec, qkv.scales, value_layout=layout)

    def queries(qkv: QuantizedQkv) -> Tensor:
        return dequantize(qkv.q, qkv.scales.q, PerTensor())

    def entry(name: str, call: Call, budget: float | None = None) -> HostCall:
        return HostCall("octavo", name, call, truth, MAX_ERROR["FP8"], budget=budget)

    limit = MAX_ERROR["BF16 to FP8"]
    sdpa = partial(F.scaled_dot_product_attention, *heads_first)
    pair = "quantize_qkv {} + attention"
    return [
        HostCall("torch", "SDPA", sdpa, truth.transpose(1, 2), MAX_ERROR["BF16"]),
        HostCall("octavo", "quantize_qkv dynamic", quantize, q, limit, queries),
        HostCall(
            "octavo", "quantize_qkv static", partial(quantize, known.scales), q, limit, queries
        ),
        entry("attention", partial(attend, known)),
        entry(pair.format("dynamic"), lambda: attend(quantize()), VISION_BUDGET),
        entry(pair.format("static"), lambda: attend(quantize(known.scales)), VISION_BUDGET),
    ]


def _decoding(generator: torch.Generator, device: str) -> list[HostCall]:
    """One token after a context of `CONTEXT` - 1, of a few sequences in FP8 pages."""
    case = PagedCase(
        lengths=(CONTEXT,) * NUM_SEQUENCES,
        q_lens=(1,) * NUM_SEQUENCES,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
    )
    inputs = make_decode_inputs(case, device=device)
    query, view = inputs["q"], inputs["view"]
    key, value = (normal(generator, NUM_SEQUENCES, NUM_HEADS, HEAD_DIM) for _ in "kv")
    last = view.slots(torch.arange(NUM_SEQUENCES, device=device), view.lengths.long() - 1)
    append = partial(ops.append_kv, view, key, value, last)
    append()
    make_plan = partial(ops.plan_decode, view, num_heads=NUM_HEADS)
    decode = partial(ops.decode_attention, query, view)
    plan = make_plan()
    ends = torch.arange(NUM_SEQUENCES + 1, dtype=torch.int32)
    rows, _ = paged_attention(query.flatten(0, 1), view, ends, compute=torch.float64)
    truth = rows.view_as(query)

    def appended(_: object) -> Tensor:
        pages = view.key_pages[last // case.page_size, :, last % case.page_size]
        return dequantize(pages, view.key_scale, PerTensor())

    def append_and_decode() -> Tensor:
        append()
        return decode(plan=plan)

    limit, error = MAX_ERROR["BF16 to FP8"], MAX_ERROR["FP8"]
    pair = "append_kv + decode_attention"
    return [
        HostCall("octavo", "append_kv", append, key, limit, appended),
        HostCall("octavo", "decode_attention", partial(decode, plan=plan), truth, error),
        HostCall("octavo", pair, append_and_decode, truth, error, budget=DECODE_BUDGET),
        HostCall(
            impl="octavo",
            name="plan_decode",
            call=make_plan,
            truth=truth,
            max_error=error,
            checked=lambda made: decode(plan=made),
            budget=PLAN_BUDGET,
        ),
    ]
