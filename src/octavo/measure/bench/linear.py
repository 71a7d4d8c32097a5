"""Benchmarks of linear layers and caches: quantizing, new tokens into pages, matrix products."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import ops
from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView
from octavo.errors import UnsupportedError
from octavo.internals import internals
from octavo.kernels.append_kv.config import work as append_work
from octavo.kernels.linear_gelu.config import work as gelu_work
from octavo.kernels.matvec.config import work as matvec_work
from octavo.kernels.quantize_qkv.config import work as qkv_work
from octavo.kernels.scaled_mm.config import MatmulShape
from octavo.kernels.scaled_mm.config import work as mm_work
from octavo.measure.bench.benchmark import (
    MAX_ERROR,
    Benchmark,
    Call,
    Participant,
    Prepare,
    Suite,
    normal,
    our_impls,
    seeded,
    timed_impls,
)
from octavo.measure.records import Scalar
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.granularity import PerChannel, PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.quantize import Quantized
from octavo.numerics.rotary import Rotary
from octavo.reference import gemm
from octavo.reference.qkv import restore_values, rotate

with internals("torch"):
    from torch import _scaled_mm


def _quantize(size: tuple[int, int], device: torch.device, folder: Path | None) -> Benchmark:
    """Activations, one scale per token, beside a copy of the same tensor."""
    rows, columns = size
    num_bytes = rows * columns * 3 + rows * 4  # BF16 in, FP8 and scales out
    ours = our_impls("quantize", device, "BF16 to FP8", num_bytes)
    return Benchmark(
        op="quantize",
        case={"shape": f"{rows}x{columns}", "granularity": "token"},
        make_inputs=seeded(device, lambda g: (normal(g, rows, columns), PerToken())),
        truth=lambda inputs: inputs[0].double(),
        participants=(*ours, _copying(lambda inputs: inputs[0], 4 * rows * columns)),
    )


def _copying(find: Callable[[Any], Tensor], num_bytes: float) -> Participant:
    """The copy of a tensor of the inputs, beside which quantizing is seen."""

    def prepare(inputs: Any) -> Call:
        x = find(inputs)
        return partial(torch.empty_like(x).copy_, x)

    return Participant("copy", "BF16 to BF16", prepare, 0.0, num_bytes)


QUANTIZE = Suite(
    small=((1024, 1024),),
    large=tuple((m, n) for m in (4096, 14040) for n in (2048, 3072, 6144, 12288)),
    make=_quantize,
)

# Tokens of each image, images, heads, head_dim, kind of scales, with rotary embedding.
QkvSize = tuple[int, int, int, int, str, bool]
SCALINGS = ("static", "dynamic", "dynamic with history", "dynamic per head")


def scaling_options(scaling: str, device: torch.device) -> dict[str, Any]:
    """The options of `ops.quantize_qkv` for a kind of scales; a history serves one layer."""
    match scaling:
        case "static":
            scale = torch.tensor(6 / 448, device=device)
            return {"scales": QkvScales(scale, scale, scale)}
        case "dynamic with history":
            return {"history": tuple(AmaxHistory().to(device) for _ in range(3))}
        case "dynamic per head":
            return {"granularity": PerHead()}
    return {}


@dataclass(frozen=True)
class Projection:
    """q, k and v as views of one projection, where the images end, and rotary tables."""

    qkv: tuple[Tensor, Tensor, Tensor]
    cu_seqlens: Tensor
    rotary: Rotary | None


def _quantize_qkv(size: QkvSize, device: torch.device, folder: Path | None) -> Benchmark:
    """q, k and v of a packed projection, values transposed."""
    length, num_images, num_heads, head_dim, scaling, has_rotary = size
    num_tokens = length * num_images

    def draw(generator: torch.Generator) -> Projection:
        q, k, v = normal(generator, num_tokens, 3, num_heads, head_dim).unbind(1)
        ends = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=device)
        rotary = _draw_rotary(generator, num_tokens, head_dim) if has_rotary else None
        return Projection((q, k, v), ends, rotary)

    def truth(inputs: Projection) -> Tensor:
        q, k, v = inputs.qkv
        if inputs.rotary is not None:
            q, k = rotate(q, inputs.rotary), rotate(k, inputs.rotary)
        return torch.stack([x.double() for x in (q, k, v)])

    def ours(impl: str, inputs: Projection) -> Call:
        options = scaling_options(scaling, device)
        options |= {"rotary": inputs.rotary, "cu_seqlens": inputs.cu_seqlens, "impl": impl}
        return partial(ops.quantize_qkv, *inputs.qkv, value_layout="transposed", **options)

    _, num_bytes = qkv_work(num_tokens, num_tokens, num_heads, num_heads, head_dim)
    participants = our_impls("quantize_qkv", device, "BF16 to FP8", num_bytes, ours)
    if not has_rotary:
        num_copied = num_tokens * num_heads * head_dim * 12
        participants.append(_copying(lambda inputs: torch.stack(inputs.qkv), num_copied))
    shape = f"{num_images}x{length} heads {num_heads} head_dim {head_dim}"
    return Benchmark(
        op="quantize_qkv",
        case={"shape": shape, "scaling": scaling, "rotary": has_rotary},
        make_inputs=seeded(device, draw),
        truth=truth,
        participants=tuple(participants),
        checked=_qkv_value,
    )


def _draw_rotary(generator: torch.Generator, num_tokens: int, head_dim: int) -> Rotary:
    shape = (num_tokens, head_dim // 2)
    angle = torch.rand(shape, device=generator.device, generator=generator) * 6
    return Rotary(angle.cos(), angle.sin())


def _qkv_value(inputs: Projection, result: Tensor | QuantizedQkv) -> Tensor:
    """What q, k and v stand for, all three in rows."""
    if isinstance(result, Tensor):
        return result
    value = restore_values(result.v, len(inputs.qkv[2]), inputs.cu_seqlens)
    rows = (result.q, result.k, value)
    scales = (result.scales.q, result.scales.k, result.scales.v)
    parts = [
        Quantized(x, scale, PerHead() if scale.dim() else PerTensor()).dequantize()
        for x, scale in zip(rows, scales, strict=True)
    ]
    return torch.stack(parts)


KINDS = tuple((scaling, rotary) for scaling in SCALINGS for rotary in (False, True))
QUANTIZE_QKV = Suite(
    small=tuple((50, 3, 4, 72, *kind) for kind in KINDS),
    # Three FullHD images in Qwen3-VL's vision tower.
    large=tuple((8160, 3, 16, 72, *kind) for kind in KINDS),
    make=_quantize_qkv,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 32, 8, 128, 64, 64


@dataclass(frozen=True)
class NewTokens:
    """One step's projections, tables and slots, and the cache they go to."""

    query: Tensor
    key: Tensor
    value: Tensor
    rotary: Rotary
    slots: Tensor
    view: PagedView

    def append(self, run: Callable[..., Tensor | None], **options: Any) -> Call:
        """A call of `run`, the op or one of its kernels; gives the turned queries."""
        options |= {"query": self.query, "rotary": self.rotary}
        return partial(run, self.view, self.key, self.value, self.slots, **options)


