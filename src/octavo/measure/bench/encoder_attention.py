"""A vision encoder's attention from BF16 to BF16, quantization included, beside BF16 peers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from octavo import ops
from octavo.kernels.attention.config import work
from octavo.measure.bench import packed_attention, peers
from octavo.measure.bench.attention import MAX_ERROR, bytes_per_token
from octavo.measure.bench.benchmark import Benchmark, Contender
from octavo.measure.bench.packed_attention import Inputs, packed_peer
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.qkv import QkvScales

SCALINGS = ("static", "dynamic with history")
Prepare = Callable[[Inputs], Callable[[], Any]]


@dataclass(frozen=True)
class Images:
    """Some images of one size, as one batch of an encoder's layer."""

    length: int  # tokens of each image
    num_images: int = 3
    num_heads: int = 16
    head_dim: int = 72

    def __str__(self) -> str:
        tokens = f"{self.num_images}x{self.length}"
        return f"{tokens} heads {self.num_heads} head_dim {self.head_dim}"


SMALL = (Images(50, num_heads=2),)
# Three images in Qwen3-VL's vision tower.
LARGE = tuple(Images(length) for length in (3520, 8160, 14400, 32640))


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each size of images that suits the device; `folder` may hold peers."""
    sizes = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, folder, images) for images in sizes]


def _benchmark(device: torch.device, folder: Path | None, images: Images) -> Benchmark:
    lengths = (images.length,) * images.num_images
    heads = (images.num_heads, images.num_heads, images.head_dim)
    # All read and write BF16, whatever lies between.
    moved = sum(lengths) * bytes_per_token("BF16", *heads)

    def contender(name: str, operands: str, prepare: Prepare, **notes: str) -> Contender:
        return Contender(name, operands, prepare, MAX_ERROR[operands], moved, notes)

    contenders = [
        contender("octavo", "FP8", partial(_ours, scaling), scaling=scaling) for scaling in SCALINGS
    ]
    if device.type == "cuda":
        contenders += [
            contender("vllm-fa3", "BF16", packed_peer(peers.vllm_fa3, folder, False)),
            contender("fa3-fwd", "BF16", packed_peer(peers.fa3_fwd, folder, False)),
            contender("torch-cudnn", "BF16", partial(_sdpa, images)),
        ]
    else:
        contenders.append(contender("reference", "BF16", _reference))
    return Benchmark(
        op="encoder_attention",
        case={"shape": str(images)},
        make_inputs=partial(_make_inputs, images, device),
        truth=partial(packed_attention.truth, lengths),
        contenders=tuple(contenders),
        flops=work(
            *(images.num_images, images.length, images.length),
            *(images.num_heads, images.head_dim, False),
        ),
        checked=partial(_checked, lengths),
    )


def _make_inputs(images: Images, device: torch.device, seed: int) -> Inputs:
    """q, k and v as views of one joint projection."""
    lengths = (images.length,) * images.num_images
    generator = torch.Generator(device).manual_seed(seed)
    shape = (sum(lengths), 3, images.num_heads, images.head_dim)
    q, k, v = torch.randn(shape, device=device, generator=generator).bfloat16().unbind(1)
    ends = packed_attention.cumulative(lengths, device)
    return Inputs((q, k, v), Packing.same(ends, images.length))


def _ours(scaling: str, inputs: Inputs) -> Callable[[], Tensor]:
    """Scales, or the history they come from, are a layer's own: made before the call."""
    packing, device = inputs.packing, inputs.qkv[0].device
    options: dict[str, Any] = {"value_layout": "transposed", "cu_seqlens": packing.cu_seqlens_k}
    if scaling == "static":
        scale = torch.tensor(6 / 448, device=device)
        options["scales"] = QkvScales(scale, scale, scale)
    else:
        options["history"] = tuple(AmaxHistory().to(device) for _ in range(3))

    def call() -> Tensor:
        qkv = ops.quantize_qkv(*inputs.qkv, **options)
        return ops.attention(
            *(qkv.q, qkv.k, qkv.v, AttentionSpec(), qkv.scales),
            packing=packing,
            value_layout=qkv.value_layout,
        )

    return call


def _reference(inputs: Inputs) -> Callable[[], Tensor]:
    return partial(ops.attention, *inputs.qkv, packing=inputs.packing, impl="reference")


def _sdpa(images: Images, inputs: Inputs) -> Callable[[], Tensor]:
    """Images of one size are a dense batch to torch."""
    shape = (images.num_images, images.length)
    q, k, v = (x.unflatten(0, shape) for x in inputs.qkv)
    return peers.sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, False)


def _checked(lengths: tuple[int, ...], result: Tensor) -> Tensor:
    # Flattened here: in the timed call it might be a copy.
    packed = result.flatten(0, 1) if result.dim() == 4 else result
    return packed_attention.last_queries(lengths, packed)
