"""Which implementation runs an op, and why.

Each op has implementations in order of preference, the reference last. Asked for by name, an
implementation runs or raises; left out, the first one without an objection runs. An objection is a
sentence that says why a request cannot be served.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import Device
from octavo.numerics.attention import AttentionSpec

OPS = (
    "append_kv",
    "attention",
    "decode_attention",
    "linear_gelu",
    "matvec",
    "prefill_attention",
    "quantize",
    "quantize_qkv",
    "rotate_qk",
    "scaled_mm",
)
# octavo's own; a third party may register one for other GPUs.
NVIDIA_IMPLS = frozenset({"gluon", "torch", "triton"})


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call without its tensors: all that decides whether an implementation can serve it.

    dtype: of the main operand (q, x or a); other_dtype: of what it meets (keys and values, weights,
    pages). group: query heads for each KV head. features: what the call uses beyond the plain case,
    such as "causal" or "sinks". sizes: rows, columns and depth of a matrix product; bias_dtype and
    out_dtype: of its bias and its result.
    """

    op: str
    device: Device
    dtype: torch.dtype
    other_dtype: torch.dtype | None = None
    head_dim: int | None = None
    group: int = 1
    page_size: int | None = None
    granularity: str = "tensor"
    features: frozenset[str] = frozenset()
    sizes: tuple[int, int, int] | None = None
    bias_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Selection:
    """The implementation that runs, why, and why the ones before it do not."""

    impl: str
    reason: str
    objections: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Impl:
    """One implementation of one op.

    run: takes what the op's file documents; "module:function" is imported when it is first needed.
    objection: why it cannot serve a request, or None.
    reason: what to tell who asks why it was chosen. is_automatic: whether it is chosen unasked.
    reluctance: why another should serve a request that this one can serve, or None.
    is_repeatable: whether it asks for no data, and does the same to all tensors that are alike.
    """

    name: str
    run: Callable[..., Any] | str
    objection: Callable[[Request], str | None]
    reason: str
    is_automatic: bool = True
    reluctance: Callable[[Request], str | None] = lambda request: None
    is_repeatable: bool = False


_IMPLS: dict[str, list[Impl]] = {op: [] for op in OPS}
# Signatures of calls that were checked, and what runs such calls; the latter are few.
PREPARED: dict[Any, Any] = {}
_DISTINCT: dict[Any, Any] = {}
# How often a signature was seen after its first call, until its steps are known.
NUM_CALLS: dict[Any, int] = {}
MAX_PREPARED = 4096  # prompts of any length have different signatures


_generation = 0


def generation() -> int:
    """A number that changes when implementations do."""
    return _generation


def remember(signature: object, prepared: Hashable, since: int | None = None) -> None:
    """Keep what runs calls with this signature, until implementations change.

    since: the generation in which it was found; in another one it is not kept.
    """
    if since not in (None, _generation):
        return
    if len(PREPARED) >= MAX_PREPARED:
        forget_calls()
    PREPARED[signature] = _DISTINCT.setdefault(prepared, prepared)


def forget_calls() -> None:
    """Check every call again."""
    for known in (PREPARED, _DISTINCT, NUM_CALLS):
        known.clear()


def _forget() -> None:
    global _generation
    _generation += 1
    find_run.cache_clear()
    forget_calls()


def register_impl(
    op: str,
    name: str,
    run: Callable[..., Any] | str,
    *,
    objection: Callable[[Request], str | None] = lambda request: None,
    reason: str = "registered by a third party",
    is_automatic: bool = False,
    reluctance: Callable[[Request], str | None] = lambda request: None,
    is_repeatable: bool = False,
) -> None:
    """Add an implementation of `op`, to be asked for as impl=`name`.

    run: takes and returns what the op's reference implementation does (see the op's file); or
    "module:function", whose module is imported when it is first needed.
    objection: says why a request cannot be served, or returns None; it is asked once for each
    request, which must be all that it looks at. is_automatic: it also runs unasked, before all
    others, whenever it has no objection and no reluctance, which says why another implementation
    should run unless this one is asked for. is_repeatable: all that it does follows from the
    shapes, strides, dtypes and plain values that it is given, never from data (x.tolist()) or other
    state: calls that repeat are then taped, and played without it (octavo.ops.playback). It must
    launch nothing but by octavo.kernels.launch.launch and by operators of torch.
    """
    impls = _impls_of(op)
    if any(impl.name == name for impl in impls):
        raise ConfigError(f"{op} already has an implementation {name!r}: choose another name")
    impl = Impl(name, run, objection, reason, is_automatic, reluctance, is_repeatable)
    impls.insert(0, impl)
    _forget()


