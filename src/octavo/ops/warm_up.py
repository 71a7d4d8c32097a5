"""warm_up: run every op that a model will need once, so that its kernels are compiled.

Kernels are compiled for dtypes, head_dim, numbers of heads and features, and for classes of sizes:
ladders of batches, rows, tokens and room for a sequence meet them. Lengths do not matter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.attention.config import SHORT
from octavo.kernels.device import Device, default_device, describe
from octavo.kernels.quantize_qkv.config import token_classes
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import is_fp8
from octavo.numerics.granularity import Granularity, PerChannel, PerToken
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.quantize import Quantized
from octavo.numerics.rotary import Rotary
from octavo.ops.append_kv import append_kv
from octavo.ops.attention import attention
from octavo.ops.check import check_heads
from octavo.ops.decode_attention import decode_attention
from octavo.ops.matvec import matvec
from octavo.ops.prefill_attention import prefill_attention
from octavo.ops.quantize import quantize
from octavo.ops.quantize_qkv import quantize_qkv
from octavo.ops.rotate_qk import rotate_qk
from octavo.ops.scaled_mm import scaled_mm

# Tokens of a warm-up call: more than one tile of every kernel.
NUM_TOKENS = 256
# Queries of a sequence, few and many.
QUERIES = (SHORT, NUM_TOKENS)
# Batches of a decode step, tokens that the page table has room for in each sequence, and rows of a
# linear layer.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROOMS = (NUM_TOKENS, 1024, 4096)
ROWS = (1, 16, 32, 64, NUM_TOKENS)
Call = tuple[str, Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """Attention layers that share their shapes: of an encoder, or of a decoder with a KV cache.

    page_dtype: of the cache's pages. spec: of a decoder; an encoder sees all of its tokens.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_decoder: bool = True
    page_dtype: torch.dtype = torch.float8_e4m3fn
    page_size: int = 64
    spec: AttentionSpec = AttentionSpec(causal=True)
    has_sinks: bool = False

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)


@dataclass(frozen=True)
class LinearLayers:
    """Linear layers that share their shape: a weight of [columns, depth].

    rows: tokens of the calls. weight, activation: granularities; activation None is a plain input.
    is_static: the input has one scale, which is given.
    """

    columns: int
    depth: int
    rows: tuple[int, ...] = ROWS
    weight: Granularity = PerChannel()
    activation: Granularity | None = PerToken()
    is_static: bool = False


Layers = AttentionLayers | LinearLayers


def warm_up(layers: list[Layers], device: torch.device | str = "cuda") -> Iterator[str]:
    """Compile what these layers need; yields the name of each op before it runs."""
    for name, call in warm_up_calls(layers, torch.device(device)):
        yield name
        call()


def warm_up_calls(layers: list[Layers], device: torch.device) -> list[Call]:
    """The calls behind `warm_up`, each with a name."""
    if not layers:
        raise ConfigError("expected layers to compile kernels for, got none")
    calls: list[Call] = []
    for one in layers:
        if isinstance(one, LinearLayers):
            calls += _linear(one, device)
        else:
            calls += _decoder(one, device) if one.is_decoder else _encoder(one, device)
    return calls


def check_gpu(device: torch.device | str | None = None) -> Device:
    """The GPU to compile for, the current one if left out; UnsupportedError if it is none."""
    found = default_device() if device is None else describe(device)
    if found.capability is None:
        raise UnsupportedError(
            f"kernels are compiled on the GPU they will run on, got {found.name}"
        )
    return found


