"""Peers' BF16 attention as implementations of the op `attention`, while a benchmark runs."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import UnsupportedError
from octavo.measure.bench import peers
from octavo.measure.bench.timing import sample_in_turn_ms
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.qkv import QkvScales

Prepare = Callable[..., Callable[[], Tensor]]
PEERS: dict[str, Prepare] = {"vllm-fa3": peers.vllm_fa3, "fa3-fwd": peers.fa3_fwd}
# Accumulation in two levels is about FP8.
IGNORED = frozenset({"packed", "one-level", "promote-later"})


@contextmanager
def registered(folder: Path | None, names: Sequence[str] = tuple(PEERS)) -> Iterator[list[str]]:
    """Inside, `attention` has these peers as implementations, to be asked for by name.

    folder: may hold their libraries. One whose library is not there raises when it is called.
    """
    added: list[str] = []
    try:
        for name in names:
            ops.register_impl(
                "attention",
                name,
                partial(_run, PEERS[name], folder),
                objection=_objection,
                reason="a peer, for a benchmark",
            )
            added.append(name)
        yield added
    finally:
        for name in added:
            ops.unregister_impl("attention", name)


def _objection(request: ops.Request) -> str | None:
    if request.dtype != torch.bfloat16:
        return f"it is called in bfloat16, got {request.dtype}"
    if others := sorted(request.features - IGNORED):
        return f"it is called for plain or packed attention, got {', '.join(others)}"
    return None


def _run(
    prepare: Prepare,
    folder: Path | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    scales: QkvScales,
    *,
    packing: Packing | None,
    out_dtype: torch.dtype,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """What the op takes; it has refused sinks, masks and other layouts of values before."""
    head_dim = q.shape[-1]
    if not math.isclose(spec.scale_for(head_dim), head_dim**-0.5):
        raise UnsupportedError(
            f"a peer is called with the softmax scale 1/√head_dim, got {spec.scale_for(head_dim)}"
        )
    # Rows of no sequence are zeros, as our op promises: FlashAttention-3 reads values beyond the
    # end of a sequence, and 0 · NaN would reach its result.
    given = None if packing is None else torch.zeros_like(q)
    out = prepare(folder, False, q, k, v, False, packing, given)()
    return out.to(out_dtype), q.new_empty(0, dtype=torch.float32)


def find_fastest(
    names: Sequence[str],
    num_heads: int,
    head_dim: int,
    lengths: Sequence[int],
    device: torch.device,
) -> str | None:
    """The fastest of these implementations for packed BF16 sequences; None is what `select` takes.

    Those that cannot run are left out.
    """
    num_tokens = sum(lengths)
    shape = (num_tokens, 3, num_heads, head_dim)
    q, k, v = torch.randn(shape, dtype=torch.bfloat16, device=device).unbind(1)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    packing = Packing.same(ends, max(lengths))
    calls: dict[str | None, Callable[[], Tensor]] = {}
    for name in (None, *names):
        call = partial(ops.attention, q.contiguous(), k.contiguous(), v, packing=packing, impl=name)
        try:
            call()
        except UnsupportedError:
            continue
        calls[name] = call
    if len(calls) == 1:
        return None
    samples = sample_in_turn_ms(list(calls.values()), device, num_samples=5)
    medians = dict(zip(calls, map(statistics.median, samples), strict=True))
    return min(medians, key=lambda name: medians[name])
