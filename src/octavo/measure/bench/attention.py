"""Benchmarks of attention beside the peers: dense, packed, and in a vision encoder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from octavo import ops
from octavo.kernels.attention.config import work
from octavo.kernels.device import default_device
from octavo.measure.bench import peers
from octavo.measure.bench.benchmark import (
    Benchmark,
    Call,
    Participant,
    Prepare,
    Suite,
    normal,
    seeded,
    timed_impls,
    value_of,
)
from octavo.measure.bench.linear import scaling_options
from octavo.measure.bench.peers import Inputs
from octavo.measure.records import Scalar
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import E4M3
from octavo.numerics.qkv import QuantizedQkv
from octavo.numerics.quantize import Quantized
from octavo.ops.select import Request, features_of, select
from octavo.reference.attention import varlen_attention
from octavo.testing.inputs import make_packing

# Queries at the end of a sequence, which see all of its keys: what is checked.
CHECKED = 64
MAX_ERROR = {"FP8": 0.07, "BF16": 0.01}
DENSE = ("attention", "attention_grid", "attention_levels")
# Tiles after which the sum of P·V moves to float32: never, which is one level, or every so many.
LEVELS = (None, 4, 1)


@dataclass(frozen=True)
class Size:
    """The lengths of the sequences, and the heads of a layer."""

    lengths: tuple[int, ...]
    num_heads: int = 16
    num_kv_heads: int = 16
    head_dim: int = 128
    is_causal: bool = False
    value_mean: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def shown(self, op: str) -> str:
        """The shape as records of an op have it."""
        tokens = f"{len(self.lengths)}x{self.lengths[0]}"
        if op == "packed_attention":
            tokens = "+".join(map(str, self.lengths))
        kv_heads = "" if op == "encoder_attention" else f"/{self.num_kv_heads}"
        return f"{tokens} heads {self.num_heads}{kv_heads} head_dim {self.head_dim}"

    def num_bytes(self, operands: str) -> int:
        """Bytes moved with operands of this kind: q, k and v are read, the BF16 result written."""
        width = 1 if operands == "FP8" else 2
        per_token = width * (self.num_heads + 2 * self.num_kv_heads) + 2 * self.num_heads
        return self.num_tokens * self.head_dim * per_token

    def last_queries(self, result: Tensor | Quantized) -> Tensor:
        """The rows of a result that `truth` has, of packed sequences or of a dense batch."""
        value = value_of(result)
        # Flattened here: in the timed call it might be a copy.
        packed = value.flatten(0, 1) if value.dim() == 4 else value
        return torch.cat([rows[-CHECKED:] for rows in packed.split(self.lengths)])

    def truth(self, inputs: Inputs) -> Tensor:
        """What the last queries of every sequence see of all its keys, in float64."""
        q, k, v = (x.flatten(0, 1) if x.dim() == 4 else x for x in inputs.qkv)
        counts = tuple(min(CHECKED, length) for length in self.lengths)
        packing = make_packing(counts, self.lengths, device=q.device)
        spec = AttentionSpec(causal=self.is_causal)
        rows = self.last_queries(q)
        return varlen_attention(rows, k, v, packing, spec, compute=torch.float64)[0]


def _ours(impl: str, operands: str, inputs: Inputs, promote_every: int | None = 1) -> Call:
    """Our own attention over BF16, or over q, k and v that are quantized before."""
    spec = AttentionSpec(causal=inputs.is_causal, promote_every=promote_every)
    packing = inputs.packing
    if operands == "BF16":
        return partial(ops.attention, *inputs.qkv, spec, packing=packing, impl=impl)
    ends = None if packing is None else packing.cu_seqlens_k
    made = ops.quantize_qkv(*inputs.qkv, value_layout="transposed", cu_seqlens=ends)
    return _over(made, spec, packing, impl=impl)


def _attention(op: str, size: Size, device: torch.device, folder: Path | None) -> Benchmark:
    """Sequences that see themselves: a dense batch, packed, or images in a layer of an encoder.

    That layer's attention goes from BF16 to BF16, quantization included.
    """
    is_dense, is_encoder = op in DENSE, op == "encoder_attention"
    tokens = (len(size.lengths), size.lengths[0]) if is_dense else (size.num_tokens,)

    def draw(generator: torch.Generator) -> Inputs:
        if is_encoder:  # views of one joint projection
            q, k, v = normal(generator, *tokens, 3, size.num_heads, size.head_dim).unbind(1)
        else:
            heads = (size.num_heads, size.num_kv_heads, size.num_kv_heads)
            q, k, v = (normal(generator, *tokens, n, size.head_dim) for n in heads)
            v += size.value_mean
        packing = None if is_dense else make_packing(size.lengths, size.lengths, device=device)
        return Inputs((q, k, v), packing, size.is_causal)

    def entry(
        name: str, operands: str, prepare: Prepare, is_peer: bool = False, **notes: Scalar
    ) -> Participant:
        num_bytes = size.num_bytes("BF16" if is_encoder else operands)
        return Participant(name, operands, prepare, MAX_ERROR[operands], num_bytes, notes, is_peer)

    case: dict[str, Scalar] = {"shape": size.shown(op)}
    if not is_encoder:
        case["causal"] = size.is_causal
    if op == "attention_grid":
        case |= {name: getattr(size, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        case["length"] = size.lengths[0]
    if op == "attention_levels":
        case["value_mean"] = size.value_mean
    work_of = partial(work, num_heads=size.num_heads, head_dim=size.head_dim)
    return Benchmark(
        op=op,
        case=case,
        make_inputs=seeded(device, draw),
        truth=size.truth,
        participants=tuple(_participants(op, entry, size, device, folder)),
        flops=sum(work_of(1, n, n, is_causal=size.is_causal) for n in size.lengths),
        checked=lambda inputs, result: size.last_queries(result),
    )


def _participants(
    op: str,
    entry: Callable[..., Participant],
    size: Size,
    device: torch.device,
    folder: Path | None,
) -> Iterator[Participant]:
    """Ours, then on a GPU the peers: all in BF16, and in FP8 where they take it."""
    is_encoder, is_cuda = op == "encoder_attention", device.type == "cuda"
    if op == "attention_levels":
        yield from _levels(entry, size, device)
        return
    if is_encoder:
        for scaling in ("static", "dynamic with history"):
            yield entry("octavo", "FP8", partial(_quantized_inside, scaling), scaling=scaling)
        if not is_cuda:
            yield entry("reference", "BF16", partial(_ours, "reference", "BF16"))
    else:
        for operands in MAX_ERROR:
            for name in timed_impls("attention", device):
                notes = {}
                if op == "attention_grid" and operands == "FP8":
                    notes["is_selected"] = name == _selected(size)
                yield entry(name, operands, partial(_ours, name, operands), **notes)
    if not is_cuda:
        return
    peer = partial(entry, is_peer=True)
    if not is_encoder:
        yield peer("vllm-fa3", "FP8", partial(peers.vllm_fa3, folder, True))
        yield peer("fa3-fwd", "FP8", partial(peers.fa3_fwd, folder, True), levels=1)
        yield peer("cudnn", "FP8", partial(peers.cudnn_fp8, folder), output="FP8")
    yield peer("vllm-fa3", "BF16", partial(peers.vllm_fa3, folder, False))
    yield peer("fa3-fwd", "BF16", partial(peers.fa3_fwd, folder, False))
    if op != "packed_attention":
        yield peer("torch-cudnn", "BF16", partial(_sdpa, SDPBackend.CUDNN_ATTENTION, size))
    if op in DENSE:
        yield peer("torch-flash", "BF16", partial(_sdpa, SDPBackend.FLASH_ATTENTION, size))


def _levels(
    entry: Callable[..., Participant], size: Size, device: torch.device
) -> Iterator[Participant]:
    """Ours in FP8, each implementation by name at each of the levels that it takes."""
    for every in LEVELS:
        # What sums in one level lose is measured, not wrong.
        limit = MAX_ERROR["FP8"] if every == 1 else 1.0
        for name in timed_impls("attention", device):
            prepare = partial(_ours, name, "FP8", promote_every=every)
            notes = {
                "promote_every": every or "none",
                "is_selected": name == _selected(size, every),
            }
            yield replace(entry(name, "FP8", prepare, **notes), max_error=limit)


def _selected(size: Size, promote_every: int | None = 1) -> str:
    """Our implementation of dense FP8 attention that is chosen unasked on this machine."""
    spec = AttentionSpec(causal=size.is_causal, promote_every=promote_every)
    request = Request(
        op="attention",
        device=default_device(),
        dtype=E4M3.dtype,
        other_dtype=E4M3.dtype,
        head_dim=size.head_dim,
        group=size.num_heads // size.num_kv_heads,
        features=features_of(spec, transposed=True),
    )
    return select(request).impl


def _sdpa(backend: SDPBackend, size: Size, inputs: Inputs) -> Call:
    """Images of one size are a dense batch to torch."""
    dense = (len(size.lengths), size.lengths[0])
    q, k, v = (x if x.dim() == 4 else x.unflatten(0, dense) for x in inputs.qkv)
    return peers.sdpa(backend, replace(inputs, qkv=(q, k, v)))


def _quantized_inside(scaling: str, inputs: Inputs) -> Call:
    """Scales, or the history they come from, are a layer's own: made before the call."""
    packing = inputs.packing
    assert packing is not None
    options = scaling_options(scaling, packing.cu_seqlens_k.device)
    options |= {"value_layout": "transposed", "cu_seqlens": packing.cu_seqlens_k}
    return lambda: _over(ops.quantize_qkv(*inputs.qkv, **options), AttentionSpec(), packing)()


