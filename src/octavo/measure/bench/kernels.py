"""All benchmarks of `octavo bench kernels`, by op; those of matrix products are made here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.internals import internals
from octavo.kernels.linear_gelu.config import work as gelu_work
from octavo.kernels.matvec.config import work as matvec_work
from octavo.kernels.scaled_mm.config import MatmulShape
from octavo.kernels.scaled_mm.config import work as mm_work
from octavo.measure.bench import attention, quantize
from octavo.measure.bench.benchmark import (
    MAX_ERROR,
    Benchmark,
    Participant,
    Prepare,
    Suite,
    normal,
    our_impls,
    seeded,
    timed_impls,
)
from octavo.measure.records import Scalar
from octavo.numerics.granularity import PerChannel, PerTensor, PerToken
from octavo.numerics.quantize import Quantized
from octavo.reference import gemm

with internals("torch"):
    from torch import _scaled_mm


def _matvec(size: tuple[int, int], device: torch.device, folder: Path | None) -> Benchmark:
    """One token times a weight in BF16, (columns, depth): how fast the weight is read."""
    columns, depth = size
    flops, num_bytes = matvec_work(columns, depth)
    peer = Participant("torch", "BF16", _linear, MAX_ERROR["BF16"], num_bytes)
    return Benchmark(
        op="matvec",
        case={"shape": f"{columns}x{depth}"},
        make_inputs=seeded(device, lambda g: (normal(g, 1, depth), normal(g, columns, depth))),
        truth=lambda inputs: inputs[0].double() @ inputs[1].double().t(),
        participants=(*our_impls("matvec", device, "BF16", num_bytes), peer),
        flops=flops,
        baseline="torch",
    )


def _linear(inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    return partial(F.linear, *inputs)


def _linear_gelu(
    size: tuple[int, int, int], device: torch.device, folder: Path | None
) -> Benchmark:
    """A linear layer with GELU in BF16 as one product, beside torch's two: rows, columns, depth."""
    rows, columns, depth = size
    flops, num_bytes = gelu_work(rows, columns, depth)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias = (
            torch.randn(shape, device=device, generator=generator)
            for shape in ((rows, depth), (columns, depth), (columns,))
        )
        return x.bfloat16(), (weight / depth**0.5).bfloat16(), bias.bfloat16()

    # torch writes the product, and reads it again for GELU.
    torch_bytes = num_bytes + 2 * 2 * rows * columns
    peer = Participant("torch-compiled", "BF16", _compiled_gelu, MAX_ERROR["BF16"], torch_bytes)
    return Benchmark(
        op="linear_gelu",
        case={"shape": f"{rows}x{columns}x{depth}"},
        make_inputs=seeded(device, draw),
        truth=lambda inputs: gemm.linear_gelu(*inputs, compute=torch.float64),
        participants=(*our_impls("linear_gelu", device, "BF16", num_bytes), peer),
        flops=flops,
        baseline="torch-compiled",
    )


