"""Validation that several ops share; each check reads shapes and dtypes, never data."""

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import describe
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import E4M3, is_fp8
from octavo.numerics.granularity import Granularity, PerHead, PerTensor
from octavo.numerics.qkv import QkvScales
from octavo.numerics.value_layout import ValueLayout, check_value_layout, num_columns
from octavo.ops.select import Request, features_of, is_rocm, select

MIN_FP8_CAPABILITY = (8, 9)  # of tensor cores
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WITHOUT_FP8 = "leave attention as the model has it, or ask for the slow impl 'reference' by name"

HEADS_FIRST = (
    ": octavo's layout is [..., length, heads, head_dim]; for torch's [..., heads, length, "
    "head_dim] use octavo.scaled_dot_product_attention"
)


def check_float(name: str, x: Tensor) -> None:
    """Raise unless x is bfloat16, float16 or float32."""
    if x.dtype not in FLOAT_DTYPES:
        raise ConfigError(f"expected {name} in bfloat16, float16 or float32, got {x.dtype}")


def check_one_device(**tensors: Tensor | None) -> None:
    """Raise unless all tensors lie on the device of the first."""
    first_name, first = next((name, x) for name, x in tensors.items() if x is not None)
    for name, x in tensors.items():
        if x is not None and x.device != first.device:
            raise ConfigError(
                f"expected {name} on {first.device} like {first_name}, got it on {x.device}"
            )


def check_same_dtype(x: Tensor, **others: Tensor | None) -> None:
    """Raise unless all tensors have x's dtype."""
    for name, other in others.items():
        if other is not None and other.dtype != x.dtype:
            raise ConfigError(f"expected {name} in {x.dtype} like x, got {other.dtype}: convert it")


def check_fp8_device(
    name: str, device: torch.device, impl: str | None, *, instead: str = WITHOUT_FP8
) -> None:
    """Raise if FP8 would be left to the reference on a GPU, and nobody asked for that.

    name: what the error calls the layer. impl: an implementation asked for by name decides itself.
    instead: what the error says to do.
    """
    objection = None if impl is not None else fp8_objection(device)
    if objection is not None:
        raise UnsupportedError(f"{name}: {objection}: {instead}")


def check_exponentials(spec: AttentionSpec, q: Tensor) -> None:
    """Raise if a spec says how P becomes e4m3 where it stays in the operands' own dtype."""
    if spec.exponentials is not None and not is_fp8(q.dtype):
        raise ConfigError(
            f"exponentials={spec.exponentials!r} says how P becomes FP8, which takes FP8 queries, "
            f"got {q.dtype}: leave it out"
        )


def fp8_objection(device: torch.device) -> str | None:
    """Why FP8 would be left to the reference on a device; None if it would not."""
    found = describe(device)
    is_foreign = found.type not in ("cpu", "cuda", "meta")
    if is_foreign or (found.type == "cuda" and is_rocm()):
        return f"expected an NVIDIA GPU or a CPU, got {found.name} ({found.type})"
    # A CPU has none: there the reference is the only path, and no surprise.
    if found.capability is None or found.capability >= MIN_FP8_CAPABILITY:
        return None
    version = "{}{}".format(*found.capability)
    return f"expected a GPU with FP8 tensor cores (sm_89 or newer), got {found.name} (sm_{version})"


# torch.compile asks once, while it traces, and need not look inside. This is all that its decorator
# assume_constant_result does, which would import the whole compiler here.
fp8_objection._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_attention_impl(
    impl: str | None,
    device: torch.device,
    spec: AttentionSpec,
    *,
    head_dim: int,
    group: int,
    is_per_head: bool,
) -> None:
    """UnsupportedError unless attention of packed FP8 q, k and v can run there, by `impl` if given.

    group: query heads of a KV head. is_per_head: whether scales are.
    """
    found = describe(device)
    request = Request(
        op="attention",
        device=found,
        dtype=E4M3.dtype,
        other_dtype=E4M3.dtype,
        head_dim=head_dim,
        group=group,
        granularity="head" if is_per_head else "tensor",
        # As EncoderAttention stores values.
        features=features_of(spec, transposed=found.type == "cuda"),
    )
    select(request, impl)


def check_heads(num_heads: int, num_kv_heads: int, hint: str = "") -> None:
    """Raise unless every KV head serves the same number of query heads; hint: what to do."""
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ConfigError(
            f"expected query heads that are a multiple of the KV heads, got {num_heads} and "
            f"{num_kv_heads}{hint}"
        )


