"""quantize_qkv: queries, keys and values of one attention call to FP8."""

import math
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.quantize_qkv.config import MAX_RING_LENGTH, objection
from octavo.numerics.amax import AmaxHistory, AmaxRing
from octavo.numerics.formats import E4M3, Fp8Format, format_named
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, parse_granularity
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QkvScales, QuantizedQkv, align, empty_aligned
from octavo.numerics.rotary import Rotary
from octavo.numerics.value_layout import ValueLayout, check_value_layout, num_columns
from octavo.ops.check import (
    check_cu_seqlens,
    check_float,
    check_heads,
    check_one_device,
    check_scales,
)
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_impl, register_reference
from octavo.reference.qkv import quantize_qkv as reference

History = tuple[AmaxHistory, AmaxHistory, AmaxHistory]
Three = tuple[Tensor, Tensor, Tensor]


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: QkvScales | None = None,
    *,
    history: History | None = None,
    granularity: Granularity | None = None,
    fmt: Fp8Format = E4M3,
    norm: QkNorm | None = None,
    rotary: Rotary | None = None,
    value_layout: ValueLayout = "rows",
    cu_seqlens: Tensor | None = None,
    num_tokens: Tensor | None = None,
    impl: str | None = None,
) -> QuantizedQkv:
    """q, k and v in FP8.

    q: [..., num_heads, head_dim]; k, v: [..., num_kv_heads, head_dim]; bf16, fp16 or fp32, views of
    a joint projection as well.
    scales: static, per tensor or per head; left out, they are dynamic: from the largest amax in the
    `history` of q, k and v, into which this call is pushed first, or without a history from this
    call alone. granularity: tensor (the default) or head, for dynamic scales.
    norm, rotary: q and k are normalized, then turned, in float32; the amax is that of the result.
    Sequences of a norm with two streams are dense: [..., length, heads, head_dim].
    value_layout: "transposed" gives vᵀ as FP8 tensor cores want it (`numerics.value_layout`), of a
    dense batch [batch, kv_len, …], or packed [tokens, …] with the cu_seqlens of the keys, int32.
    num_tokens: how many tokens of packed q, k and v there are, int32 [1]; the rest is padding,
    which dynamic scales and their history do not look at.
    """
    _check(q, k, v)
    _check_num_tokens(q, k, num_tokens)
    layout = _check_layout(k, value_layout, cu_seqlens)
    check_one_device(q=q, k=k, v=v, cu_seqlens=cu_seqlens, num_tokens=num_tokens)
    if rotary is not None:
        check_float("cos and sin", rotary.cos)
        check_one_device(q=q, cos=rotary.cos, sin=rotary.sin)
        for x in (q, k):
            rotary.check(math.prod(x.shape[:-2]), x.shape[-1])
    if norm is not None:
        if len(norm.q) == 2 and (cu_seqlens is not None or num_tokens is not None):
            raise ConfigError(
                "norms of two streams are for dense sequences: leave cu_seqlens and num_tokens out"
            )
        check_float("norm weights", norm.q)
        check_one_device(q=q, norm=norm.q, **{"norm of k": norm.k})
        for x in (q, k):
            norm.check(x.shape[-3], x.shape[-1])
    before = _unpack(norm, rotary)
    if scales is not None:
        if history is not None:
            raise ConfigError("expected static scales or a history for dynamic ones, got both")
        if granularity is not None:
            raise ConfigError("static scales say their own granularity: leave granularity out")
        if num_tokens is not None:
            raise ConfigError("static scales look at no tokens: leave num_tokens out")
        check_scales(scales, q, k, v, per_token=False)
        given = [scales.q, scales.k, scales.v]
        q8, k8, v8 = torch.ops.octavo.quantize_qkv_static(
            q, k, v, given, *before, layout, cu_seqlens, fmt.name, impl
        )
        return QuantizedQkv(q8, k8, v8, scales, value_layout)
    granularity = granularity or PerTensor()
    if not isinstance(granularity, PerTensor | PerHead):
        raise ConfigError(f"expected granularity tensor or head for q, k and v, got {granularity}")
    rings = [] if history is None else _rings(history, granularity, (q, k, v))
    name = str(granularity)
    q8, k8, v8, q_scale, k_scale, v_scale = torch.ops.octavo.quantize_qkv_dynamic(
        *(q, k, v, rings, *before, layout, cu_seqlens, num_tokens, name, fmt.name, impl)
    )
    return QuantizedQkv(q8, k8, v8, QkvScales(q_scale, k_scale, v_scale), value_layout)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x)
        if x.dim() < 3:
            raise ConfigError(f"expected {name} [..., heads, head_dim], got {list(x.shape)}")
    if k.shape != v.shape:
        raise ConfigError(f"expected k and v of one shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"expected q and k of one head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    check_heads(q.shape[-2], k.shape[-2])


def _check_num_tokens(q: Tensor, k: Tensor, num_tokens: Tensor | None) -> None:
    if num_tokens is None:
        return
    if q.dim() != 3 or len(q) != len(k):
        raise ConfigError(
            "num_tokens is for packed q, k and v of the same tokens [tokens, heads, head_dim], got "
            f"q {list(q.shape)} and k {list(k.shape)}"
        )
    if num_tokens.dtype != torch.int32 or num_tokens.shape != (1,):
        raise ConfigError(
            f"expected num_tokens as int32 [1], got {num_tokens.dtype} {list(num_tokens.shape)}"
        )


def _check_layout(k: Tensor, layout: ValueLayout, cu_seqlens: Tensor | None) -> str:
    check_value_layout(layout)
    if layout == "rows":
        if cu_seqlens is not None:
            raise ConfigError("cu_seqlens place transposed values: leave them out for rows")
        return layout
    expected = 4 if cu_seqlens is None else 3
    if k.dim() != expected:
        raise ConfigError(
            "expected values to transpose as [batch, kv_len, heads, head_dim], or packed [tokens, "
            f"heads, head_dim] with cu_seqlens; got {list(k.shape)} "
            f"{'without' if cu_seqlens is None else 'with'} cu_seqlens"
        )
    if cu_seqlens is not None:
        check_cu_seqlens("cu_seqlens", cu_seqlens)
    return layout


def _unpack(norm: QkNorm | None, rotary: Rotary | None) -> tuple[Any, ...]:
    """What is done to q and k first, as the torch op takes it."""
    weights: tuple[Any, ...] = ([], 0.0, 0)
    tables: tuple[Any, ...] = (None, None, False)
    if norm is not None:
        weights = ([norm.q, norm.k], norm.eps, norm.num_first)
    if rotary is not None:
        tables = (rotary.cos, rotary.sin, rotary.is_interleaved)
    return *weights, *tables


def _rings(history: History, granularity: Granularity, tensors: Three) -> list[Tensor]:
    """The three tensors of each of the three rings, one after the other."""
    if len(history) != 3:
        raise ConfigError(f"expected a history of q, of k and of v, got {len(history)} of them")
    if history[0] is history[1] or history[1] is history[2] or history[0] is history[2]:
        raise ConfigError("expected a history of each of q, k and v, got one of them twice")
    for name, one, x in zip("qkv", history, tensors, strict=True):
        expected = granularity.scale_shape(tuple(x.shape))
        if tuple(one.values.shape[1:]) != expected:
            raise ConfigError(
                f"expected a history of {name} for amax values of shape {list(expected)}, got one "
                f"for {list(one.values.shape[1:])}"
            )
        if len(one.values) > MAX_RING_LENGTH:
            raise ConfigError(
                f"expected a history of {name} of at most {MAX_RING_LENGTH} passes, got "
                f"{len(one.values)}"
            )
        if not one.values.is_contiguous():
            raise ConfigError(
                f"expected contiguous values in the history of {name}, got strides "
                f"{one.values.stride()}"
            )
        check_one_device(**{name: x, f"{name}'s history": one.values})
    return [buffer for one in history for buffer in one.ring]


def _options(
    norms: list[Tensor],
    eps: float,
    num_first: int,
    cos: Tensor | None,
    sin: Tensor | None,
    is_interleaved: bool,
    layout: str,
    cu_seqlens: Tensor | None,
) -> tuple[dict[str, Any], set[str]]:
    """The arguments of an implementation beside tensors and scales, and the features they need."""
    norm = QkNorm(norms[0], norms[1], eps, num_first) if norms else None
    rotary = None if cos is None or sin is None else Rotary(cos, sin, is_interleaved)
    options = {"norm": norm, "rotary": rotary, "value_layout": layout, "cu_seqlens": cu_seqlens}
    used = {
        "norm": norm is not None,
        "rotary": rotary is not None,
        "interleaved": is_interleaved,
        "transposed": layout == "transposed",
        "packed": cu_seqlens is not None,
    }
    return options, {name for name, is_used in used.items() if is_used}


def _request(q: Tensor, granularity: str, fmt: str, features: set[str]) -> Request:
    return Request(
        op="quantize_qkv",
        device=describe(q.device),
        dtype=q.dtype,
        other_dtype=format_named(fmt).dtype,
        head_dim=q.shape[-1],
        granularity=granularity,
        features=frozenset(features),
    )


def _finish(result: QuantizedQkv) -> Three:
    """q, k and v with the strides that are promised, whoever made them."""
    is_rows = result.value_layout == "rows"
    return align(result.q), align(result.k), align(result.v) if is_rows else result.v.contiguous()


def _fake_data(
    q: Tensor, k: Tensor, v: Tensor, layout: str, cu_seqlens: Tensor | None, fmt: str
) -> Three:
    dtype = format_named(fmt).dtype
    q8, k8 = (empty_aligned(x.shape, dtype, x) for x in (q, k))
    if layout == "rows":
        return q8, k8, empty_aligned(v.shape, dtype, v)
    *outer, num_keys, num_heads, head_dim = v.shape
    columns = num_columns(num_keys, None if cu_seqlens is None else len(cu_seqlens) - 1)
    return q8, k8, v.new_empty((*outer, num_heads, head_dim, columns), dtype=dtype)


def _static(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: list[Tensor],
    norms: list[Tensor],
    eps: float,
    num_first: int,
    cos: Tensor | None,
    sin: Tensor | None,
    is_interleaved: bool,
    layout: str,
    cu_seqlens: Tensor | None,
    fmt: str,
    impl: str | None,
) -> Three:
    granularity = "head" if any(scale.dim() for scale in scales) else "tensor"
    options, features = _options(
        norms, eps, num_first, cos, sin, is_interleaved, layout, cu_seqlens
    )
    run = find_run(_request(q, granularity, fmt, features | {"static"}), impl)
    return _finish(run(q, k, v, format_named(fmt), scales=QkvScales(*scales), **options))


def _static_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: list[Tensor],
    norms: list[Tensor],
    eps: float,
    num_first: int,
    cos: Tensor | None,
    sin: Tensor | None,
    is_interleaved: bool,
    layout: str,
    cu_seqlens: Tensor | None,
    fmt: str,
    impl: str | None,
) -> Three:
    return _fake_data(q, k, v, layout, cu_seqlens, fmt)


