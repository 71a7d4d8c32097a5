"""What FP8 costs one attention layer in accuracy: by format, granularity and accumulation.

One-level accumulation loses a needle on long contexts. The haystack's keys all have the same logit.
Its values cancel: each channel is +1 or −1 in the first half of the context and the opposite in the
second, so that only the needle in the middle remains. The needle is found if its channel has the
largest output. On the way the sum of the haystack grows to half of the context's length, and there
an adder of 14 bits stands still.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView
from octavo.integrations.transformers.calibrate import CapturedQkv
from octavo.measure.records import Scalar
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import relative_rms, sqnr_db
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import quantize
from octavo.reference.attention import attention as reference

CAUSAL = AttentionSpec(causal=True)
DECODED_TOKENS = 4
NEEDLE_LOGIT = math.log(4)


@dataclass(frozen=True)
class Error:
    """What a record says: of which op, of which case, and what came out."""

    op: str
    case: Mapping[str, Scalar]
    values: Mapping[str, float]


def quantization_errors(layer: int, qkv: CapturedQkv) -> Iterator[Error]:
    """SQNR of q, k and v, for each format and granularity."""
    for name in ("q", "k", "v"):
        x: Tensor = getattr(qkv, name)
        for fmt in (E4M3, E5M2):
            for granularity in (PerTensor(), PerHead(), PerToken()):
                error = sqnr_db(quantize(x, granularity, fmt).dequantize(), x)
                case: dict[str, Scalar] = {"layer": layer, "tensor": name, "format": fmt.name}
                case["granularity"] = str(granularity)
                yield Error("quantize_error", case, {"sqnr_db": error})


def attention_errors(layer: int, qkv: CapturedQkv) -> Iterator[Error]:
    """Relative error of causal attention against float64: BF16 beside FP8."""
    truth, _ = reference(qkv.q, qkv.k, qkv.v, CAUSAL, compute=torch.float64)
    bf16 = ops.attention(qkv.q.bfloat16(), qkv.k.bfloat16(), qkv.v.bfloat16(), CAUSAL)
    results = {"bf16": bf16}
    for granularity in (PerTensor(), PerHead()):
        fp8 = ops.quantize_qkv(qkv.q, qkv.k, qkv.v, granularity=granularity)
        out = ops.attention(fp8.q, fp8.k, fp8.v, CAUSAL, fp8.scales)
        results[f"fp8 per {granularity}"] = out
    for recipe, out in results.items():
        case: dict[str, Scalar] = {"layer": layer, "recipe": recipe, "length": qkv.q.shape[1]}
        yield Error("attention_error", case, {"relative_rms": relative_rms(out, truth)})


def decode_errors(layer: int, qkv: CapturedQkv) -> Iterator[Error]:
    """Relative error of the newest tokens over a paged cache: BF16 beside FP8."""
    truth, _ = reference(qkv.q, qkv.k, qkv.v, CAUSAL, compute=torch.float64)
    truth = truth[:, -DECODED_TOKENS:]
    recipes: list[tuple[str, torch.dtype, Granularity]] = [
        ("bf16", torch.bfloat16, PerTensor()),
        *((f"fp8 per {g}", E4M3.dtype, g) for g in (PerTensor(), PerHead(), PerToken())),
    ]
    for recipe, dtype, granularity in recipes:
        view, spec = _filled_cache(qkv, dtype, granularity)
        out = ops.decode_attention(qkv.q[:, -DECODED_TOKENS:].bfloat16(), view)
        case: dict[str, Scalar] = {"layer": layer, "recipe": recipe, "length": qkv.k.shape[1]}
        values = {"relative_rms": relative_rms(out, truth), "bytes_per_token": spec.bytes_per_token}
        yield Error("decode_error", case, values)


def _filled_cache(
    qkv: CapturedQkv, dtype: torch.dtype, granularity: Granularity
) -> tuple[PagedView, CacheSpec]:
    """A cache of one layer that holds the keys and values of one sequence, its pages in order."""
    _, length, num_kv_heads, head_dim = qkv.k.shape
    spec = CacheSpec(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        granularity=granularity,
    )
    storage = PagedStorage(spec, spec.num_pages_for(length), "cpu")
    if dtype == E4M3.dtype and not isinstance(granularity, PerToken):
        storage.set_scales(0, *(quantize(x, granularity).scale for x in (qkv.k, qkv.v)))
    page_table = torch.arange(storage.num_pages, dtype=torch.int32).unsqueeze(0)
    view = storage.view(0, page_table, torch.tensor([length], dtype=torch.int32))
    slots = view.slots(torch.zeros(length, dtype=torch.int32), torch.arange(length))
    ops.append_kv(view, qkv.k[0], qkv.v[0], slots)
    return view, spec


@dataclass(frozen=True)
class Needle:
    """One query over `length` keys, exact in e4m3: q [1, 1, 1, head_dim], k and v alike.

    channel: where the needle's value lies, and the output of a needle that is found is largest.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    channel: int


def make_needle(length: int, *, seed: int = 0) -> Needle:
    """A needle in the middle of `length` keys, in a channel where the haystack starts negative."""
    generator, head_dim = torch.Generator().manual_seed(seed), 64
    sign = torch.randint(0, 2, (head_dim,), generator=generator).float() * 2 - 1
    channel = int(torch.randint(0, head_dim, (), generator=generator))
    sign[channel] = -1.0
    middle = length // 2
    v = sign.expand(length, head_dim).clone()
    v[middle:] *= -1.0
    v[middle] = 0.0
    v[middle, channel] = E4M3.max
    q = torch.zeros(head_dim)
    q[0] = 1.0
    k = torch.zeros(length, head_dim)
    k[middle, 0] = 1.0
    shape = (1, -1, 1, head_dim)
    return Needle(q.view(shape), k.view(shape), v.view(shape), channel)


def accumulation_errors(lengths: Iterable[int]) -> Iterator[Error]:
    """For each length, whether each way to accumulate finds the needle, and its relative error."""
    for length in lengths:
        needle = make_needle(length)
        spec = AttentionSpec(softmax_scale=NEEDLE_LOGIT)
        truth, _ = reference(needle.q, needle.k, needle.v, spec, compute=torch.float64)
        q, k, v = (x.to(E4M3.dtype) for x in (needle.q, needle.k, needle.v))
        for name, promote_every in (("two-level", 1), ("one-level", None)):
            summed = replace(spec, promote_every=promote_every)
            out = ops.attention(q, k, v, summed, QkvScales.ones(), out_dtype=torch.float32)
            case: dict[str, Scalar] = {"length": length, "accumulation": name}
            is_found = float(int(out.flatten().argmax()) == needle.channel)
            values = {"relative_rms": relative_rms(out, truth), "is_found": is_found}
            yield Error("accumulation_error", case, values)
