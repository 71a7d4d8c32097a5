"""What one-level accumulation loses on long contexts, shown by a needle.

The haystack's keys all have the same logit. Its values cancel: each channel is +1 or −1 in the
first half of the context and the opposite in the second, so that only the needle in the middle
remains. The needle is found if its channel has the largest output. On the way the sum of the
haystack grows to half of the context's length, and there an adder of 14 bits stands still.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import ops
from octavo.measure.evaluate.attention_error import Row
from octavo.measure.records import Measurement
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import relative_rms
from octavo.numerics.formats import E4M3
from octavo.numerics.qkv import QkvScales
from octavo.reference.attention import attention as reference

NEEDLE_LOGIT = math.log(4)


@dataclass(frozen=True)
class Needle:
    """One query over `length` keys, exact in e4m3: q [1, 1, 1, head_dim], k and v alike."""

    q: Tensor
    k: Tensor
    v: Tensor
    channel: int  # where the needle's value lies

    def is_found(self, out: Tensor) -> bool:
        """Whether the needle's channel has the largest output."""
        return int(out.flatten().argmax()) == self.channel


def make_needle(length: int, *, head_dim: int = 64, seed: int = 0) -> Needle:
    """A needle in the middle of `length` keys, in a channel where the haystack starts negative."""
    generator = torch.Generator().manual_seed(seed)
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


def accumulation_errors(lengths: list[int], row: Row) -> Iterator[Measurement]:
    """For each length, whether each way to accumulate finds the needle, and its relative error."""
    for length in lengths:
        needle = make_needle(length)
        spec = AttentionSpec(softmax_scale=NEEDLE_LOGIT)
        truth, _ = reference(needle.q, needle.k, needle.v, spec, compute=torch.float64)
        for name, promote_every in (("two-level", 1), ("one-level", None)):
            out = _attend_fp8(needle, promote_every)
            yield row(
                op="accumulation_error",
                impl="reference",
                case={"length": length, "accumulation": name},
                values={
                    "relative_rms": relative_rms(out, truth),
                    "is_found": float(needle.is_found(out)),
                },
                baseline="float64",
            )


def _attend_fp8(needle: Needle, promote_every: int | None) -> Tensor:
    spec = AttentionSpec(softmax_scale=NEEDLE_LOGIT, promote_every=promote_every)
    q, k, v = (x.to(E4M3.dtype) for x in (needle.q, needle.k, needle.v))
    return ops.attention(q, k, v, spec, QkvScales.ones(), out_dtype=torch.float32)
