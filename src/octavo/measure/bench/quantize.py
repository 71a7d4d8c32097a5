"""Benchmarks of quantizing: activations, q, k and v of a projection, and new tokens into pages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView
from octavo.kernels.append_kv.config import work as append_work
from octavo.kernels.quantize_qkv.config import work as qkv_work
from octavo.measure.bench.benchmark import (
    MAX_ERROR,
    Benchmark,
    Participant,
    Suite,
    normal,
    our_impls,
    seeded,
    timed_impls,
)
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.quantize import Quantized
from octavo.numerics.rotary import Rotary
from octavo.reference.qkv import restore_values
from octavo.reference.rotary import rotate


def _quantize(size: tuple[int, int], device: torch.device, folder: Path | None) -> Benchmark:
    """Activations, one scale per token, beside a copy of the same tensor."""
    rows, columns = size
    num_bytes = rows * columns * 3 + rows * 4  # BF16 in, FP8 and scales out
    copy = Participant("copy", "BF16 to BF16", lambda x: _copy(x[0]), 0.0, 4 * rows * columns)
    return Benchmark(
        op="quantize",
        case={"shape": f"{rows}x{columns}", "granularity": "token"},
        make_inputs=seeded(device, lambda g: (normal(g, rows, columns), PerToken())),
        truth=lambda inputs: inputs[0].double(),
        participants=(*our_impls("quantize", device, "BF16 to FP8", num_bytes), copy),
    )


def _copy(x: Tensor) -> Callable[[], Tensor]:
    return partial(torch.empty_like(x).copy_, x)


QUANTIZE = Suite(
    small=((1024, 1024),),
    large=tuple((m, n) for m in (4096, 14040) for n in (2048, 3072, 6144, 12288)),
    make=_quantize,
)

# Tokens of each image, images, heads, head_dim, kind of scales, with rotary embedding.
QkvSize = tuple[int, int, int, int, str, bool]
SCALINGS = ("static", "dynamic", "dynamic with history", "dynamic per head")


@dataclass(frozen=True)
class Projection:
    """q, k and v as views of one projection, where the images end, and rotary tables."""

    qkv: tuple[Tensor, Tensor, Tensor]
    cu_seqlens: Tensor
    rotary: Rotary | None
    scales: QkvScales


def _quantize_qkv(size: QkvSize, device: torch.device, folder: Path | None) -> Benchmark:
    """q, k and v of a packed projection, values transposed."""
    length, num_images, num_heads, head_dim, scaling, has_rotary = size
    num_tokens = length * num_images

    def draw(generator: torch.Generator) -> Projection:
        q, k, v = normal(generator, num_tokens, 3, num_heads, head_dim).unbind(1)
        ends = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=device)
        rotary = _draw_rotary(generator, num_tokens, head_dim)
        scale = torch.tensor(6 / 448, device=device)
        scales = QkvScales(scale, scale, scale)
        return Projection((q, k, v), ends, rotary if has_rotary else None, scales)

    def truth(inputs: Projection) -> Tensor:
        q, k, v = inputs.qkv
        if inputs.rotary is not None:
            q, k = rotate(q, inputs.rotary), rotate(k, inputs.rotary)
        return torch.stack([x.double() for x in (q, k, v)])

    _, num_bytes = qkv_work(num_tokens, num_tokens, num_heads, num_heads, head_dim)
    limit, operands = MAX_ERROR["BF16 to FP8"], "BF16 to FP8"
    participants = [
        Participant(name, operands, partial(_our_qkv, name, scaling), limit, num_bytes)
        for name in timed_impls("quantize_qkv", device)
    ]
    if not has_rotary:
        copied = num_tokens * num_heads * head_dim * 12
        copy = partial(Participant, "copy", "BF16 to BF16")
        participants.append(copy(lambda inputs: _copy(torch.stack(inputs.qkv)), 0.0, copied))
    shape = f"{num_images}x{length} heads {num_heads} head_dim {head_dim}"
    return Benchmark(
        op="quantize_qkv",
        case={"shape": shape, "scaling": scaling, "rotary": has_rotary},
        make_inputs=seeded(device, draw),
        truth=truth,
        participants=tuple(participants),
        checked=partial(_qkv_value, num_tokens),
    )


def _draw_rotary(generator: torch.Generator, num_tokens: int, head_dim: int) -> Rotary:
    shape = (num_tokens, head_dim // 2)
    angle = torch.rand(shape, device=generator.device, generator=generator) * 6
    return Rotary(angle.cos(), angle.sin())


def _our_qkv(
    impl: str, scaling: str, inputs: Projection
) -> Callable[[], tuple[QuantizedQkv, Tensor]]:
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


def _qkv_value(num_tokens: int, result: Tensor | tuple[QuantizedQkv, Tensor]) -> Tensor:
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


KINDS = tuple((scaling, rotary) for scaling in SCALINGS for rotary in (False, True))
QUANTIZE_QKV = Suite(
    small=tuple((50, 3, 4, 72, *kind) for kind in KINDS),
    # Three FullHD images in Qwen3-VL's vision tower.
    large=tuple((8160, 3, 16, 72, *kind) for kind in KINDS),
    make=_quantize_qkv,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
NUM_PAGES = 64


@dataclass(frozen=True)
class NewTokens:
    """One step's projections, tables and slots, and the cache they go to."""

    query: Tensor
    key: Tensor
    value: Tensor
    rotary: Rotary
    slots: Tensor
    view: PagedView

    def append(self, run: Callable[..., Tensor | None], **options: Any) -> Callable[[], Any]:
        """A call of `run`, the op or one of its kernels; gives the turned queries, and these."""
        operands = (self.view, self.key, self.value, self.slots)

        def call() -> tuple[Tensor, NewTokens]:
            query = run(*operands, query=self.query, rotary=self.rotary, **options)
            assert query is not None
            return query, self

        return call


