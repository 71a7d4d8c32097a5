"""Peers' BF16 attention as implementations of our ops, while a benchmark runs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.view import PagedView
from octavo.errors import UnsupportedError
from octavo.measure.bench import peers
from octavo.measure.bench.timing import fastest
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.qkv import QkvScales
from octavo.testing.inputs import make_packing

Prepare = Callable[..., Callable[[], Tensor]]
PEERS: dict[str, Prepare] = {"vllm-fa3": peers.vllm_fa3, "fa3-fwd": peers.fa3_fwd}
PREFILL_PEER = "vllm-fa3"
# What each op is called for, beside accumulation in two levels, which is about FP8.
KINDS = {"attention": {"packed"}, "prefill_attention": {"causal", "window", "sinks"}}
IGNORED = frozenset({"one-level", "promote-later"})


@contextmanager
def registered(folder: Path | None, device: torch.device) -> Iterator[list[str]]:
    """Inside, on a GPU, `attention` has the peers as implementations, to be asked for by name.

    folder: may hold their libraries. One whose library is not there raises when it is called.
    """
    runs = {name: partial(_run, prepare, folder) for name, prepare in PEERS.items()}
    with _added("attention", runs if device.type == "cuda" else {}) as names:
        yield names


@contextmanager
def registered_prefill(folder: Path | None) -> Iterator[str]:
    """Inside, `prefill_attention` has vLLM's FlashAttention-3 by the name that this gives."""
    with _added("prefill_attention", {PREFILL_PEER: partial(run_prefill, folder)}):
        yield PREFILL_PEER


@contextmanager
def _added(op: str, runs: Mapping[str, Callable[..., Any]]) -> Iterator[list[str]]:
    with ExitStack() as stack:
        for name, run in runs.items():
            reason = "a peer, for a benchmark"
            ops.register_impl(op, name, run, objection=_objection, reason=reason)
            stack.callback(ops.unregister_impl, op, name)
        yield list(runs)


def _objection(request: ops.Request) -> str | None:
    if request.dtype != torch.bfloat16:
        return f"it is called in bfloat16, got {request.dtype}"
    if request.other_dtype not in (None, torch.bfloat16):
        return f"it is called over bfloat16, got {request.other_dtype}"
    kinds = KINDS[request.op]
    if others := sorted(request.features - IGNORED - kinds):
        known = ", ".join(sorted(kinds))
        return f"it is called for plain attention or with {known}; got {', '.join(others)}"
    if "window" in request.features and "causal" not in request.features:
        return "it is called with a window for causal attention, got another"
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
    _check_scale(spec, q.shape[-1])
    # Rows of no sequence are zeros, as our op promises: FlashAttention-3 reads values beyond the
    # end of a sequence, and 0 · NaN would reach its result.
    given = None if packing is None else torch.zeros_like(q)
    out = prepare(folder, False, peers.Inputs((q, k, v), packing, out=given))()
    return out.to(out_dtype), q.new_empty(0, dtype=torch.float32)


def _check_scale(spec: AttentionSpec, head_dim: int) -> None:
    if not math.isclose(spec.scale_for(head_dim), head_dim**-0.5):
        raise UnsupportedError(
            f"a peer is called with the softmax scale 1/√head_dim, got {spec.scale_for(head_dim)}"
        )


def run_prefill(
    folder: Path | None,
    q: Tensor,
    view: PagedView,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    spec: AttentionSpec,
    q_scale: Tensor | None,
    *,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    num_cached_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Pages gathered, then attention over rows side by side: faster here than over pages of 64."""
    _check_scale(spec, q.shape[-1])
    key, value, room = gather(view, num_cached_tokens)
    ends = torch.arange(view.num_sequences + 1, dtype=torch.int32, device=q.device) * room
    out = torch.zeros_like(q)
    peers.vllm_fwd(
        peers.load("_vllm_fa3_C", folder),
        q.contiguous(),
        key,
        value,
        out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=ends,
        lengths=view.lengths,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=room,
        softmax_scale=q.shape[-1] ** -0.5,
        is_causal=spec.causal,
        window=spec.window,
        sinks=None if sinks is None else sinks.to(q.dtype),
    )
    return out.to(out_dtype), q.new_empty(0, dtype=torch.float32)


def gather(view: PagedView, num_cached_tokens: int) -> tuple[Tensor, Tensor, int]:
    """Keys and values [sequences · room, num_kv_heads, head_dim], zeros after each sequence's own.

    num_cached_tokens: the most that all sequences have.
    """
    num_pages = min(view.max_pages, -(-num_cached_tokens // view.page_size))
    room = num_pages * view.page_size
    table = view.page_table[:, :num_pages].long()
    is_own = torch.arange(room, device=view.device) < view.lengths[:, None]
    found = []
    for pages in (view.key_pages, view.value_pages):
        rows = pages[table].transpose(2, 3).reshape(len(table) * room, *pages.shape[1::2])
        # What nobody wrote may be NaN, and 0 · NaN would reach the result.
        found.append(rows.masked_fill_(~is_own.view(-1, 1, 1), 0))
    return found[0], found[1], room


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
    shape = (sum(lengths), 3, num_heads, head_dim)
    q, k, v = torch.randn(shape, dtype=torch.bfloat16, device=device).unbind(1)
    packing = make_packing(tuple(lengths), tuple(lengths), device=device)
    calls: dict[str | None, Callable[[], Tensor]] = {}
    for name in (None, *names):
        call = partial(ops.attention, q.contiguous(), k.contiguous(), v, packing=packing, impl=name)
        with suppress(UnsupportedError):
            call()
            calls[name] = call
    if len(calls) == 1:
        return None
    return fastest(calls, device)
