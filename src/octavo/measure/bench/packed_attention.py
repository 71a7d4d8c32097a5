"""Attention over packed sequences of uneven lengths beside the peers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.kernels.attention.config import work
from octavo.measure.bench import peers
from octavo.measure.bench.attention import CHECKED, MAX_ERROR, bytes_per_token
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.quantize import Quantized
from octavo.reference import attention as reference


@dataclass(frozen=True)
class Batch:
    """How many tokens each packed sequence has, and its heads."""

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        lengths = "+".join(map(str, self.lengths))
        return f"{lengths} heads {self.num_heads}/{self.num_kv_heads} head_dim {self.head_dim}"


@dataclass(frozen=True)
class Inputs:
    """q, k and v [tokens, heads, head_dim] in BF16, and where their sequences lie."""

    qkv: tuple[Tensor, Tensor, Tensor]
    packing: Packing


SMALL = (Batch((100, 60, 3), 4, 2, 64),)
LARGE = (Batch((8192, 4096, 2048), 16, 16, 128),)
Prepare = Callable[[Inputs], Callable[[], Tensor | Quantized]]


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each batch that suits the device; `folder` may hold peers."""
    batches = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, folder, batch) for batch in batches]


def _benchmark(device: torch.device, folder: Path | None, batch: Batch) -> Benchmark:
    heads = (batch.num_heads, batch.num_kv_heads, batch.head_dim)

    def contender(name: str, operands: str, prepare: Prepare, **notes: str | int) -> Contender:
        moved = sum(batch.lengths) * bytes_per_token(operands, *heads)
        return Contender(name, operands, prepare, MAX_ERROR[operands], moved, notes)

    contenders = [
        contender(name, operands, partial(_ours, name, operands))
        for operands in ("FP8", "BF16")
        for name in timed_impls("attention", device)
    ]
    if device.type == "cuda":
        contenders += [
            contender("vllm-fa3", "FP8", packed_peer(peers.vllm_fa3, folder, True)),
            contender("vllm-fa3", "BF16", packed_peer(peers.vllm_fa3, folder, False)),
            contender("fa3-fwd", "FP8", packed_peer(peers.fa3_fwd, folder, True), levels=1),
            contender("fa3-fwd", "BF16", packed_peer(peers.fa3_fwd, folder, False)),
            contender("cudnn", "FP8", packed_peer(peers.cudnn_fp8, folder), output="FP8"),
        ]
    return Benchmark(
        op="packed_attention",
        case={"shape": str(batch), "causal": False},
        make_inputs=partial(_make_inputs, batch, device),
        truth=partial(truth, batch.lengths),
        contenders=tuple(contenders),
        flops=sum(work(1, n, n, batch.num_heads, batch.head_dim, False) for n in batch.lengths),
        checked=partial(last_queries, batch.lengths),
    )


def _make_inputs(batch: Batch, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn(
            *(sum(batch.lengths), num_heads, batch.head_dim), device=device, generator=generator
        ).bfloat16()
        for num_heads in (batch.num_heads, batch.num_kv_heads, batch.num_kv_heads)
    )
    ends = cumulative(batch.lengths, device)
    return Inputs((q, k, v), Packing.same(ends, max(batch.lengths)))


def cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """cu_seqlens of packed sequences."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def truth(lengths: tuple[int, ...], inputs: Inputs) -> Tensor:
    """What the last queries of every sequence see of all its keys, in float64."""
    q, k, v = inputs.qkv
    num_checked = tuple(min(CHECKED, length) for length in lengths)
    packing = Packing(
        cumulative(num_checked, q.device),
        inputs.packing.cu_seqlens_k,
        max(num_checked),
        inputs.packing.max_seqlen_k,
    )
    rows = last_queries(lengths, q)
    return reference.varlen_attention(rows, k, v, packing, compute=torch.float64)[0]


def last_queries(lengths: tuple[int, ...], result: Tensor | Quantized) -> Tensor:
    """The rows of a packed result that `truth` has."""
    value = result if isinstance(result, Tensor) else result.dequantize()
    return torch.cat([rows[-CHECKED:] for rows in value.split(lengths)])


def _ours(impl: str, operands: str, inputs: Inputs) -> Callable[[], Tensor]:
    packing = inputs.packing
    if operands == "BF16":
        return partial(ops.attention, *inputs.qkv, packing=packing, impl=impl)
    qkv = ops.quantize_qkv(*inputs.qkv, value_layout="transposed", cu_seqlens=packing.cu_seqlens_k)
    return partial(
        ops.attention,
        *(qkv.q, qkv.k, qkv.v, AttentionSpec(), qkv.scales),
        packing=packing,
        value_layout=qkv.value_layout,
        impl=impl,
    )


def packed_peer(
    function: Callable[..., Callable[[], Tensor | Quantized]], *settings: object
) -> Prepare:
    """A peer over packed sequences, each of which sees itself whole."""
    return lambda inputs: function(*settings, *inputs.qkv, False, inputs.packing)
