"""quantize_qkv: queries, keys and values of one attention call to FP8."""

from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.quantize_qkv.config import objection
from octavo.numerics.amax import AmaxRing
from octavo.numerics.formats import E4M3, Fp8Format, format_named
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, parse_granularity
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QkvScales, QuantizedQkv, align, empty_aligned
from octavo.numerics.rotary import Rotary
from octavo.numerics.value_layout import ValueLayout, num_columns
from octavo.ops.check import check_one_device, check_scales
from octavo.ops.check_qkv import (
    History,
    Three,
    check_first,
    check_history,
    check_layout,
    check_norm,
    check_num_tokens,
    check_rotary,
    check_tensors,
)
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_impl, register_reference
from octavo.reference.qkv import quantize_qkv as reference


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
    first: Three | None = None,
    impl: str | None = None,
) -> QuantizedQkv:
    """Quantize q, k and v to FP8, for attention.

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
    first: q, k and v of tokens that stand in front of these in each sequence, such as a text's
    before an image's, [batch, num_first, heads, head_dim]: the result is that of both concatenated,
    which nobody has to do. For dense q, k and v of the same tokens.
    """
    check_tensors(q, k, v)
    check_num_tokens(q, k, num_tokens)
    layout = check_layout(k, value_layout, cu_seqlens)
    check_one_device(q=q, k=k, v=v, cu_seqlens=cu_seqlens, num_tokens=num_tokens)
    is_packed = cu_seqlens is not None or num_tokens is not None
    if first is not None:
        check_first(first, (q, k, v), is_packed)
    if rotary is not None:
        check_rotary(rotary, q, k, 0 if first is None else first[0].shape[1])
    if norm is not None:
        check_norm(norm, q, k, first, is_packed)
    before = _unpack(first, norm, rotary)
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
    rings = [] if history is None else check_history(history, granularity, (q, k, v))
    name = str(granularity)
    q8, k8, v8, q_scale, k_scale, v_scale = torch.ops.octavo.quantize_qkv_dynamic(
        q, k, v, rings, *before, layout, cu_seqlens, num_tokens, name, fmt.name, impl
    )
    return QuantizedQkv(q8, k8, v8, QkvScales(q_scale, k_scale, v_scale), value_layout)


def _unpack(first: Three | None, norm: QkNorm | None, rotary: Rotary | None) -> tuple[Any, ...]:
    """What stands in front, and what is done to q and k, as the torch op takes it."""
    weights: tuple[Any, ...] = ([], 0.0, 0)
    tables: tuple[Any, ...] = (None, None, False)
    if norm is not None:
        weights = ([norm.q, norm.k], norm.eps, norm.num_first)
    if rotary is not None:
        tables = (rotary.cos, rotary.sin, rotary.is_interleaved)
    return [] if first is None else list(first), *weights, *tables


def _options(
    first: list[Tensor],
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
    options = {
        "first": tuple(first) if first else None,
        "norm": norm,
        "rotary": rotary,
        "value_layout": layout,
        "cu_seqlens": cu_seqlens,
    }
    used = {
        "first": bool(first),
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: list[Tensor],
    layout: str,
    cu_seqlens: Tensor | None,
    fmt: str,
) -> Three:
    dtype = format_named(fmt).dtype
    shapes = [x.shape for x in (q, k, v)]
    if first:
        lengths = [x.shape[1] + other.shape[1] for x, other in zip((q, k, v), first, strict=True)]
        shapes = [torch.Size([x[0], n, *x[2:]]) for x, n in zip(shapes, lengths, strict=True)]
    q8, k8 = (empty_aligned(shape, dtype, q) for shape in shapes[:2])
    if layout == "rows":
        return q8, k8, empty_aligned(shapes[2], dtype, v)
    *outer, num_keys, num_heads, head_dim = shapes[2]
    columns = num_columns(num_keys, None if cu_seqlens is None else len(cu_seqlens) - 1)
    return q8, k8, v.new_empty((*outer, num_heads, head_dim, columns), dtype=dtype)


def _static(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: list[Tensor],
    first: list[Tensor],
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
) -> tuple[Tensor, Tensor, Tensor]:
    granularity = "head" if any(scale.dim() for scale in scales) else "tensor"
    options, features = _options(
        first, norms, eps, num_first, cos, sin, is_interleaved, layout, cu_seqlens
    )
    run = find_run(_request(q, granularity, fmt, features | {"static"}), impl)
    return _finish(run(q, k, v, format_named(fmt), scales=QkvScales(*scales), **options))


def _dynamic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    history: list[Tensor],
    first: list[Tensor],
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options, features = _options(
        first, norms, eps, num_first, cos, sin, is_interleaved, layout, cu_seqlens
    )
    run = find_run(_request(q, granularity, fmt, features | {"dynamic"}), impl)
    rings = tuple(AmaxRing(*history[i : i + 3]) for i in range(0, len(history), 3))
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
    first: list[Tensor],
    layout: str,
    cu_seqlens: Tensor | None,
    granularity: str,
    fmt: str,
) -> tuple[Tensor, ...]:
    choice = parse_granularity(granularity)
    scales = [
        x.new_empty(choice.scale_shape(tuple(x.shape)), dtype=torch.float32) for x in (q, k, v)
    ]
    return (*_fake_data(q, k, v, first, layout, cu_seqlens, fmt), *scales)


define("quantize_qkv_static", _static, _fake_data)
define("quantize_qkv_dynamic", _dynamic, _dynamic_fake, writes=("history",))


def _triton_objection(request: Request) -> str | None:
    return objection(request.device, request.head_dim, request.features)


register_reference("quantize_qkv", reference)
register_impl(
    "quantize_qkv",
    "triton",
    "octavo.kernels.quantize_qkv.triton:quantize_qkv",
    objection=_triton_objection,
    reason="one launch with static scales, two with dynamic ones",
    is_automatic=True,
)
