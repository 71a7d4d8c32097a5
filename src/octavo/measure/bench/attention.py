"""Benchmarks of attention beside the peers: dense, packed, in a vision encoder, and decoding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from octavo import ops
from octavo.cache.view import PagedView
from octavo.kernels.attention.config import work
from octavo.measure.bench import peers
from octavo.measure.bench.benchmark import (
    Benchmark,
    Participant,
    Prepare,
    Suite,
    normal,
    seeded,
    timed_impls,
    value_of,
)
from octavo.measure.records import Scalar
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.granularity import PerHead
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import Quantized
from octavo.reference import attention as reference
from octavo.reference.paged import paged_attention

# Queries at the end of a sequence, which see all of its keys: what is checked.
CHECKED = 64
MAX_ERROR = {"FP8": 0.07, "BF16": 0.01}

Qkv = tuple[Tensor, Tensor, Tensor]


def _bytes_per_token(operands: str, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """q, k and v are read, the result is written in BF16."""
    width = 1 if operands == "FP8" else 2
    return head_dim * (width * (num_heads + 2 * num_kv_heads) + 2 * num_heads)


def _participant(
    num_bytes: Callable[[str], float], name: str, operands: str, prepare: Prepare, **notes: Scalar
) -> Participant:
    """Someone who attends; num_bytes: what is moved with operands of this kind."""
    return Participant(name, operands, prepare, MAX_ERROR[operands], num_bytes(operands), notes)


def _attend(impl: str | None, operands: str, spec: AttentionSpec, qkv: Qkv, **options: Any) -> Any:
    """A call of our own attention over BF16, or over q, k and v that are quantized before."""
    if operands == "BF16":
        return partial(ops.attention, *qkv, spec, impl=impl, **options)
    packing = options.get("packing")
    ends = None if packing is None else packing.cu_seqlens_k
    made = ops.quantize_qkv(*qkv, value_layout="transposed", cu_seqlens=ends)
    options |= {"value_layout": made.value_layout, "impl": impl}
    return partial(ops.attention, made.q, made.k, made.v, spec, made.scales, **options)


def _library_peers(
    entry: Callable[..., Participant], peer: Callable[..., Prepare], folder: Path | None
) -> list[Participant]:
    """FlashAttention-3 of vLLM and of its own package, and cuDNN; peer: makes a call of one."""
    return [
        entry("vllm-fa3", "FP8", peer(peers.vllm_fa3, folder, True)),
        entry("vllm-fa3", "BF16", peer(peers.vllm_fa3, folder, False)),
        entry("fa3-fwd", "FP8", peer(peers.fa3_fwd, folder, True), levels=1),
        entry("fa3-fwd", "BF16", peer(peers.fa3_fwd, folder, False)),
        entry("cudnn", "FP8", peer(peers.cudnn_fp8, folder), output="FP8"),
    ]


# Dense: (batch, length, query heads, KV heads, head_dim, causal)
DenseSize = tuple[int, int, int, int, int, bool]


def _dense(size: DenseSize, device: torch.device, folder: Path | None) -> Benchmark:
    batch, length, num_heads, num_kv_heads, head_dim, is_causal = size
    heads, spec = (num_heads, num_kv_heads, head_dim), AttentionSpec(causal=is_causal)

    def draw(generator: torch.Generator) -> Qkv:
        q, k, v = (
            normal(generator, batch, length, n, head_dim)
            for n in (num_heads, num_kv_heads, num_kv_heads)
        )
        return q, k, v

    def truth(qkv: Qkv) -> Tensor:
        q, k, v = qkv
        return reference.attention(q[:, -CHECKED:], k, v, spec, compute=torch.float64)[0]

    def peer(function: Callable[..., Any], *settings: object) -> Prepare:
        return lambda qkv: function(*settings, *qkv, is_causal)

    entry = partial(_participant, lambda kind: batch * length * _bytes_per_token(kind, *heads))
    participants = [
        entry(name, operands, partial(_attend, name, operands, spec))
        for operands in ("FP8", "BF16")
        for name in timed_impls("attention", device)
    ]
    if device.type == "cuda":
        participants += [
            *_library_peers(entry, peer, folder),
            entry("torch-cudnn", "BF16", peer(peers.sdpa, SDPBackend.CUDNN_ATTENTION)),
            entry("torch-flash", "BF16", peer(peers.sdpa, SDPBackend.FLASH_ATTENTION)),
        ]
    shape = f"{batch}x{length} heads {num_heads}/{num_kv_heads} head_dim {head_dim}"
    return Benchmark(
        op="attention",
        case={"shape": shape, "causal": is_causal},
        make_inputs=seeded(device, draw),
        truth=truth,
        participants=tuple(participants),
        flops=work(batch, length, length, num_heads, head_dim, is_causal),
        checked=lambda result: value_of(result)[:, -CHECKED:],
    )


ATTENTION = Suite(
    small=((1, 512, 8, 8, 128, False),),
    large=(
        *((1, 8192, 16, 16, head_dim, False) for head_dim in (64, 72, 80, 96, 128, 192, 256)),
        *((1, length, 32, 8, 128, True) for length in (16384, 32768)),
        (1, 16384, 16, 8, 256, True),
    ),
    make=_dense,
)


@dataclass(frozen=True)
class PackedInputs:
    """q, k and v [tokens, heads, head_dim] in BF16, and where their sequences lie."""

    qkv: Qkv
    packing: Packing


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """cu_seqlens of packed sequences."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _packed_truth(lengths: tuple[int, ...], inputs: PackedInputs) -> Tensor:
    """What the last queries of every sequence see of all its keys, in float64."""
    q, k, v = inputs.qkv
    num_checked = tuple(min(CHECKED, length) for length in lengths)
    packing = Packing(
        _cumulative(num_checked, q.device),
        inputs.packing.cu_seqlens_k,
        max(num_checked),
        inputs.packing.max_seqlen_k,
    )
    rows = _last_queries(lengths, q)
    return reference.varlen_attention(rows, k, v, packing, compute=torch.float64)[0]


