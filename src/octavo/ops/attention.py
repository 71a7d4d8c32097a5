"""attention: dense or packed, in FP8 or in the model's own dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.attention.config import hopper_objection, objection
from octavo.kernels.device import describe
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import is_fp8
from octavo.numerics.qkv import QkvScales
from octavo.numerics.value_layout import ValueLayout
from octavo.ops.arguments import Arguments
from octavo.ops.check import (
    check_exponentials,
    check_float,
    check_one_device,
    check_packing,
    check_qkv,
    check_scales,
    check_sinks,
    empty_result,
    result_dtype,
)
from octavo.ops.register import Operator, as_contiguous
from octavo.ops.select import (
    Request,
    features_of,
    register_impl,
    register_reference,
    scale_granularity,
)
from octavo.reference import attention as reference
from octavo.reference.qkv import restore_values
from octavo.reference.softmax import kernel_rounding


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = ...,
    scales: QkvScales | None = ...,
    *,
    packing: Packing | None = ...,
    sinks: Tensor | None = ...,
    key_mask: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
    value_layout: ValueLayout = ...,
    impl: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = ...,
    scales: QkvScales | None = ...,
    *,
    packing: Packing | None = ...,
    sinks: Tensor | None = ...,
    key_mask: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    value_layout: ValueLayout = ...,
    impl: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = AttentionSpec(),
    scales: QkvScales | None = None,
    *,
    packing: Packing | None = None,
    sinks: Tensor | None = None,
    key_mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    value_layout: ValueLayout = "rows",
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q·kᵀ · scale)·v as `spec` says, for one batch.

    q: [batch, q_len, num_heads, head_dim]; k, v: [batch, kv_len, num_kv_heads, head_dim]; or all
    packed [tokens, heads, head_dim] with `packing`. Tensors in torch's layout, heads before length,
    often fit, too, and then give another result: `scaled_dot_product_attention` takes those.
    FP8 operands need their `scales`, and P is then FP8 as well; bf16, fp16 and fp32 ones have none.
    sinks: [num_heads], one more logit in each denominator. key_mask: [batch, kv_len] bool, True
    where a key may be seen; dense only. out_dtype: q's own, or bf16 for FP8, unless given.
    return_lse: also the log of the softmax denominator, float32, q's shape without head_dim; the
    gluon impl adds up P as it was rounded for head_dims other than 128.
    value_layout: how v is stored (octavo.numerics.value_layout): like k, or transposed as
    `quantize_qkv` writes it on demand, which FP8 kernels read without moving a byte.
    """
    call = AttentionArguments(
        q, k, v, spec, scales, packing, sinks, key_mask, out_dtype, return_lse, value_layout, impl
    )
    out, lse = _OPERATOR(call)
    return (out, lse) if return_lse else out