def _over(made: QuantizedQkv, spec: AttentionSpec, packing: Packing | None, **impl: Any) -> Call:
    """Our attention over q, k and v that are quantized."""
    options = {"packing": packing, "value_layout": made.value_layout, **impl}
    return partial(ops.attention, made.q, made.k, made.v, spec, made.scales, **options)


ATTENTION = Suite(
    small=(Size((512,), 8, 8),),
    large=(
        *(Size((8192,), head_dim=head_dim) for head_dim in (64, 72, 80, 96, 128, 192, 256)),
        *(Size((length,), 32, 8, is_causal=True) for length in (16384, 32768)),
        Size((16384,), 16, 8, 256, is_causal=True),
    ),
    make=partial(_attention, "attention"),
)


def _grid(
    num_tokens: int,
    lengths: Sequence[int],
    head_dims: Sequence[int],
    heads: Sequence[tuple[int, int]],
) -> tuple[Size, ...]:
    """So many tokens as sequences of each length, with each kind of heads, full and causal."""
    return tuple(
        Size((length,) * (num_tokens // length), *of_layer, head_dim, is_causal)
        for head_dim in head_dims
        for of_layer in heads
        for is_causal in (False, True)
        for length in lengths
    )


ATTENTION_GRID = Suite(
    small=_grid(128, (64, 128), (64, 72), ((4, 4), (4, 2))),
    large=_grid(
        32768,
        (512, 1024, 2048, 4096, 8192, 32768),
        (64, 72, 80, 96, 128, 192, 256),
        ((16, 16), (16, 2)),
    ),
    make=partial(_attention, "attention_grid"),
)
ATTENTION_LEVELS = Suite(
    small=(Size((144,), 1, 1, 32, value_mean=1.0),),
    # Sums over values of mean 0 stay small; those over values of mean 1 grow with every key.
    large=tuple(
        Size((length,), 8, 8, is_causal=is_causal, value_mean=mean)
        for mean in (0.0, 1.0)
        for is_causal in (False, True)
        for length in (8192, 32768, 131072)
    ),
    make=partial(_attention, "attention_levels"),
)
PACKED_ATTENTION = Suite(
    small=(Size((100, 60, 3), 4, 2, 64),),
    large=(Size((8192, 4096, 2048)),),
    make=partial(_attention, "packed_attention"),
)
ENCODER_ATTENTION = Suite(
    small=(Size((50,) * 3, 2, 2, 72),),
    # Three images in Qwen3-VL's vision tower.
    large=tuple(Size((length,) * 3, head_dim=72) for length in (3520, 8160, 14400, 32640)),
    make=partial(_attention, "encoder_attention"),
)