def _dynamic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    norms: list[Tensor],
    eps: float,
    num_first: int,
    cos: Tensor | None,
    sin: Tensor | None,
    is_interleaved: bool,
    layout: str,
    cu_seqlens: Tensor | None,
    num_tokens: Tensor | None,
    granularity: str,
    fmt: str,
    impl: str | None,
) -> tuple[Tensor, ...]:
    options, features = _options(
        norms, eps, num_first, cos, sin, is_interleaved, layout, cu_seqlens
    )
    run = find_run(_request(q, granularity, fmt, features | {"dynamic"}), impl)
    rings = tuple(AmaxRing(*buffers[i : i + 3]) for i in range(0, len(buffers), 3))
    result: QuantizedQkv = run(
        q,
        k,
        v,
        format_named(fmt),
        rings=rings or None,
        granularity=parse_granularity(granularity),
        num_tokens=num_tokens,
        **options,
    )
    return *_finish(result), result.scales.q, result.scales.k, result.scales.v


def _dynamic_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    norms: list[Tensor],
    eps: float,
    num_first: int,
    cos: Tensor | None,
    sin: Tensor | None,
    is_interleaved: bool,
    layout: str,
    cu_seqlens: Tensor | None,
    num_tokens: Tensor | None,
    granularity: str,
    fmt: str,
    impl: str | None,
) -> tuple[Tensor, ...]:
    choice = parse_granularity(granularity)
    scales = [
        x.new_empty(choice.scale_shape(tuple(x.shape)), dtype=torch.float32) for x in (q, k, v)
    ]
    return (*_fake_data(q, k, v, layout, cu_seqlens, fmt), *scales)


