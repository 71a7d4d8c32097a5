"""Benchmarks of attention over pages beside the peers: decoding, and chunks of prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.view import PagedView
from octavo.kernels.attention.config import work
from octavo.measure.bench import attention, peers
from octavo.measure.bench.attention import CHECKED, Size
from octavo.measure.bench.benchmark import Benchmark, Call, Participant, Suite, seeded, timed_impls
from octavo.measure.bench.peer_impls import run_prefill
from octavo.measure.records import Scalar
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import PerHead
from octavo.reference.paged import paged_attention

BF16 = torch.bfloat16
CAUSAL = AttentionSpec(causal=True)
MAX_ERROR = {
    # Queries stay as they are; FP8 pages alone cost 0.039 on normal values.
    "decode_attention": {"FP8": 0.06, "BF16": 0.01},
    "prefill_attention": attention.MAX_ERROR,
}
UNEVEN = (131072, 1000, 2000, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class PagedSize(Size):
    """The tokens of each sequence in pages, how many of them are new, and the heads of a layer."""

    num_heads: int = 32
    num_kv_heads: int = 8
    page_size: int = 64
    q_len: int = 1

    def shown(self, op: str) -> str:
        """The shape as records of an op have it."""
        tokens = f"{len(self.lengths)}x{self.lengths[0]}"
        if op == "prefill_attention":
            tokens = f"{self.q_len} after {self.lengths[0] - self.q_len}"
        elif len(set(self.lengths)) > 1:
            tokens = f"{len(self.lengths)} uneven"
        heads = f"heads {self.num_heads}/{self.num_kv_heads} head_dim {self.head_dim}"
        return f"{tokens} {heads} page {self.page_size}"

    def num_bytes(self, operands: str) -> int:
        """Bytes of keys and values, and of a chunk its queries and the BF16 result."""
        width = 1 if operands == "FP8" else 2
        num_bytes = 2 * width * self.num_tokens * self.num_kv_heads * self.head_dim
        if self.q_len > 1:
            num_queries = len(self.lengths) * self.q_len
            num_bytes += (width + 2) * num_queries * self.num_heads * self.head_dim
        return num_bytes


@dataclass(frozen=True)
class PagedInputs:
    """q [num_sequences, q_len, num_heads, head_dim], and a BF16 cache in pages of random order."""

    q: Tensor
    view: PagedView

    def view_as(self, operands: str) -> PagedView:
        """The cache in FP8 with a scale for each head, or as it is."""
        view = self.view
        if operands == "BF16":
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

    def packed(self) -> tuple[Tensor, Tensor, int]:
        """The queries side by side, their cu_seqlens, and how many each sequence has."""
        q_len = self.q.shape[1]
        ends = torch.arange(len(self.q) + 1, dtype=torch.int32, device=self.q.device) * q_len
        return self.q.flatten(0, 1), ends, q_len


def _over_pages(op: str, size: PagedSize, device: torch.device, folder: Path | None) -> Benchmark:
    rows = sorted({0, len(size.lengths) // 2, len(size.lengths) - 1})
    flops_over = partial(
        work, 1, size.q_len, num_heads=size.num_heads, head_dim=size.head_dim, is_causal=True
    )
    is_chunk = op == "prefill_attention"  # decoding is about bytes alone
    return Benchmark(
        op=op,
        case={"shape": size.shown(op)},
        make_inputs=seeded(device, partial(_draw_pages, size)),
        truth=partial(_truth, rows),
        participants=tuple(_participants(op, size, device, folder)),
        flops=sum(map(flops_over, size.lengths)) if is_chunk else 0.0,
        checked=lambda inputs, result: result.reshape(inputs.q.shape)[rows, -CHECKED:],
    )


def _participants(
    op: str, size: PagedSize, device: torch.device, folder: Path | None
) -> Iterator[Participant]:
    """Ours, then on a GPU FlashAttention-3: over FP8 pages and over BF16 ones."""
    ours = _decode if op == "decode_attention" else _prefill

    def entry(
        name: str, operands: str, prepare: Callable[..., Call], *, is_peer: bool, **notes: Scalar
    ) -> Participant:
        limit, own = MAX_ERROR[op][operands], partial(prepare, operands)
        return Participant(name, operands, own, limit, size.num_bytes(operands), notes, is_peer)

    for operands in MAX_ERROR[op]:
        for name in timed_impls(op, device):
            yield entry(name, operands, partial(ours, name), is_peer=False)
        if device.type == "cuda":
            yield entry("vllm-fa3", operands, partial(_vllm, folder), is_peer=True)
    if device.type == "cuda" and ours is _prefill:
        gathered = partial(_vllm_gathered, folder)
        yield entry("vllm-fa3", "BF16", gathered, is_peer=True, pages="gathered")


def _decode(impl: str, operands: str, inputs: PagedInputs) -> Call:
    """With a plan made before, as for one of many layers."""
    view, q = inputs.view_as(operands), inputs.q
    plan = ops.plan_decode(view, num_heads=q.shape[2], dtype=q.dtype, impl=impl)
    return partial(ops.decode_attention, q, view, plan=plan, impl=impl)


def _prefill(impl: str, operands: str, inputs: PagedInputs) -> Call:
    """Queries are in FP8 before, as the kernel that appends leaves them; pages are gathered."""
    q, ends, q_len = inputs.packed()
    scale = None
    if operands == "FP8":
        made = ops.quantize(q, PerHead())
        q, scale = made.data, made.scale
    view = inputs.view_as(operands)
    return partial(ops.prefill_attention, q, view, ends, q_len, CAUSAL, scale, impl=impl)


def _vllm(folder: Path | None, operands: str, inputs: PagedInputs) -> Call:
    return peers.vllm_paged(folder, inputs.q, inputs.view_as(operands))


def _vllm_gathered(folder: Path | None, operands: str, inputs: PagedInputs) -> Call:
    """As a row `prefill=vllm-fa3` of the engine runs it."""
    (q, ends, q_len), view = inputs.packed(), inputs.view_as(operands)
    room = view.num_sequences * view.max_pages * view.page_size
    run = partial(run_prefill, folder, q, view, ends, q_len, CAUSAL, None, sinks=None)
    return lambda: run(out_dtype=BF16, num_cached_tokens=room)[0]


def _draw_pages(size: PagedSize, generator: torch.Generator) -> PagedInputs:
    device = generator.device
    counts = [-(-length // size.page_size) for length in size.lengths]
    shape = (sum(counts), size.num_kv_heads, size.page_size, size.head_dim)
    key, value = (
        torch.empty(shape, dtype=BF16, device=device).normal_(generator=generator) for _ in "kv"
    )
    order = torch.randperm(sum(counts), device=device, generator=generator).int().split(counts)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, pages in enumerate(order):
        table[row, : len(pages)] = pages
    lengths = torch.tensor(size.lengths, dtype=torch.int32, device=device)
    one = torch.ones((), device=device)
    q_shape = (len(counts), size.q_len, size.num_heads, size.head_dim)
    q = torch.empty(q_shape, dtype=BF16, device=device).normal_(generator=generator)
    return PagedInputs(q, PagedView(key, value, one, one, table, lengths))


def _truth(rows: list[int], inputs: PagedInputs) -> Tensor:
    """What the last queries of some sequences see, in float64."""
    view = inputs.view
    part = PagedInputs(
        inputs.q[rows, -CHECKED:],
        replace(view, page_table=view.page_table[rows], lengths=view.lengths[rows]),
    )
    q, ends, _ = part.packed()
    return paged_attention(q, part.view, ends, CAUSAL, compute=torch.float64)[0].view_as(part.q)


DECODE_ATTENTION = Suite(
    small=(PagedSize((300, 500), num_heads=8, num_kv_heads=2),),
    large=(
        PagedSize((32768,) * 8),
        PagedSize((131072,) * 8),
        *(PagedSize((length,)) for length in (256, 1024, 4096, 16384, 32768, 131072)),
        PagedSize((4096,) * 64),
        PagedSize((1024,) * 256),
        PagedSize(UNEVEN),
        PagedSize((sum(UNEVEN) // 8,) * 8),
        PagedSize((65536,) * 8, head_dim=64),
        PagedSize((32768,) * 8, head_dim=256, num_heads=16, num_kv_heads=4),
        *(PagedSize((32768,) * 8, num_heads=num_heads) for num_heads in (8, 56, 64)),
        PagedSize((32768,) * 8, page_size=16),
        PagedSize((8192,) * 16, num_heads=16, num_kv_heads=1),
        PagedSize((32768,) * 2, head_dim=256, num_heads=16, num_kv_heads=2),
        *(PagedSize((length,), num_kv_heads=4) for length in (4096, 16384, 65536, 262144)),
    ),
    make=partial(_over_pages, "decode_attention"),
)


def _chunk(q_len: int, num_cached: int, *, head_dim: int = 128) -> PagedSize:
    """New tokens of one prompt after others that are in the cache already."""
    return PagedSize((num_cached + q_len,), q_len=q_len, head_dim=head_dim)


PREFILL_ATTENTION = Suite(
    small=(replace(_chunk(80, 60, head_dim=64), num_heads=4, num_kv_heads=2),),
    large=(
        *(_chunk(new, old) for new in (512, 2048, 8192) for old in (0, 8192, 32768, 131072)),
        *(_chunk(2048, old, head_dim=head_dim) for head_dim in (64, 256) for old in (0, 32768)),
    ),
    make=partial(_over_pages, "prefill_attention"),
)