def _append_kv(num_tokens: int, device: torch.device, folder: Path | None) -> Benchmark:
    """A few new tokens into FP8 pages, queries and keys turned on the way.

    Inputs lie in the L2 cache, where a projection leaves them.
    """
    _, num_bytes = append_work(num_tokens, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    shape = f"{num_tokens} tokens heads {NUM_HEADS}/{NUM_KV_HEADS} head_dim {HEAD_DIM}"

    def truth(inputs: NewTokens) -> Tensor:
        turned = [rotate(x, inputs.rotary).double() for x in (inputs.query, inputs.key)]
        return torch.cat([*turned, inputs.value.double()], dim=1)

    def ours(impl: str, inputs: NewTokens) -> Call:
        return inputs.append(ops.append_kv, impl=impl)

    return Benchmark(
        op="append_kv",
        case={"shape": shape, "rotary": True},
        make_inputs=seeded(device, partial(_draw_tokens, num_tokens)),
        truth=truth,
        participants=tuple(our_impls("append_kv", device, "BF16 to FP8", num_bytes, ours)),
        checked=_stored,
        is_cached=True,
    )


def _draw_tokens(num_tokens: int, generator: torch.Generator) -> NewTokens:
    device = generator.device
    joint = normal(generator, num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    query, key, value = joint.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    rotary = _draw_rotary(generator, num_tokens, HEAD_DIM)
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE, device=device, generator=generator)[:num_tokens]
    spec = CacheSpec(
        num_layers=1,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE_SIZE,
        granularity=PerHead(),
    )
    storage = PagedStorage(spec, NUM_PAGES, device)
    scale = torch.full((NUM_KV_HEADS,), 8 / 448)
    storage.set_scales(0, key=scale, value=scale)
    table, lengths = (torch.zeros(n, dtype=torch.int32, device=device) for n in ((1, 1), (1,)))
    return NewTokens(query, key, value, rotary, slots, storage.view(0, table, lengths))


def _stored(inputs: NewTokens, query: Tensor) -> Tensor:
    """The turned queries, and what the pages now hold of keys and values."""
    page, offset = inputs.slots // PAGE_SIZE, inputs.slots % PAGE_SIZE
    view = inputs.view
    pairs = ((view.key_pages, view.key_scale), (view.value_pages, view.value_scale))
    stored = [
        pages.view(torch.uint8)[page, :, offset].view(pages.dtype).double() * scale.view(-1, 1)
        for pages, scale in pairs
    ]
    return torch.cat([query.double(), *stored], dim=1)


APPEND_KV = Suite(small=(1, 64, 256), large=(1, 64, 256), make=_append_kv)


def _matvec(size: tuple[int, int], device: torch.device, folder: Path | None) -> Benchmark:
    """One token times a weight in BF16, (columns, depth): how fast the weight is read."""
    columns, depth = size
    flops, num_bytes = matvec_work(columns, depth)
    limit = MAX_ERROR["BF16"]
    peer = Participant("torch", "BF16", lambda x: partial(F.linear, *x), limit, num_bytes)
    return Benchmark(
        op="matvec",
        case={"shape": f"{columns}x{depth}"},
        make_inputs=seeded(device, lambda g: (normal(g, 1, depth), normal(g, columns, depth))),
        truth=lambda inputs: inputs[0].double() @ inputs[1].double().t(),
        participants=(*our_impls("matvec", device, "BF16", num_bytes), peer),
        flops=flops,
        baseline=peer.name,
    )


def _linear_gelu(
    size: tuple[int, int, int], device: torch.device, folder: Path | None
) -> Benchmark:
    """A linear layer with GELU in BF16 as one product, beside torch's two: rows, columns, depth."""
    rows, columns, depth = size
    flops, num_bytes = gelu_work(rows, columns, depth)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((rows, depth), (columns, depth), (columns,))
        x, weight, bias = (torch.randn(n, device=device, generator=generator) for n in shapes)
        return x.bfloat16(), (weight / depth**0.5).bfloat16(), bias.bfloat16()

    def compiled(inputs: tuple[Tensor, Tensor, Tensor]) -> Call:
        # On a CPU compiling would take seconds.
        gelu = torch.compile(_gelu) if device.type == "cuda" else _gelu
        return lambda: gelu(F.linear(*inputs))

    # torch writes the product, and reads it again for GELU.
    torch_bytes = num_bytes + 2 * 2 * rows * columns
    peer = Participant("torch-compiled", "BF16", compiled, MAX_ERROR["BF16"], torch_bytes)
    return Benchmark(
        op="linear_gelu",
        case={"shape": f"{rows}x{columns}x{depth}"},
        make_inputs=seeded(device, draw),
        truth=lambda inputs: gemm.linear_gelu(*inputs, compute=torch.float64),
        participants=(*our_impls("linear_gelu", device, "BF16", num_bytes), peer),
        flops=flops,
        baseline=peer.name,
    )


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


WIDTHS = (2048, 3072, 6144, 12288)
FEW_ROWS, CHECKED_ROWS = 64, 16


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
        found.append(entry("selected", "FP8", partial(_plain_by_fp8, PerToken()), in_front))
        found.append(entry("selected", "BF16 by FP8", partial(_plain_by_fp8, None), "channel"))
    found.append(entry("torch", "BF16", lambda x: partial(F.linear, x.a, x.b, x.bias), "none"))
    return Benchmark(
        op="scaled_mm",
        case={"shape": f"{shape.rows}x{shape.columns}x{shape.depth}"},
        make_inputs=seeded(device, draw),
        truth=truth,
        participants=tuple(found),
        flops=mm_work(shape, a_bytes=1, out_bytes=2)[0],
        checked=lambda inputs, result: result[:CHECKED_ROWS],
    )


def _our_mm(impl: str | None, a: PerTensor | PerToken, has_bias: bool, inputs: Operands) -> Call:
    bias = inputs.bias if has_bias else None
    return partial(ops.scaled_mm, *inputs.quantized(a), bias, impl=impl)


def _plain_by_fp8(activation: PerToken | None, inputs: Operands) -> Call:
    """BF16 times an FP8 weight; activation: how it is quantized in front, if it is."""
    weight = ops.quantize(inputs.b, PerChannel())
    return partial(ops.scaled_mm, inputs.a, weight, inputs.bias, activation=activation)


def _torch_mm(a: PerTensor | PerToken, has_bias: bool, inputs: Operands) -> Call:
    """torch._scaled_mm as it is called without octavo."""
    if not inputs.a.is_cuda:
        raise UnsupportedError("torch._scaled_mm needs a CUDA GPU, got CPU")
    x, weight = inputs.quantized(a)
    x_scale, weight_scale = x.scale, weight.scale
    if isinstance(a, PerToken):
        x_scale, weight_scale = x_scale.unsqueeze(1), weight_scale.unsqueeze(0)
    options: Any = {"bias": inputs.bias if has_bias else None, "out_dtype": torch.bfloat16}
    return partial(_scaled_mm, x.data, weight.data.t(), x_scale, weight_scale, **options)


LINEAR_GELU = Suite(
    small=((65, 96, 48),),
    large=((4096, 12288, 3072), (14040, 6144, 2048)),  # Qwen-Image, then a video transformer
    make=_linear_gelu,
)

MATVEC = Suite(
    small=((512, 512), (65, 300)),
    large=(  # Llama-3.1-8B with its vocabulary, then gpt-oss
        *((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (128256, 4096)),
        *((4096, 2880), (512, 2880), (2880, 4096)),
    ),
    make=_matvec,
)

SCALED_MM = Suite(
    small=((256, 1024, 1024), (4, 512, 512)),
    large=(  # a square, few tiles, diffusion transformers, and Llama-3.1-8B with few rows
        (8192, 8192, 8192),
        *((512, 1024, 1024), (128, 1152, 4304), (512, 1152, 4304), (256, 4096, 4096)),
        *((rows, n, k) for rows in (4096, 14040) for n in WIDTHS for k in WIDTHS),
        (4608, 12288, 3072),
        (4608, 3072, 12288),
        *((m, n, k) for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)) for m in (1, 4, 16)),
    ),
    make=_mm,
)