_OPTIONS = (
    "Tensor[] norms, float eps, SymInt num_first, Tensor? cos, Tensor? sin, bool is_interleaved, "
    "str value_layout, Tensor? cu_seqlens"
)
define(
    f"quantize_qkv_static(Tensor q, Tensor k, Tensor v, Tensor[] scales, {_OPTIONS}, "
    "str format, str? impl) -> (Tensor, Tensor, Tensor)",
    _static,
    _static_fake,
)
define(
    f"quantize_qkv_dynamic(Tensor q, Tensor k, Tensor v, Tensor(a!)[] history, {_OPTIONS}, "
    "Tensor? num_tokens, str granularity, str format, str? impl) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dynamic,
    _dynamic_fake,
)


def _triton(q: Tensor, k: Tensor, v: Tensor, fmt: Fp8Format, **options: Any) -> QuantizedQkv:
    from octavo.kernels.quantize_qkv.triton import quantize_qkv as run

    return run(q, k, v, fmt, **options)


def _triton_objection(request: Request) -> str | None:
    return objection(request.device, request.head_dim, request.features)


register_reference("quantize_qkv", reference)
register_impl(
    "quantize_qkv",
    "triton",
    _triton,
    objection=_triton_objection,
    reason="one launch with static scales, two with dynamic ones",
    is_automatic=True,
)
