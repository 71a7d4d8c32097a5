"""Decoding over pages beside vLLM's FlashAttention-3: FP8 and BF16 caches, even or uneven."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.view import PagedView
from octavo.measure.bench import peers
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls
from octavo.numerics.granularity import PerHead
from octavo.reference.paged import paged_attention

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
DTYPES = {"FP8": FP8, "BF16": BF16}
# FP8 pages alone cost 0.039 on normal values.
MAX_ERROR = {"FP8": 0.06, "BF16": 0.01}
UNEVEN = (131072, 1000, 2000, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Step:
    """One decode step: how many tokens each sequence has, and its heads."""

    lengths: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64

    def __str__(self) -> str:
        first = self.lengths[0]
        is_even = set(self.lengths) == {first}
        tokens = f"{len(self.lengths)}x{first}" if is_even else f"{len(self.lengths)} uneven"
        heads = f"{self.num_heads}/{self.num_kv_heads}"
        return f"{tokens} heads {heads} head_dim {self.head_dim} page {self.page_size}"


SMALL = (Step((300, 500), num_heads=8, num_kv_heads=2),)
LARGE = (
    Step((32768,) * 8),
    Step((131072,) * 8),
    *(Step((length,)) for length in (256, 1024, 4096, 16384, 32768, 131072)),
    Step((4096,) * 64),
    Step((1024,) * 256),
    Step(UNEVEN),
    Step((sum(UNEVEN) // 8,) * 8),
    Step((65536,) * 8, head_dim=64),
    Step((32768,) * 8, head_dim=256, num_heads=16, num_kv_heads=4),
    *(Step((32768,) * 8, num_heads=num_heads) for num_heads in (8, 56, 64)),
    Step((32768,) * 8, page_size=16),
)


@dataclass(frozen=True)
class Inputs:
    """q [num_sequences, 1, num_heads, head_dim], and a BF16 cache in pages of random order."""

    q: Tensor
    view: PagedView


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each step that suits the device; `folder` may hold vLLM's library."""
    steps = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, folder, step) for step in steps]


def _benchmark(device: torch.device, folder: Path | None, step: Step) -> Benchmark:
    checked = sorted({0, len(step.lengths) // 2, len(step.lengths) - 1})
    values = 2 * sum(step.lengths) * step.num_kv_heads * step.head_dim

    def contender(
        name: str, operands: str, prepare: Callable[[Inputs], Callable[[], Tensor]]
    ) -> Contender:
        num_bytes = values * DTYPES[operands].itemsize  # keys and values: all else is small
        return Contender(name, operands, prepare, MAX_ERROR[operands], num_bytes)

    contenders = [
        contender(name, operands, partial(_ours, name, DTYPES[operands]))
        for operands in DTYPES
        for name in timed_impls("decode_attention", device)
    ]
    if device.type == "cuda":
        contenders += [
            contender("vllm-fa3", operands, partial(_vllm, folder, DTYPES[operands]))
            for operands in DTYPES
        ]
    return Benchmark(
        op="decode_attention",
        case={"shape": str(step)},
        make_inputs=partial(_make_inputs, step, device),
        truth=partial(_truth, checked),
        contenders=tuple(contenders),
        checked=lambda result: result[checked],
    )


def _make_inputs(step: Step, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // step.page_size) for length in step.lengths]
    shape = (sum(counts), step.num_kv_heads, step.page_size, step.head_dim)
    key, value = (
        torch.empty(shape, dtype=BF16, device=device).normal_(generator=generator) for _ in "kv"
    )
    order = torch.randperm(sum(counts), device=device, generator=generator).int().split(counts)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, pages in enumerate(order):
        table[row, : len(pages)] = pages
    lengths = torch.tensor(step.lengths, dtype=torch.int32, device=device)
    one = torch.ones((), device=device)
    q_shape = (len(counts), 1, step.num_heads, step.head_dim)
    q = torch.empty(q_shape, dtype=BF16, device=device).normal_(generator=generator)
    return Inputs(q, PagedView(key, value, one, one, table, lengths))


def _truth(rows: list[int], inputs: Inputs) -> Tensor:
    view = inputs.view
    part = replace(view, page_table=view.page_table[rows], lengths=view.lengths[rows])
    ends = torch.arange(len(rows) + 1, dtype=torch.int32)
    out, _ = paged_attention(inputs.q[rows].flatten(0, 1), part, ends, compute=torch.float64)
    return out.view(len(rows), *inputs.q.shape[1:])


def _as_dtype(view: PagedView, dtype: torch.dtype) -> PagedView:
    """The same cache in FP8 with a scale for each head, or as it is."""
    if dtype == BF16:
        return view
    key, value = (
        ops.quantize(pages.transpose(1, 2), PerHead())
        for pages in (view.key_pages, view.value_pages)
    )
    return replace(
        view,
        key_pages=key.data.transpose(1, 2).contiguous(),
        value_pages=value.data.transpose(1, 2).contiguous(),
        key_scale=key.scale,
        value_scale=value.scale,
    )


def _ours(impl: str, dtype: torch.dtype, inputs: Inputs) -> Callable[[], Tensor]:
    """With a plan made before, as for one of many layers."""
    view, q = _as_dtype(inputs.view, dtype), inputs.q
    plan = ops.plan_decode(view, num_heads=q.shape[2], dtype=q.dtype, impl=impl)
    return partial(ops.decode_attention, q, view, plan=plan, impl=impl)


def _vllm(folder: Path | None, dtype: torch.dtype, inputs: Inputs) -> Callable[[], Tensor]:
    return peers.vllm_decode(folder, inputs.q, _as_dtype(inputs.view, dtype))