def _compiled_gelu(inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    gelu = torch.compile(_gelu) if inputs[0].is_cuda else _gelu  # on a CPU it would take seconds
    return lambda: gelu(F.linear(*inputs))


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


WIDTHS = (2048, 3072, 6144, 12288)
FEW_ROWS = 64
CHECKED_ROWS = 16


@dataclass(frozen=True)
class Operands:
    """An activation, a weight and a bias in BF16."""

    a: Tensor
    b: Tensor
    bias: Tensor

    def quantized(self, a: PerTensor | PerToken) -> tuple[Quantized, Quantized]:
        """Activation and weight in FP8: both per tensor, or per token and per channel."""
        b = PerTensor() if isinstance(a, PerTensor) else PerChannel()
        return ops.quantize(self.a, a), ops.quantize(self.b, b)


def _mm(size: tuple[int, int, int], device: torch.device, folder: Path | None) -> Benchmark:
    """FP8 weights beside torch._scaled_mm and BF16: rows, columns, depth.

    Few rows, as in decoding, are also timed with the activation quantized in front of the product.
    """
    shape = MatmulShape(*size)

    def draw(generator: torch.Generator) -> Operands:
        sizes = ((shape.rows, shape.depth), (shape.columns, shape.depth), (shape.columns,))
        a, b, bias = (normal(generator, *size) for size in sizes)
        return Operands(a, b, bias / 8)  # small, so that the truth serves those without it as well

    def truth(inputs: Operands) -> Tensor:
        a = inputs.a[:CHECKED_ROWS].double()
        return a @ inputs.b.double().t() + inputs.bias.double()

    return Benchmark(
        op="scaled_mm",
        case={"shape": f"{shape.rows}x{shape.columns}x{shape.depth}"},
        make_inputs=seeded(device, draw),
        truth=truth,
        participants=tuple(_mm_participants(shape, device)),
        flops=mm_work(shape, a_bytes=1, out_bytes=2)[0],
        checked=lambda result: result[:CHECKED_ROWS],
    )


def _mm_participants(shape: MatmulShape, device: torch.device) -> list[Participant]:
    def entry(
        name: str, operands: str, prepare: Prepare, scales: str, has_bias: bool = True
    ) -> Participant:
        _, num_bytes = mm_work(shape, a_bytes=1 if operands == "FP8" else 2, out_bytes=2)
        if operands == "BF16":
            num_bytes += shape.columns * shape.depth
        notes: dict[str, Scalar] = {"scales": scales, "bias": has_bias}
        return Participant(name, operands, prepare, MAX_ERROR[operands], num_bytes, notes)

    by_token = "token by channel"
    found = []
    for name, prepare in (("torch._scaled_mm", _torch_mm), ("selected", partial(_our_mm, None))):
        found += [
            entry(name, "FP8", partial(prepare, PerTensor(), True), "tensor"),
            entry(name, "FP8", partial(prepare, PerTensor(), False), "tensor", False),
            entry(name, "FP8", partial(prepare, PerToken(), True), by_token),
        ]
    found += [
        entry(name, "FP8", partial(_our_mm, name, PerToken(), True), by_token)
        for name in timed_impls("scaled_mm", device)
    ]
    if shape.rows <= FEW_ROWS:
        in_front = f"{by_token}, quantized in front"
        found += [
            entry("selected", "FP8", partial(_plain_by_fp8, PerToken()), in_front),
            entry("selected", "BF16 by FP8", partial(_plain_by_fp8, None), "channel"),
        ]
    return [*found, entry("torch", "BF16", lambda x: _linear((x.a, x.b, x.bias)), "none")]


def _our_mm(
    impl: str | None, a: PerTensor | PerToken, has_bias: bool, inputs: Operands
) -> Callable[[], Tensor]:
    bias = inputs.bias if has_bias else None
    return partial(ops.scaled_mm, *inputs.quantized(a), bias, impl=impl)


def _plain_by_fp8(activation: PerToken | None, inputs: Operands) -> Callable[[], Tensor]:
    """BF16 times an FP8 weight; activation: how it is quantized in front, if it is."""
    weight = ops.quantize(inputs.b, PerChannel())
    return partial(ops.scaled_mm, inputs.a, weight, inputs.bias, activation=activation)


def _torch_mm(a: PerTensor | PerToken, has_bias: bool, inputs: Operands) -> Callable[[], Tensor]:
    """torch._scaled_mm as it is called without octavo."""
    if not inputs.a.is_cuda:
        raise UnsupportedError("torch._scaled_mm needs a CUDA GPU, got CPU")
    x, weight = inputs.quantized(a)
    x_scale, weight_scale = x.scale, weight.scale
    if isinstance(a, PerToken):
        x_scale, weight_scale = x_scale.unsqueeze(1), weight_scale.unsqueeze(0)
    options: Any = {"bias": inputs.bias if has_bias else None, "out_dtype": torch.bfloat16}
    return partial(_scaled_mm, x.data, weight.data.t(), x_scale, weight_scale, **options)


SUITES: dict[str, Suite] = {
    "append_kv": quantize.APPEND_KV,
    "attention": attention.ATTENTION,
    "decode_attention": attention.DECODE_ATTENTION,
    "encoder_attention": attention.ENCODER_ATTENTION,
    "linear_gelu": Suite(
        small=((65, 96, 48),),
        large=((4096, 12288, 3072), (14040, 6144, 2048)),  # Qwen-Image, then a video transformer
        make=_linear_gelu,
    ),
    "matvec": Suite(
        small=((512, 512), (65, 300)),
        large=(  # Llama-3.1-8B with its vocabulary, then gpt-oss
            *((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (128256, 4096)),
            *((4096, 2880), (512, 2880), (2880, 4096)),
        ),
        make=_matvec,
    ),
    "packed_attention": attention.PACKED_ATTENTION,
    "quantize": quantize.QUANTIZE,
    "quantize_qkv": quantize.QUANTIZE_QKV,
    "scaled_mm": Suite(
        small=((256, 1024, 1024), (4, 512, 512)),
        large=(  # a square, diffusion transformers, and Llama-3.1-8B with few rows
            (8192, 8192, 8192),
            *((rows, n, k) for rows in (4096, 14040) for n in WIDTHS for k in WIDTHS),
            (4608, 12288, 3072),
            (4608, 3072, 12288),
            *(
                (m, n, k)
                for n, k in ((6144, 4096), (28672, 4096), (4096, 14336))
                for m in (1, 4, 16)
            ),
        ),
        make=_mm,
    ),
}


def benchmarks(
    device: torch.device, names: list[str] | None = None, peers: Path | None = None
) -> list[Benchmark]:
    """The benchmarks of some ops, or of all; `peers` is a folder with other libraries' kernels."""
    for name in names or ():
        if name not in SUITES:
            raise ConfigError(f"expected an op, one of {', '.join(SUITES)}; got {name!r}")
    return [one for name in names or SUITES for one in SUITES[name].benchmarks(device, peers)]