def _append_kv(num_tokens: int, device: torch.device, folder: Path | None) -> Benchmark:
    """A few new tokens into FP8 pages, queries and keys turned on the way.

    Inputs lie in the L2 cache, where a projection leaves them.
    """
    _, num_bytes = append_work(num_tokens, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    shape = f"{num_tokens} tokens heads {NUM_HEADS}/{NUM_KV_HEADS} head_dim {HEAD_DIM}"

    def truth(inputs: NewTokens) -> Tensor:
        turned = [rotate(x, inputs.rotary).double() for x in (inputs.query, inputs.key)]
        return torch.cat([*turned, inputs.value.double()], dim=1)

    def ours(impl: str, inputs: NewTokens) -> Callable[[], Any]:
        return inputs.append(ops.append_kv, impl=impl)

    return Benchmark(
        op="append_kv",
        case={"shape": shape, "rotary": True},
        make_inputs=seeded(device, partial(_draw_tokens, num_tokens)),
        truth=truth,
        participants=tuple(
            Participant(name, "BF16 to FP8", partial(ours, name), 2**-4, num_bytes)
            for name in timed_impls("append_kv", device)
        ),
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


def _stored(result: tuple[Tensor, NewTokens]) -> Tensor:
    """The turned queries, and what the pages now hold of keys and values."""
    query, inputs = result
    page, offset = inputs.slots // PAGE_SIZE, inputs.slots % PAGE_SIZE
    view = inputs.view
    pairs = ((view.key_pages, view.key_scale), (view.value_pages, view.value_scale))
    stored = [
        pages.view(torch.uint8)[page, :, offset].view(pages.dtype).double() * scale.view(-1, 1)
        for pages, scale in pairs
    ]
    return torch.cat([query.double(), *stored], dim=1)


APPEND_KV = Suite(small=(1, 64, 256), large=(1, 64, 256), make=_append_kv)
