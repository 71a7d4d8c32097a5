"""Matrix products with FP8 weights beside torch._scaled_mm and BF16.

Few rows, as in decoding, are also timed with the activation quantized in front of the product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import UnsupportedError
from octavo.internals import internals
from octavo.kernels.scaled_mm.config import MatmulShape, work
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls
from octavo.measure.records import Scalar
from octavo.numerics.granularity import PerChannel, PerTensor, PerToken
from octavo.numerics.quantize import Quantized

with internals("torch"):
    from torch import _scaled_mm

# (rows, columns, depth): a square, diffusion transformers, and Llama-3.1-8B with few rows.
SMALL = ((256, 1024, 1024), (4, 512, 512))
WIDTHS = (2048, 3072, 6144, 12288)
LARGE = (
    (8192, 8192, 8192),
    *((rows, n, k) for rows in (4096, 14040) for n in WIDTHS for k in WIDTHS),
    (4608, 12288, 3072),
    (4608, 3072, 12288),
    *((rows, n, k) for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)) for rows in (1, 4, 16)),
)
FEW_ROWS = 64
CHECKED_ROWS = 16
# Quantizing both operands costs 0.037 on normal values.
MAX_ERROR = {"FP8": 0.06, "BF16 by FP8": 0.04, "BF16": 0.01}


@dataclass(frozen=True)
class Inputs:
    """An activation, a weight and a bias in BF16."""

    a: Tensor
    b: Tensor
    bias: Tensor


Prepare = Callable[[Inputs], Callable[[], Tensor]]


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each size that suits the device."""
    sizes = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, MatmulShape(*size)) for size in sizes]


def _benchmark(device: torch.device, shape: MatmulShape) -> Benchmark:
    flops, _ = work(shape, a_bytes=1, out_bytes=2)
    return Benchmark(
        op="scaled_mm",
        case={"shape": f"{shape.rows}x{shape.columns}x{shape.depth}"},
        make_inputs=partial(_make_inputs, device, shape),
        truth=_truth,
        contenders=tuple(_contenders(shape, device)),
        flops=flops,
        checked=lambda result: result[:CHECKED_ROWS],
    )


def _contenders(shape: MatmulShape, device: torch.device) -> list[Contender]:
    def contender(
        name: str, operands: str, prepare: Prepare, scales: str, has_bias: bool = True
    ) -> Contender:
        width = 1 if operands == "FP8" else 2
        _, num_bytes = work(shape, a_bytes=width, out_bytes=2)
        if operands == "BF16":
            num_bytes += shape.columns * shape.depth
        notes: dict[str, Scalar] = {"scales": scales, "bias": has_bias}
        return Contender(name, operands, prepare, MAX_ERROR[operands], num_bytes, notes)

    found = [
        contender("torch._scaled_mm", "FP8", partial(_torch, PerTensor(), True), "tensor"),
        contender("torch._scaled_mm", "FP8", partial(_torch, PerTensor(), False), "tensor", False),
        contender("torch._scaled_mm", "FP8", partial(_torch, PerToken(), True), "token by channel"),
        contender("selected", "FP8", partial(_ours, None, PerTensor(), True), "tensor"),
        contender("selected", "FP8", partial(_ours, None, PerTensor(), False), "tensor", False),
        contender("selected", "FP8", partial(_ours, None, PerToken(), True), "token by channel"),
    ]
    found += [
        contender(name, "FP8", partial(_ours, name, PerToken(), True), "token by channel")
        for name in timed_impls("scaled_mm", device)
    ]
    if shape.rows <= FEW_ROWS:
        in_front = "token by channel, quantized in front"
        found += [
            contender("selected", "FP8", _in_front, in_front),
            contender("selected", "BF16 by FP8", _plain, "channel"),
        ]
    return [*found, contender("torch", "BF16", _bf16, "none")]


def _make_inputs(device: torch.device, shape: MatmulShape, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    sizes = ((shape.rows, shape.depth), (shape.columns, shape.depth), (shape.columns,))
    a, b, bias = (
        torch.empty(size, device=device).normal_(generator=generator).bfloat16() for size in sizes
    )
    return Inputs(a, b, bias / 8)  # small, so that the truth serves those without it as well


def _truth(inputs: Inputs) -> Tensor:
    """Some rows of the product."""
    a = inputs.a[:CHECKED_ROWS].double()
    return a @ inputs.b.double().t() + inputs.bias.double()


def _quantized(inputs: Inputs, a: PerTensor | PerToken) -> tuple[Quantized, Quantized]:
    b = PerTensor() if isinstance(a, PerTensor) else PerChannel()
    return ops.quantize(inputs.a, a), ops.quantize(inputs.b, b)


def _ours(
    impl: str | None, a: PerTensor | PerToken, has_bias: bool, inputs: Inputs
) -> Callable[[], Tensor]:
    bias = inputs.bias if has_bias else None
    return partial(ops.scaled_mm, *_quantized(inputs, a), bias, impl=impl)


def _in_front(inputs: Inputs) -> Callable[[], Tensor]:
    weight = ops.quantize(inputs.b, PerChannel())
    return partial(ops.scaled_mm, inputs.a, weight, inputs.bias, activation=PerToken())


def _plain(inputs: Inputs) -> Callable[[], Tensor]:
    return partial(ops.scaled_mm, inputs.a, ops.quantize(inputs.b, PerChannel()), inputs.bias)


def _torch(a: PerTensor | PerToken, has_bias: bool, inputs: Inputs) -> Callable[[], Tensor]:
    """torch._scaled_mm as it is called without octavo."""
    if not inputs.a.is_cuda:
        raise UnsupportedError("torch._scaled_mm needs a CUDA GPU, got CPU")
    x, weight = _quantized(inputs, a)
    x_scale, weight_scale = x.scale, weight.scale
    if isinstance(a, PerToken):
        x_scale, weight_scale = x_scale.unsqueeze(1), weight_scale.unsqueeze(0)
    return partial(
        _scaled_mm,
        *(x.data, weight.data.t(), x_scale, weight_scale),
        bias=inputs.bias if has_bias else None,
        out_dtype=torch.bfloat16,
    )


def _bf16(inputs: Inputs) -> Callable[[], Tensor]:
    return partial(torch.nn.functional.linear, inputs.a, inputs.b, inputs.bias)
