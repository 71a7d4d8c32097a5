"""Quantizing q, k and v of a packed projection, values transposed: static and dynamic scales."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.kernels.quantize_qkv.config import work
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.quantize import Quantized
from octavo.numerics.rotary import Rotary
from octavo.reference.rotary import rotate
from octavo.reference.value_layout import restore_values

# (tokens of each image, images, heads, head_dim): three FullHD images in Qwen3-VL's vision tower.
SMALL = (50, 3, 4, 72)
LARGE = (8160, 3, 16, 72)
SCALINGS = ("static", "dynamic", "dynamic with history", "dynamic per head")


@dataclass(frozen=True)
class Inputs:
    """q, k and v as views of one projection, where the images end, and rotary tables."""

    qkv: tuple[Tensor, Tensor, Tensor]
    cu_seqlens: Tensor
    rotary: Rotary | None
    scales: QkvScales


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """Every kind of scales, with and without rotary embedding."""
    size = LARGE if device.type == "cuda" else SMALL
    return [
        _benchmark(device, *size, scaling=scaling, has_rotary=has_rotary)
        for scaling in SCALINGS
        for has_rotary in (False, True)
    ]


def _benchmark(
    device: torch.device,
    length: int,
    num_images: int,
    num_heads: int,
    head_dim: int,
    *,
    scaling: str,
    has_rotary: bool,
) -> Benchmark:
    num_tokens = length * num_images

    def make_inputs(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (num_tokens, 3, num_heads, head_dim)
        q, k, v = torch.randn(shape, device=device, generator=generator).bfloat16().unbind(1)
        ends = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=device)
        angle = torch.rand(num_tokens, head_dim // 2, device=device, generator=generator) * 6
        rotary = Rotary(angle.cos(), angle.sin()) if has_rotary else None
        scale = torch.tensor(6 / 448, device=device)
        return Inputs((q, k, v), ends, rotary, QkvScales(scale, scale, scale))

    _, num_bytes = work(num_tokens, num_tokens, num_heads, num_heads, head_dim)
    ours = [
        Contender(name, "BF16 to FP8", partial(_ours, name, scaling), 2**-4, num_bytes)
        for name in timed_impls("quantize_qkv", device)
    ]
    copy = Contender("copy", "BF16 to BF16", _copy, 0.0, num_tokens * num_heads * head_dim * 12)
    return Benchmark(
        op="quantize_qkv",
        case={
            "shape": f"{num_images}x{length} heads {num_heads} head_dim {head_dim}",
            "scaling": scaling,
            "rotary": has_rotary,
        },
        make_inputs=make_inputs,
        truth=_truth,
        contenders=(*ours, *([copy] if not has_rotary else [])),
        checked=partial(_value, num_tokens),
    )


def _truth(inputs: Inputs) -> Tensor:
    q, k, v = inputs.qkv
    if inputs.rotary is not None:
        q, k = rotate(q, inputs.rotary), rotate(k, inputs.rotary)
    return torch.stack([x.double() for x in (q, k, v)])


def _ours(impl: str, scaling: str, inputs: Inputs) -> Callable[[], tuple[QuantizedQkv, Tensor]]:
    options: dict[str, Any] = {"rotary": inputs.rotary, "cu_seqlens": inputs.cu_seqlens}
    match scaling:
        case "static":
            options["scales"] = inputs.scales
        case "dynamic with history":
            device = inputs.cu_seqlens.device
            options["history"] = tuple(AmaxHistory().to(device) for _ in range(3))
        case "dynamic per head":
            options["granularity"] = PerHead()

    def call() -> tuple[QuantizedQkv, Tensor]:
        result = ops.quantize_qkv(*inputs.qkv, value_layout="transposed", impl=impl, **options)
        return result, inputs.cu_seqlens

    return call


def _copy(inputs: Inputs) -> Callable[[], Tensor]:
    x = torch.stack(inputs.qkv)
    return partial(torch.empty_like(x).copy_, x)


def _value(num_tokens: int, result: Tensor | tuple[QuantizedQkv, Tensor]) -> Tensor:
    """What q, k and v stand for, all three in rows."""
    if isinstance(result, Tensor):
        return result
    qkv, cu_seqlens = result
    rows = (qkv.q, qkv.k, restore_values(qkv.v, num_tokens, cu_seqlens))
    scales = (qkv.scales.q, qkv.scales.k, qkv.scales.v)
    parts = [
        Quantized(x, scale, PerHead() if scale.dim() else PerTensor()).dequantize()
        for x, scale in zip(rows, scales, strict=True)
    ]
    return torch.stack(parts)
