"""quantize_qkv: queries, keys and values of one attention call to FP8."""

from collections.abc import Callable
from dataclasses import dataclass
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
from octavo.ops.arguments import Arguments
from octavo.ops.check import check_one_device, check_scales
from octavo.ops.check_qkv import (
    History,
    Rings,
    Three,
    check_first,
    check_history,
    check_layout,
    check_norm,
    check_num_tokens,
    check_rings,
    check_rotary,
    check_tensors,
)
from octavo.ops.register import Operator
from octavo.ops.select import Request, register_impl, register_reference
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
    if first is not None and len(first) != 3:
        raise ConfigError(f"expected first as q, k and v, got {len(first)} tensors")
    shared = q, k, v, first, norm, rotary, value_layout, cu_seqlens, num_tokens, fmt, impl
    if scales is None:
        rings = None if history is None else check_history(history)
        call = DynamicQkvArguments(*shared, rings, granularity or PerTensor())
        q8, k8, v8, q_scale, k_scale, v_scale = _DYNAMIC(call)
        return QuantizedQkv(q8, k8, v8, QkvScales(q_scale, k_scale, v_scale), value_layout)
    if history is not None:
        raise ConfigError("expected static scales or a history for dynamic ones, got both")
    if granularity is not None:
        raise ConfigError("static scales say their own granularity: leave granularity out")
    q8, k8, v8 = _STATIC(StaticQkvArguments(*shared, scales))
    return QuantizedQkv(q8, k8, v8, scales, value_layout)


@dataclass(eq=False)
class QkvArguments(Arguments):
    """What static and dynamic scales have in common of a call of `quantize_qkv`."""

    q: Tensor
    k: Tensor
    v: Tensor
    first: Three | None
    norm: QkNorm | None
    rotary: Rotary | None
    value_layout: ValueLayout
    cu_seqlens: Tensor | None
    num_tokens: Tensor | None
    fmt: Fp8Format
    impl: str | None

    def check(self) -> None:
        q, k, v, first = self.q, self.k, self.v, self.first
        check_tensors(q, k, v)
        check_num_tokens(q, k, self.num_tokens)
        check_layout(k, self.value_layout, self.cu_seqlens)
        check_one_device(q=q, k=k, v=v, cu_seqlens=self.cu_seqlens, num_tokens=self.num_tokens)
        is_packed = self.cu_seqlens is not None or self.num_tokens is not None
        if first is not None:
            check_first(first, (q, k, v), is_packed)
        if self.rotary is not None:
            check_rotary(self.rotary, q, k, 0 if first is None else first[0].shape[1])
        if self.norm is not None:
            check_norm(self.norm, q, k, first, is_packed)

    def request_for(self, granularity: str, kind: str) -> Request:
        """What decides which implementation runs; kind: "static" or "dynamic"."""
        used = {
            "first": self.first is not None,
            "norm": self.norm is not None,
            "rotary": self.rotary is not None,
            "interleaved": self.rotary is not None and self.rotary.is_interleaved,
            "transposed": self.value_layout == "transposed",
            "packed": self.cu_seqlens is not None,
        }
        return Request(
            op="quantize_qkv",
            device=describe(self.q.device),
            dtype=self.q.dtype,
            other_dtype=self.fmt.dtype,
            head_dim=self.q.shape[-1],
            granularity=granularity,
            features=frozenset({kind, *(name for name, is_used in used.items() if is_used)}),
        )

    def result(self, run: Callable[..., Any], **scaling: Any) -> QuantizedQkv:
        """What an implementation makes of these tensors with such scales."""
        result: QuantizedQkv = run(
            self.q,
            self.k,
            self.v,
            self.fmt,
            first=self.first,
            norm=self.norm,
            rotary=self.rotary,
            value_layout=self.value_layout,
            cu_seqlens=self.cu_seqlens,
            **scaling,
        )
        return result


@dataclass(eq=False)
class StaticQkvArguments(QkvArguments):
    """One call of `quantize_qkv` with scales."""

    scales: QkvScales

    def check(self) -> None:
        super().check()
        if self.num_tokens is not None:
            raise ConfigError("static scales look at no tokens: leave num_tokens out")
        check_scales(self.scales, self.q, self.k, self.v, per_token=False)

    def request(self) -> Request:
        scales = (self.scales.q, self.scales.k, self.scales.v)
        return self.request_for("head" if any(x.dim() for x in scales) else "tensor", "static")

    def run(self, run: Callable[..., Any]) -> tuple[Tensor, Tensor, Tensor]:
        return _finish(self.result(run, scales=self.scales))


@dataclass(eq=False)
class DynamicQkvArguments(QkvArguments):
    """One call of `quantize_qkv` that finds its scales."""

    rings: Rings | None
    granularity: Granularity

    def check(self) -> None:
        super().check()
        if not isinstance(self.granularity, PerTensor | PerHead):
            raise ConfigError(
                f"expected granularity tensor or head for q, k and v, got {self.granularity}"
            )
        if self.rings is not None:
            check_rings(self.rings, self.granularity, (self.q, self.k, self.v))

    def request(self) -> Request:
        return self.request_for(str(self.granularity), "dynamic")

    def run(self, run: Callable[..., Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        result = self.result(
            run, rings=self.rings, granularity=self.granularity, num_tokens=self.num_tokens
        )
        return *_finish(result), result.scales.q, result.scales.k, result.scales.v


def _finish(result: QuantizedQkv) -> Three:
    """q, k and v with the strides that are promised, whoever made them."""
    is_rows = result.value_layout == "rows"
    return align(result.q), align(result.k), align(result.v) if is_rows else result.v.contiguous()


def _static_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_0: Tensor | None,
    first_1: Tensor | None,
    first_2: Tensor | None,
    value_layout: str,
    cu_seqlens: Tensor | None,
    fmt: str,
) -> Three:
    dtype = format_named(fmt).dtype
    shapes = [
        x.shape
        if other is None
        else torch.Size([x.shape[0], x.shape[1] + other.shape[1], *x.shape[2:]])
        for x, other in ((q, first_0), (k, first_1), (v, first_2))
    ]
    q8, k8 = (empty_aligned(shape, dtype, q) for shape in shapes[:2])
    if value_layout == "rows":
        return q8, k8, empty_aligned(shapes[2], dtype, v)
    *outer, num_keys, num_heads, head_dim = shapes[2]
    columns = num_columns(num_keys, None if cu_seqlens is None else len(cu_seqlens) - 1)
    return q8, k8, v.new_empty((*outer, num_heads, head_dim, columns), dtype=dtype)


def _dynamic_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_0: Tensor | None,
    first_1: Tensor | None,
    first_2: Tensor | None,
    value_layout: str,
    cu_seqlens: Tensor | None,
    fmt: str,
    granularity: str,
) -> tuple[Tensor, ...]:
    choice = parse_granularity(granularity)
    scales = [
        x.new_empty(choice.scale_shape(tuple(x.shape)), dtype=torch.float32) for x in (q, k, v)
    ]
    data = _static_fake(q, k, v, first_0, first_1, first_2, value_layout, cu_seqlens, fmt)
    return *data, *scales


_STATIC = Operator("quantize_qkv_static", StaticQkvArguments, _static_fake)
_DYNAMIC = Operator(
    "quantize_qkv_dynamic",
    DynamicQkvArguments,
    _dynamic_fake,
    writes=[f"rings_{i}_{name}" for i in range(3) for name in AmaxRing._fields],
)


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
    is_repeatable=True,
)