def _last_queries(lengths: tuple[int, ...], result: Tensor | Quantized) -> Tensor:
    """The rows of a packed result that `_packed_truth` has; a dense one is flattened first."""
    value = value_of(result)
    # Flattened here: in the timed call it might be a copy.
    packed = value.flatten(0, 1) if value.dim() == 4 else value
    return torch.cat([rows[-CHECKED:] for rows in packed.split(lengths)])


def _packed_peer(function: Callable[..., Any], *settings: object) -> Prepare:
    """A peer over packed sequences, each of which sees itself whole."""
    return lambda inputs: function(*settings, *inputs.qkv, False, inputs.packing)


def _packed_ours(impl: str, operands: str, inputs: PackedInputs) -> Callable[[], Tensor]:
    return _attend(impl, operands, AttentionSpec(), inputs.qkv, packing=inputs.packing)  # type: ignore[no-any-return]


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


def _packed(batch: Batch, device: torch.device, folder: Path | None) -> Benchmark:
    lengths, heads = batch.lengths, (batch.num_heads, batch.num_kv_heads, batch.head_dim)

    def draw(generator: torch.Generator) -> PackedInputs:
        q, k, v = (
            normal(generator, sum(lengths), num_heads, batch.head_dim)
            for num_heads in (batch.num_heads, batch.num_kv_heads, batch.num_kv_heads)
        )
        return PackedInputs((q, k, v), Packing.same(_cumulative(lengths, device), max(lengths)))

    entry = partial(_participant, lambda kind: sum(lengths) * _bytes_per_token(kind, *heads))
    participants = [
        entry(name, operands, partial(_packed_ours, name, operands))
        for operands in ("FP8", "BF16")
        for name in timed_impls("attention", device)
    ]
    if device.type == "cuda":
        participants += _library_peers(entry, _packed_peer, folder)
    return Benchmark(
        op="packed_attention",
        case={"shape": str(batch), "causal": False},
        make_inputs=seeded(device, draw),
        truth=partial(_packed_truth, lengths),
        participants=tuple(participants),
        flops=sum(work(1, n, n, batch.num_heads, batch.head_dim, False) for n in lengths),
        checked=partial(_last_queries, lengths),
    )


PACKED_ATTENTION = Suite(
    small=(Batch((100, 60, 3), 4, 2, 64),),
    large=(Batch((8192, 4096, 2048), 16, 16, 128),),
    make=_packed,
)


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


def _encoder(images: Images, device: torch.device, folder: Path | None) -> Benchmark:
    """From BF16 to BF16, quantization included."""
    lengths = (images.length,) * images.num_images
    heads = (images.num_heads, images.num_heads, images.head_dim)

    def draw(generator: torch.Generator) -> PackedInputs:
        """q, k and v as views of one joint projection."""
        joint = normal(generator, sum(lengths), 3, images.num_heads, images.head_dim)
        q, k, v = joint.unbind(1)
        return PackedInputs((q, k, v), Packing.same(_cumulative(lengths, device), images.length))

    def sdpa(inputs: PackedInputs) -> Callable[[], Tensor]:
        """Images of one size are a dense batch to torch."""
        q, k, v = (x.unflatten(0, (images.num_images, images.length)) for x in inputs.qkv)
        return peers.sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, False)

    # All read and write BF16, whatever lies between.
    entry = partial(_participant, lambda _: sum(lengths) * _bytes_per_token("BF16", *heads))
    participants = [
        entry("octavo", "FP8", partial(_quantized_inside, scaling), scaling=scaling)
        for scaling in ("static", "dynamic with history")
    ]
    if device.type == "cuda":
        participants += [
            entry("vllm-fa3", "BF16", _packed_peer(peers.vllm_fa3, folder, False)),
            entry("fa3-fwd", "BF16", _packed_peer(peers.fa3_fwd, folder, False)),
            entry("torch-cudnn", "BF16", sdpa),
        ]
    else:
        participants.append(entry("reference", "BF16", partial(_packed_ours, "reference", "BF16")))
    sizes = (images.num_images, images.length, images.length, images.num_heads, images.head_dim)
    return Benchmark(
        op="encoder_attention",
        case={"shape": str(images)},
        make_inputs=seeded(device, draw),
        truth=partial(_packed_truth, lengths),
        participants=tuple(participants),
        flops=work(*sizes, False),
        checked=partial(_last_queries, lengths),
    )