def register_reference(op: str, run: Callable[..., Any]) -> None:
    """Add the reference, which serves every request and comes last."""
    reference = Impl(
        "reference",
        run,
        objection=lambda request: None,
        reason="plain torch runs on any device",
        reluctance=_reference_reluctance,
    )
    _impls_of(op).append(reference)
    _forget()


def _reference_reluctance(request: Request) -> str | None:
    # Who asks for codes asks for speed.
    if "codes" in request.features and request.device.type == "cuda":
        return "it is slow on a GPU: ask for it by name"
    return None


def unregister_impl(op: str, name: str) -> None:
    """Take an implementation away again; the reference stays."""
    if name == "reference":
        raise ConfigError(f"the reference of {op} is its specification and cannot be taken away")
    impls = _impls_of(op)
    impls.remove(_named(op, name))
    _forget()


def select(request: Request, impl: str | None = None) -> Selection:
    """The implementation that serves `request`: the one named, or the first without objection."""
    if impl is not None:
        objection = _objection(_named(request.op, impl), request)
        if objection is not None:
            raise UnsupportedError(f"{request.op} with impl={impl!r} cannot run: {objection}")
        return Selection(impl, "asked for by name")
    objections: dict[str, str] = {}
    for candidate in _impls_of(request.op):
        if not candidate.is_automatic:
            continue
        objection = _objection(candidate, request)
        if objection is None:
            objection = candidate.reluctance(request)
        if objection is None:
            return Selection(candidate.name, candidate.reason, objections)
        objections[candidate.name] = objection
    listed = "; ".join(f"{name}: {objection}" for name, objection in objections.items())
    raise UnsupportedError(f"no implementation of {request.op} can run this: {listed}")


def _objection(impl: Impl, request: Request) -> str | None:
    """Why an implementation cannot serve a request, or None."""
    # By ROCm, torch calls AMD's GPUs "cuda" and gives them versions that look like NVIDIA's.
    if impl.name in NVIDIA_IMPLS and request.device.type == "cuda" and is_rocm():
        return f"octavo's kernels are for NVIDIA GPUs, got {request.device.name} by ROCm"
    return impl.objection(request)


def is_rocm() -> bool:
    """Whether this torch is for AMD's GPUs."""
    return torch.version.hip is not None


@lru_cache(maxsize=4096)  # a request is all that decides, and steps of a model ask the same again
def find_run(request: Request, impl: str | None) -> Callable[..., Any]:
    """The function that serves `request`."""
    run = _named(request.op, select(request, impl).impl).run
    if isinstance(run, str):
        module, _, function = run.partition(":")
        run = getattr(import_module(module), function)
    return run


def is_repeatable(request: Request, impl: str | None) -> bool:
    """Whether calls that the same implementation serves can be taped (octavo.ops.playback)."""
    return _named(request.op, select(request, impl).impl).is_repeatable


def impl_names(op: str) -> list[str]:
    """The implementations of `op`, in order of preference."""
    return [impl.name for impl in _impls_of(op)]


def features_of(spec: AttentionSpec, **used: bool) -> frozenset[str]:
    """What an attention call uses beyond the plain case: of its spec, and the `used` arguments."""
    used |= {
        "causal": spec.causal,
        "window": spec.window is not None,
        "softcap": spec.softcap is not None,
        "one-level": spec.promote_every is None,
        "promote-later": (spec.promote_every or 1) > 1,
        "codes": spec.exponentials == "codes",
    }
    return frozenset(name for name, is_used in used.items() if is_used)


def scale_granularity(scale: Tensor, x: Tensor) -> str:
    """The granularity of an attention operand [..., heads, head_dim] with this scale."""
    if scale.dim() == 0:
        return "tensor"
    return "token" if scale.dim() == x.dim() - 1 else "head"


def _impls_of(op: str) -> list[Impl]:
    if op not in _IMPLS:
        raise ConfigError(f"expected an op, one of {', '.join(OPS)}; got {op!r}")
    return _IMPLS[op]


def _named(op: str, name: str) -> Impl:
    for impl in _impls_of(op):
        if impl.name == name:
            return impl
    expected = ", ".join(impl_names(op))
    raise ConfigError(f"expected impl for {op}, one of {expected}; got {name!r}")