def _encoder(layers: AttentionLayers, device: torch.device) -> list[Call]:
    """Packed images: scales from a history or from a file, with and without rotary embedding."""
    history = (AmaxHistory().to(device), AmaxHistory().to(device), AmaxHistory().to(device))
    name = f"encoder, head_dim {layers.head_dim}"

    def quantized(num_tokens: int, scales: QkvScales | None, has_rotary: bool) -> QuantizedQkv:
        return quantize_qkv(
            *_qkv(layers, device, num_tokens),
            scales,
            history=history if scales is None else None,
            rotary=_rotary(layers, device, num_tokens) if has_rotary else None,
            value_layout="transposed",
            cu_seqlens=_ends(device, num_tokens // 3, num_tokens),
        )

    calls: list[Call] = []
    for has_rotary in (False, True):
        suffix = ", rotary" if has_rotary else ""
        calls += [
            (
                f"{name}: quantize_qkv, dynamic, {num_tokens} tokens{suffix}",
                partial(quantized, num_tokens, None, has_rotary),
            )
            for num_tokens in token_classes(num_scales=1)
        ]
        static = partial(quantized, NUM_TOKENS, QkvScales.ones(device), has_rotary)
        calls.append((f"{name}: quantize_qkv, static{suffix}", static))
    q, k, _ = _qkv(layers, device, NUM_TOKENS)
    rotate = partial(rotate_qk, q, k, _rotary(layers, device, NUM_TOKENS))
    calls.append((f"{name}: rotate_qk", rotate))
    for num_queries in QUERIES:
        calls += _encoder_attention(layers, device, num_queries, name)
    return calls


def _encoder_attention(
    layers: AttentionLayers, device: torch.device, num_queries: int, name: str
) -> list[Call]:
    q, k, v = _qkv(layers, device, num_queries)
    ends = _ends(device, num_queries // 3, num_queries)
    packing = Packing.same(ends, num_queries)
    qkv = quantize_qkv(q, k, v, QkvScales.ones(device), value_layout="transposed", cu_seqlens=ends)
    fp8 = partial(
        attention,
        qkv.q,
        qkv.k,
        qkv.v,
        AttentionSpec(),
        qkv.scales,
        packing=packing,
        value_layout=qkv.value_layout,
    )
    bf16 = partial(attention, q, k, v, AttentionSpec(), packing=packing)
    return [
        (f"{name}: attention, FP8, {num_queries} tokens", fp8),
        (f"{name}: attention, BF16, {num_queries} tokens", bf16),
    ]


def _decoder(layers: AttentionLayers, device: torch.device) -> list[Call]:
    """New tokens into pages, then prefill and decode over them."""
    q, k, v = _qkv(layers, device, NUM_TOKENS)
    view, slots = _cache(layers, device)
    rotary = _rotary(layers, device, NUM_TOKENS)
    sinks = torch.zeros(layers.num_heads, device=device) if layers.has_sinks else None
    one = torch.ones((), device=device)
    append = partial(append_kv, view, k, v, slots, query=q, rotary=rotary)

    def prefill(q: Tensor, num_queries: int, q_scale: Tensor | None) -> Tensor:
        ends = _ends(device, num_queries)
        return prefill_attention(
            q[:num_queries], view, ends, num_queries, layers.spec, q_scale, sinks=sinks
        )

    name = f"decoder, head_dim {layers.head_dim}, {str(layers.page_dtype).removeprefix('torch.')}"
    calls: list[Call] = [(f"{name}: append_kv", append)]
    calls += [
        (f"{name}: prefill_attention, BF16, {n} tokens", partial(prefill, q, n, None))
        for n in QUERIES
    ]
    for batch in BATCHES:
        queries = q[:1].repeat(batch, 1, 1).unsqueeze(1)
        for room in ROOMS:
            table = view.page_table.repeat(batch, room // NUM_TOKENS)
            rows = replace(view, page_table=table, lengths=view.lengths.repeat(batch))
            decode = partial(decode_attention, queries, rows, layers.spec, sinks=sinks)
            calls.append((f"{name}: decode_attention, {batch} sequences, room for {room}", decode))
    if is_fp8(layers.page_dtype):
        q8 = q.to(torch.float8_e4m3fn)
        calls.append((f"{name}: append_kv, FP8 queries", partial(append, q_scale=one)))
        calls += [
            (f"{name}: prefill_attention, FP8, {n} tokens", partial(prefill, q8, n, one))
            for n in QUERIES
        ]
    return calls


def _linear(layers: LinearLayers, device: torch.device) -> list[Call]:
    """Few rows and many, with and without a bias: they have kernels of their own."""
    weight = quantize(_bf16(device, layers.columns, layers.depth), layers.weight)
    biases = {"": None, ", bias": _bf16(device, layers.columns)}
    size = f"linear, {layers.depth} to {layers.columns}"
    calls: list[Call] = []
    for rows in layers.rows:
        x = _bf16(device, rows, layers.depth)
        name = f"{size}, {rows} tokens"
        operands: dict[str, tuple[Quantized | Tensor, dict[str, Any]]] = {}
        scale = torch.ones((), device=device) if layers.is_static else None
        if layers.activation is not None:
            to_fp8 = partial(quantize, x, layers.activation, scale=scale)
            calls.append((f"{name}: quantize", to_fp8))
            operands["scaled_mm"] = (to_fp8(), {})
        # A layer gives its plain input to the product, which quantizes it on the way.
        options = {"activation": layers.activation, "scale": scale}
        operands["scaled_mm, plain input"] = (x, options)
        calls += [
            (f"{name}: {op}{suffix}", partial(scaled_mm, a, weight, bias, **how))
            for op, (a, how) in operands.items()
            for suffix, bias in biases.items()
        ]
    if 1 in layers.rows:
        # One token by the weight as it is. One row serves as all: the kernel is the same.
        x = _bf16(device, 1, layers.depth)
        plain = x.expand(layers.columns, -1)
        calls += [
            (f"{size}, 1 token: matvec{suffix}", partial(matvec, x, plain, bias))
            for suffix, bias in biases.items()
        ]
    return calls


def _cache(layers: AttentionLayers, device: torch.device) -> tuple[PagedView, Tensor]:
    """One sequence of NUM_TOKENS tokens, and their slots."""
    num_pages = -(-NUM_TOKENS // layers.page_size)
    spec = CacheSpec(
        num_layers=1,
        num_kv_heads=layers.num_kv_heads,
        head_dim=layers.head_dim,
        page_size=layers.page_size,
        dtype=layers.page_dtype,
    )
    storage = PagedStorage(spec, num_pages, device)
    table = torch.arange(num_pages, dtype=torch.int32, device=device).unsqueeze(0)
    lengths = torch.full((1,), NUM_TOKENS, dtype=torch.int32, device=device)
    return storage.view(0, table, lengths), torch.arange(NUM_TOKENS, device=device)


def _rotary(layers: AttentionLayers, device: torch.device, num_tokens: int) -> Rotary:
    table = _bf16(device, num_tokens, layers.head_dim // 2)
    return Rotary(table, table)


def _qkv(
    layers: AttentionLayers, device: torch.device, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    heads = (layers.num_heads, layers.num_kv_heads, layers.num_kv_heads)
    q, k, v = (_bf16(device, num_tokens, n, layers.head_dim) for n in heads)
    return q, k, v


def _ends(device: torch.device, *ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def _bf16(device: torch.device, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device=device)