@dataclass(eq=False)
class AttentionArguments(Arguments):
    """One call of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    scales: QkvScales | None
    packing: Packing | None
    sinks: Tensor | None
    key_mask: Tensor | None
    out_dtype: torch.dtype | None
    return_lse: bool
    value_layout: ValueLayout
    impl: str | None

    def check(self) -> None:
        q, k, v, packing = self.q, self.k, self.v, self.packing
        num_sequences = None
        if packing is not None:
            check_packing(packing, q)
            num_sequences = len(packing.cu_seqlens_k) - 1
        check_qkv(q, k, v, 4 if packing is None else 3, self.value_layout, num_sequences)
        check_sinks(self.sinks, q.shape[-2])
        check_one_device(q=q, k=k, v=v, sinks=self.sinks, key_mask=self.key_mask)
        _check_dtypes(q, k, v, self.scales)
        check_exponentials(self.spec, q)
        if self.key_mask is not None:
            _check_key_mask(self.key_mask, k, is_packed=packing is not None)
        if self.scales is not None:
            check_scales(self.scales, q, k, k)  # values have as many tokens and heads as keys
        result_dtype(self.out_dtype, q.dtype)

    def request(self) -> Request:
        granularity = "tensor"
        if self.scales is not None:
            scale = max(self.scales.k, self.scales.v, key=Tensor.dim)
            granularity = scale_granularity(scale, self.k)
        return Request(
            op="attention",
            device=describe(self.q.device),
            dtype=self.q.dtype,
            other_dtype=self.k.dtype,
            head_dim=self.q.shape[-1],
            group=self.q.shape[-2] // self.k.shape[-2],
            granularity=granularity,
            features=features_of(
                self.spec,
                packed=self.packing is not None,
                sinks=self.sinks is not None,
                key_mask=self.key_mask is not None,
                lse=self.return_lse,
                transposed=self.value_layout == "transposed",
                mixed=self.k.dtype != self.v.dtype,
            ),
        )

    def run(self, run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        scales = self.scales or QkvScales.ones(self.q.device)
        packing = self.packing
        if packing is not None:
            packing = Packing(
                packing.cu_seqlens_q.contiguous(),
                packing.cu_seqlens_k.contiguous(),
                packing.max_seqlen_q,
                packing.max_seqlen_k,
            )
        out, lse = run(
            self.q,
            self.k,
            self.v,
            self.spec,
            QkvScales(scales.q.contiguous(), scales.k.contiguous(), scales.v.contiguous()),
            packing=packing,
            sinks=as_contiguous(self.sinks),
            key_mask=as_contiguous(self.key_mask),
            out_dtype=result_dtype(self.out_dtype, self.q.dtype),
            value_layout=self.value_layout,
        )
        return out, lse if self.return_lse else self.q.new_empty(0, dtype=torch.float32)


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor, scales: QkvScales | None) -> None:
    if is_fp8(q.dtype) and is_fp8(k.dtype) and is_fp8(v.dtype):
        if scales is None:
            raise ConfigError("q, k and v are FP8: pass the scales they were quantized with")
        return
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(
            f"expected q, k and v all in FP8 or all in one dtype, got {q.dtype}, {k.dtype} and "
            f"{v.dtype}"
        )
    check_float("q", q)
    if scales is not None:
        raise ConfigError(f"q, k and v are {q.dtype}, which has no scales: leave scales out")


def _check_key_mask(key_mask: Tensor, k: Tensor, *, is_packed: bool) -> None:
    if is_packed:
        raise ConfigError("key_mask is for dense batches: packed sequences have no padding")
    if key_mask.dtype != torch.bool or key_mask.shape != k.shape[:2]:
        raise ConfigError(
            f"expected a bool key_mask of shape {list(k.shape[:2])}, got {key_mask.dtype} "
            f"{list(key_mask.shape)}"
        )


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    scales: QkvScales,
    *,
    packing: Packing | None,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    out_dtype: torch.dtype,
    value_layout: ValueLayout,
) -> tuple[Tensor, Tensor]:
    """What every implementation of `attention` takes and returns: (out, lse)."""
    rounding = kernel_rounding(q.dtype, spec)
    if value_layout == "transposed":
        v = restore_values(v, k.shape[-3], None if packing is None else packing.cu_seqlens_k)
    if packing is None:
        out, lse = reference.attention(
            q, k, v, spec, scales, sinks=sinks, key_mask=key_mask, rounding=rounding
        )
    else:
        out, lse = reference.varlen_attention(
            q, k, v, packing, spec, scales, sinks=sinks, rounding=rounding
        )
    return out.to(out_dtype), lse


_OPERATOR = Operator("attention", AttentionArguments, empty_result)


def objection_to_codes(request: Request) -> str | None:
    """Why no kernel can serve a request: P by codes is the reference's so far."""
    return "it takes P by exponentials" if "codes" in request.features else None


def _triton_objection(request: Request) -> str | None:
    found = objection(request.device, request.dtype, request.head_dim)
    return found or objection_to_codes(request)


def objection_to_gluon(request: Request) -> str | None:
    """Why Hopper's kernel cannot serve a request; None if it can."""
    found = hopper_objection(
        request.device,
        (request.dtype, request.other_dtype),
        request.head_dim,
        request.granularity,
        request.features,
    )
    return found or objection_to_codes(request)


register_reference("attention", _reference)
register_impl(
    "attention",
    "triton",
    "octavo.kernels.attention.triton:attention",
    objection=_triton_objection,
    reason="tiles on tensor cores, softmax on the way",
    is_automatic=True,
    is_repeatable=True,
)
register_impl(
    "attention",
    "gluon",
    "octavo.kernels.attention.gluon_sm90:attention",
    objection=objection_to_gluon,
    reason="sm_90: copies, products and exponentials side by side",
    is_automatic=True,
    is_repeatable=True,
)
