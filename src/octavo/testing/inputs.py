"""Seeded inputs with the dtypes and layouts that models bring.

Numbers are drawn on the CPU, so that every device sees the same ones. Each factory returns the
keyword arguments of an op and of its reference.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView
from octavo.numerics.attention import Packing
from octavo.numerics.formats import E4M3, format_of, is_fp8
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import quantize
from octavo.reference.paged import append_kv
from octavo.testing.cases import AttentionCase, MatmulCase, PackedCase, PagedCase

Device = torch.device | str


class Draw:
    """Random tensors from one seed, in order."""

    def __init__(self, seed: int, device: Device = "cpu") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values in `dtype`."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def wide(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of many magnitudes, 2^-8 … 2^8."""
        exponent = torch.randint(-8, 9, shape, generator=self.generator)
        values = torch.randn(shape, generator=self.generator) * torch.exp2(exponent.float())
        return values.to(self.device, dtype)

    def coin(self, *shape: int, probability: float = 0.5) -> Tensor:
        """Booleans, True with this probability."""
        return (torch.rand(shape, generator=self.generator) < probability).to(self.device)

    def permutation(self, size: int) -> Tensor:
        """0 … size − 1 in another order."""
        return torch.randperm(size, generator=self.generator).to(self.device)


def make_attention_inputs(
    case: AttentionCase,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    granularity: Granularity = PerTensor(),
    device: Device = "cpu",
) -> dict[str, Any]:
    """Arguments of `attention` for a dense batch; an FP8 dtype adds scales of the granularity.

    Key masks hide a third of the keys, and all of the last sequence's.
    """
    draw = Draw(seed, device)
    sizes = (case.batch, case.q_len), (case.batch, case.num_keys)
    inputs = _qkv(draw, case, *sizes, dtype, granularity) | {"key_mask": None}
    if case.has_key_mask:
        inputs["key_mask"] = draw.coin(case.batch, case.num_keys, probability=2 / 3)
        inputs["key_mask"][-1:] = False
    return inputs


def make_packed_inputs(
    case: PackedCase,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    granularity: Granularity = PerTensor(),
    device: Device = "cpu",
) -> dict[str, Any]:
    """Arguments of `attention` for packed sequences."""
    sizes = (sum(case.q_lens),), (sum(case.key_lens),)
    inputs = _qkv(Draw(seed, device), case, *sizes, dtype, granularity)
    inputs["packing"] = make_packing(case.q_lens, case.key_lens, device=device)
    return inputs


def make_packing(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], *, device: Device = "cpu"
) -> Packing:
    """Where sequences of these lengths lie."""
    return Packing(
        cumulative(q_lens, device=device),
        cumulative(kv_lens, device=device),
        max(q_lens, default=0),
        max(kv_lens, default=0),
    )


def cumulative(lengths: tuple[int, ...], *, device: Device = "cpu") -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    ends = torch.tensor((0, *lengths)).cumsum(0)
    return ends.to(device, torch.int32)


def make_paged_view(case: PagedCase, *, seed: int = 0, device: Device = "cpu") -> PagedView:
    """A cache that holds the case's sequences in pages of random order.

    What no sequence owns, in half-full pages too, is as large as the dtype allows: reading too far
    shows. Unused entries of the page table name such a page.
    """
    draw = Draw(seed, device)
    spec = CacheSpec(
        num_layers=1,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        dtype=case.dtype,
        granularity=case.granularity,
        layout=case.layout,
    )
    num_pages = [spec.num_pages_for(length) for length in case.lengths]
    storage = PagedStorage(spec, sum(num_pages) + 2, device)
    for pages in (*storage.key_pages, *storage.value_pages):
        largest = format_of(case.dtype).max if is_fp8(case.dtype) else 1e4
        pages.copy_(torch.full_like(pages, largest, dtype=torch.float32))
    if is_fp8(case.dtype) and not isinstance(case.granularity, PerToken):
        shape = spec.scale_shape(0, 0)
        storage.set_scales(0, key=_any_scale(draw, shape), value=_any_scale(draw, shape))

    free = draw.permutation(storage.num_pages).to(torch.int32)
    table = free[-1].repeat(len(case.lengths), max(num_pages, default=0) + 1)
    for row, count in enumerate(num_pages):
        table[row, :count], free = free[:count], free[count:]
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    view = storage.view(0, table, lengths)
    for row, length in enumerate(case.lengths):
        positions = torch.arange(length, device=device)
        slots = view.slots(torch.full_like(positions, row), positions)
        shape = (length, case.num_kv_heads, case.head_dim)
        append_kv(view, draw.normal(*shape), draw.normal(*shape), slots)
    return view