def _quantized_inside(scaling: str, inputs: PackedInputs) -> Callable[[], Tensor]:
    """Scales, or the history they come from, are a layer's own: made before the call."""
    packing, device = inputs.packing, inputs.qkv[0].device
    options: dict[str, Any] = {"value_layout": "transposed", "cu_seqlens": packing.cu_seqlens_k}
    if scaling == "static":
        scale = torch.tensor(6 / 448, device=device)
        options["scales"] = QkvScales(scale, scale, scale)
    else:
        options["history"] = tuple(AmaxHistory().to(device) for _ in range(3))

    def call() -> Tensor:
        made = ops.quantize_qkv(*inputs.qkv, **options)
        qkv, layout = (made.q, made.k, made.v), made.value_layout
        return ops.attention(
            *qkv, AttentionSpec(), made.scales, packing=packing, value_layout=layout
        )

    return call


ENCODER_ATTENTION = Suite(
    small=(Images(50, num_heads=2),),
    # Three images in Qwen3-VL's vision tower.
    large=tuple(Images(length) for length in (3520, 8160, 14400, 32640)),
    make=_encoder,
)

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
DTYPES = {"FP8": FP8, "BF16": BF16}
# FP8 pages alone cost 0.039 on normal values.
MAX_DECODE_ERROR = {"FP8": 0.06, "BF16": 0.01}
UNEVEN = (131072, 1000, 2000, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class DecodeSize:
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


@dataclass(frozen=True)
class DecodeInputs:
    """q [num_sequences, 1, num_heads, head_dim], and a BF16 cache in pages of random order."""

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


def _decode(size: DecodeSize, device: torch.device, folder: Path | None) -> Benchmark:
    checked = sorted({0, len(size.lengths) // 2, len(size.lengths) - 1})
    values = 2 * sum(size.lengths) * size.num_kv_heads * size.head_dim

    def entry(name: str, operands: str, prepare: Prepare) -> Participant:
        num_bytes = values * DTYPES[operands].itemsize  # keys and values: all else is small
        return Participant(name, operands, prepare, MAX_DECODE_ERROR[operands], num_bytes)

    def ours(impl: str, operands: str, inputs: DecodeInputs) -> Callable[[], Tensor]:
        """With a plan made before, as for one of many layers."""
        view, q = inputs.view_as(operands), inputs.q
        plan = ops.plan_decode(view, num_heads=q.shape[2], dtype=q.dtype, impl=impl)
        return partial(ops.decode_attention, q, view, plan=plan, impl=impl)

    def vllm(operands: str, inputs: DecodeInputs) -> Callable[[], Tensor]:
        return peers.vllm_decode(folder, inputs.q, inputs.view_as(operands))

    participants = [
        entry(name, operands, partial(ours, name, operands))
        for operands in DTYPES
        for name in timed_impls("decode_attention", device)
    ]
    if device.type == "cuda":
        participants += [entry("vllm-fa3", kind, partial(vllm, kind)) for kind in DTYPES]
    return Benchmark(
        op="decode_attention",
        case={"shape": str(size)},
        make_inputs=seeded(device, partial(_draw_pages, size)),
        truth=partial(_decode_truth, checked),
        participants=tuple(participants),
        checked=lambda result: result[checked],
    )


def _draw_pages(size: DecodeSize, generator: torch.Generator) -> DecodeInputs:
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
    q_shape = (len(counts), 1, size.num_heads, size.head_dim)
    q = torch.empty(q_shape, dtype=BF16, device=device).normal_(generator=generator)
    return DecodeInputs(q, PagedView(key, value, one, one, table, lengths))


def _decode_truth(rows: list[int], inputs: DecodeInputs) -> Tensor:
    view = inputs.view
    part = replace(view, page_table=view.page_table[rows], lengths=view.lengths[rows])
    ends = torch.arange(len(rows) + 1, dtype=torch.int32)
    out, _ = paged_attention(inputs.q[rows].flatten(0, 1), part, ends, compute=torch.float64)
    return out.view(len(rows), *inputs.q.shape[1:])


DECODE_ATTENTION = Suite(
    small=(DecodeSize((300, 500), num_heads=8, num_kv_heads=2),),
    large=(
        DecodeSize((32768,) * 8),
        DecodeSize((131072,) * 8),
        *(DecodeSize((length,)) for length in (256, 1024, 4096, 16384, 32768, 131072)),
        DecodeSize((4096,) * 64),
        DecodeSize((1024,) * 256),
        DecodeSize(UNEVEN),
        DecodeSize((sum(UNEVEN) // 8,) * 8),
        DecodeSize((65536,) * 8, head_dim=64),
        DecodeSize((32768,) * 8, head_dim=256, num_heads=16, num_kv_heads=4),
        *(DecodeSize((32768,) * 8, num_heads=num_heads) for num_heads in (8, 56, 64)),
        DecodeSize((32768,) * 8, page_size=16),
    ),
    make=_decode,
)
