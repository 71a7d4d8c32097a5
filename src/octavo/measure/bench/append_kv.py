"""New tokens into FP8 pages, queries and keys turned on the way."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView
from octavo.kernels.append_kv.config import work
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls
from octavo.numerics.granularity import PerHead
from octavo.numerics.rotary import Rotary
from octavo.reference.rotary import rotate

NUM_TOKENS = (1, 64, 256)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
NUM_PAGES = 64


@dataclass(frozen=True)
class Inputs:
    """One step's projections, tables and slots, and the cache they go to."""

    query: Tensor
    key: Tensor
    value: Tensor
    rotary: Rotary
    slots: Tensor
    view: PagedView


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """A few tokens, as in decoding; inputs lie in the cache, where a projection leaves them."""
    return [_benchmark(device, num_tokens) for num_tokens in NUM_TOKENS]


def _benchmark(device: torch.device, num_tokens: int) -> Benchmark:
    _, num_bytes = work(num_tokens, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    return Benchmark(
        op="append_kv",
        case={
            "shape": f"{num_tokens} tokens heads {NUM_HEADS}/{NUM_KV_HEADS} head_dim {HEAD_DIM}",
            "rotary": True,
        },
        make_inputs=partial(_make_inputs, device, num_tokens),
        truth=_truth,
        contenders=tuple(
            Contender(name, "BF16 to FP8", partial(_ours, name), 2**-4, num_bytes)
            for name in timed_impls("append_kv", device)
        ),
        checked=_value,
        is_cached=True,
    )


def _make_inputs(device: torch.device, num_tokens: int, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    joint = torch.randn(shape, device=device, generator=generator).bfloat16()
    query, key, value = joint.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    angle = torch.rand(num_tokens, HEAD_DIM // 2, device=device, generator=generator) * 6
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
    view = storage.view(0, table, lengths)
    return Inputs(query, key, value, Rotary(angle.cos(), angle.sin()), slots, view)


def _truth(inputs: Inputs) -> Tensor:
    turned = [rotate(x, inputs.rotary).double() for x in (inputs.query, inputs.key)]
    return torch.cat([*turned, inputs.value.double()], dim=1)


def _ours(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor, Inputs]]:
    def call() -> tuple[Tensor, Inputs]:
        query = ops.append_kv(
            *(inputs.view, inputs.key, inputs.value, inputs.slots),
            query=inputs.query,
            rotary=inputs.rotary,
            impl=impl,
        )
        assert query is not None
        return query, inputs

    return call


def _value(result: tuple[Tensor, Inputs]) -> Tensor:
    """The turned queries, and what the pages now hold of keys and values."""
    query, inputs = result
    page, offset = inputs.slots // PAGE_SIZE, inputs.slots % PAGE_SIZE
    view = inputs.view
    stored = [
        pages.view(torch.uint8)[page, :, offset].view(pages.dtype).double() * scale.view(-1, 1)
        for pages, scale in (
            (view.key_pages, view.key_scale),
            (view.value_pages, view.value_scale),
        )
    ]
    return torch.cat([query.double(), *stored], dim=1)