def make_prefill_inputs(
    case: PagedCase,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cpu",
) -> dict[str, Any]:
    """Arguments of `prefill_attention`; FP8 queries come with one scale for each head."""
    draw = Draw(seed + 1, device)
    q = draw.normal(sum(case.q_lens), case.num_heads, case.head_dim)
    inputs: dict[str, Any] = {"q": q.to(dtype)}
    if is_fp8(dtype):
        quantized = quantize(q, PerHead(), format_of(dtype))
        inputs = {"q": quantized.data, "q_scale": quantized.scale}
    return inputs | {
        "view": make_paged_view(case, seed=seed, device=device),
        "cu_seqlens_q": cumulative(case.q_lens, device=device),
        "max_seqlen_q": max(case.q_lens, default=0),
        "spec": case.spec,
        "sinks": draw.normal(case.num_heads) if case.has_sinks else None,
    }


def make_decode_inputs(
    case: PagedCase,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cpu",
) -> dict[str, Any]:
    """Arguments of `decode_attention`; every sequence has as many queries as the first."""
    draw = Draw(seed + 1, device)
    q_len = case.q_lens[0] if case.q_lens else 1
    shape = (len(case.lengths), q_len, case.num_heads, case.head_dim)
    return {
        "q": draw.normal(*shape, dtype=dtype),
        "view": make_paged_view(case, seed=seed, device=device),
        "spec": case.spec,
        "sinks": draw.normal(case.num_heads) if case.has_sinks else None,
    }


def make_matmul_inputs(
    case: MatmulCase,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cpu",
) -> dict[str, Any]:
    """Arguments of `scaled_mm`; dtype: of a plain activation and of the bias."""
    draw = Draw(seed, device)
    a = draw.normal(case.rows, case.depth, dtype=dtype)
    b = draw.normal(case.columns, case.depth, dtype=dtype)
    return {
        "a": a if case.a is None else quantize(a, case.a),
        "b": quantize(b, case.b),
        "bias": draw.normal(case.columns, dtype=dtype) if case.has_bias else None,
    }


def _qkv(
    draw: Draw,
    case: AttentionCase | PackedCase,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    dtype: torch.dtype,
    granularity: Granularity,
) -> dict[str, Any]:
    """What dense and packed attention share; queries, keys: their sizes before heads."""
    q = draw.normal(*queries, case.num_heads, case.head_dim)
    k, v = (draw.normal(*keys, case.num_kv_heads, case.head_dim) for _ in "kv")
    inputs: dict[str, Any] = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if is_fp8(dtype):
        # Queries have one scale per tensor or head; only keys and values may have one per token.
        of_queries = PerHead() if isinstance(granularity, PerToken) else granularity
        kinds = (of_queries, granularity, granularity)
        fmt = format_of(dtype)
        parts = [quantize(x, kind, fmt) for x, kind in zip((q, k, v), kinds, strict=True)]
        inputs = {name: part.data for name, part in zip("qkv", parts, strict=True)}
        inputs["scales"] = QkvScales(*(part.scale for part in parts))
    sinks = draw.normal(case.num_heads) if case.has_sinks else None
    return inputs | {"spec": case.spec, "sinks": sinks}


def _any_scale(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Scales under which normal values use most of e4m3, different for each head."""
    # On the CPU: a GPU divides by a number as a product with its reciprocal.
    return ((4 + draw.normal(*shape).cpu().abs()) / E4M3.max).to(draw.device)