def check_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dims: int,
    value_layout: ValueLayout = "rows",
    num_sequences: int | None = None,
) -> None:
    """Raise unless q, k and v fit together as `dims`-dimensional attention inputs.

    num_sequences: of packed ones.
    """
    check_value_layout(value_layout)
    shape = "[batch, length, heads, head_dim]" if dims == 4 else "[tokens, heads, head_dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise ConfigError(f"expected {name} of shape {shape}, got {list(x.shape)}")
    if value_layout == "rows" and k.shape != v.shape:
        raise ConfigError(f"expected k and v of one shape, got {list(k.shape)} and {list(v.shape)}")
    if value_layout == "transposed":
        columns = num_columns(k.shape[-3], num_sequences)
        expected = (*k.shape[:-3], *k.shape[-2:], columns)
        if v.shape != expected:
            raise ConfigError(
                f"expected transposed values {list(expected)} for keys {list(k.shape)}, got "
                f"{list(v.shape)}: quantize_qkv makes them"
            )
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ConfigError(
            f"expected q and k of one head_dim above 0, got {q.shape[-1]} and {k.shape[-1]}"
        )
    if dims == 4 and q.shape[0] != k.shape[0]:
        raise ConfigError(f"expected q and k of one batch, got {q.shape[0]} and {k.shape[0]}")
    check_heads(q.shape[-2], k.shape[-2], HEADS_FIRST)


def check_scales(
    scales: QkvScales, q: Tensor, k: Tensor, v: Tensor, *, per_token: bool = True
) -> None:
    """Raise unless each scale is float32, fits its tensor and lies on its device.

    per_token: whether keys and values may have one scale for each token and head.
    """
    for name, scale, x in (("q", scales.q, q), ("k", scales.k, k), ("v", scales.v, v)):
        shapes: list[tuple[int, ...]] = [(), (x.shape[-2],)]
        if per_token and name != "q":
            shapes.append(tuple(x.shape[:-1]))
        if scale.dtype != torch.float32 or tuple(scale.shape) not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ConfigError(
                f"expected a float32 {name} scale of shape {expected}, got {scale.dtype} "
                f"{list(scale.shape)}"
            )
        check_one_device(**{name: x, f"the scale of {name}": scale})


def check_scale(name: str, scale: Tensor, granularity: Granularity, shape: tuple[int, ...]) -> None:
    """Raise unless `scale` is float32 and what a tensor `name` of this shape needs."""
    expected = granularity.scale_shape(shape)
    if scale.dtype != torch.float32 or tuple(scale.shape) != expected:
        raise ConfigError(
            f"granularity {granularity} of {name} {list(shape)} needs a float32 scale of shape "
            f"{list(expected)}, got {scale.dtype} {list(scale.shape)}"
        )


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Raise unless sinks has one logit for each query head."""
    if sinks is None:
        return
    check_float("sinks", sinks)
    if tuple(sinks.shape) != (num_heads,):
        raise ConfigError(f"expected sinks of shape [{num_heads}], got {list(sinks.shape)}")


def check_cu_seqlens(name: str, cu_seqlens: Tensor) -> None:
    """Raise unless cu_seqlens is a vector of int32 with at least one entry."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ConfigError(
            f"expected {name} as int32 [num_sequences + 1], got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )


def check_packing(packing: Packing, q: Tensor) -> None:
    """Raise unless queries and keys are packed as the same number of sequences, on q's device."""
    check_cu_seqlens("cu_seqlens_q", packing.cu_seqlens_q)
    check_cu_seqlens("cu_seqlens_k", packing.cu_seqlens_k)
    num_q, num_k = len(packing.cu_seqlens_q), len(packing.cu_seqlens_k)
    if num_q != num_k:
        raise ConfigError(f"expected cu_seqlens_q and _k of one length, got {num_q} and {num_k}")
    check_one_device(q=q, cu_seqlens_q=packing.cu_seqlens_q, cu_seqlens_k=packing.cu_seqlens_k)


def check_query_over_pages(q: Tensor, view: PagedView, q_scale: Tensor | None) -> None:
    """Raise unless q's heads and dtype fit the pages."""
    if q.shape[-1] != view.head_dim:
        raise ConfigError(f"expected q of the cache's head_dim {view.head_dim}, got {q.shape[-1]}")
    check_heads(q.shape[-2], view.num_kv_heads)
    if not is_fp8(q.dtype):
        check_float("q", q)
        if q_scale is not None:
            raise ConfigError(f"q is {q.dtype}, which has no scale: leave q_scale out")
        return
    if q_scale is None:
        raise ConfigError(f"q is {q.dtype}: pass the q_scale it was quantized with")
    check_scale("q", q_scale, PerHead() if q_scale.dim() else PerTensor(), tuple(q.shape))
    if not view.is_fp8:
        raise ConfigError(f"expected FP8 pages for FP8 queries, got pages in {view.dtype}")


def result_dtype(out_dtype: torch.dtype | None, q_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the result: as asked for, else q's own, else bfloat16 for FP8 queries."""
    if out_dtype is None:
        return torch.bfloat16 if is_fp8(q_dtype) else q_dtype
    if out_dtype not in FLOAT_DTYPES:
        raise ConfigError(f"expected out_dtype bfloat16, float16 or float32, got {out_dtype}")
    return out_dtype


def empty_result(
    q: Tensor, out_dtype: torch.dtype | None, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Empty (out, lse) of an attention call: lse has no elements unless it was asked for."""
    lse_shape = q.shape[:-1] if return_lse else torch.Size([0])
    out = q.new_empty(q.shape, dtype=result_dtype(out_dtype, q.dtype))
    return out, q.new_empty(lse_shape, dtype=torch.float32)
