"""quantize_qkv: queries, keys and values of one attention call to FP8."""

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.numerics.amax import AmaxHistory, AmaxRing
from octavo.numerics.formats import E4M3, Fp8Format, format_named
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, parse_granularity
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.ops.check import check_float, check_heads, check_one_device, check_scales
from octavo.ops.register import define
from octavo.ops.select import Request, find_run, register_reference
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
    impl: str | None = None,
) -> QuantizedQkv:
    """q, k and v in FP8.

    q: [..., num_heads, head_dim]; k, v: [..., num_kv_heads, head_dim]; bf16, fp16 or fp32.
    scales: static, per tensor or per head; left out, they are dynamic: from the largest amax in the
    `history` of q, k and v, into which this call is pushed first, or without a history from this
    call alone. granularity: tensor (the default) or head, for dynamic scales.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x)
        if x.dim() < 3:
            raise ConfigError(f"expected {name} [..., heads, head_dim], got {list(x.shape)}")
    if k.shape != v.shape:
        raise ConfigError(f"expected k and v of one shape, got {list(k.shape)} and {list(v.shape)}")
    check_heads(q.shape[-2], k.shape[-2])
    check_one_device(q=q, k=k, v=v)
    if scales is not None:
        if history is not None:
            raise ConfigError("expected static scales or a history for dynamic ones, got both")
        if granularity is not None:
            raise ConfigError("static scales say their own granularity: leave granularity out")
        check_scales(scales, q, k, v, per_token=False)
        q8, k8, v8 = torch.ops.octavo.quantize_qkv_static(
            q, k, v, scales.q, scales.k, scales.v, fmt.name, impl
        )
        return QuantizedQkv(q8, k8, v8, scales)
    granularity = granularity or PerTensor()
    if not isinstance(granularity, PerTensor | PerHead):
        raise ConfigError(f"expected granularity tensor or head for q, k and v, got {granularity}")
    rings = [] if history is None else _rings(history, granularity, (q, k, v))
    q8, k8, v8, q_scale, k_scale, v_scale = torch.ops.octavo.quantize_qkv_dynamic(
        q, k, v, rings, str(granularity), fmt.name, impl
    )
    return QuantizedQkv(q8, k8, v8, QkvScales(q_scale, k_scale, v_scale))


def _rings(history: History, granularity: Granularity, tensors: Three) -> list[Tensor]:
    """The three tensors of each of the three rings, one after the other."""
    if len(history) != 3:
        raise ConfigError(f"expected a history of q, of k and of v, got {len(history)} of them")
    for name, one, x in zip("qkv", history, tensors, strict=True):
        expected = granularity.scale_shape(tuple(x.shape))
        if tuple(one.values.shape[1:]) != expected:
            raise ConfigError(
                f"expected a history of {name} for amax values of shape {list(expected)}, got one "
                f"for {list(one.values.shape[1:])}"
            )
        check_one_device(**{name: x, f"{name}'s history": one.values})
    return [buffer for one in history for buffer in one.ring]


def _request(q: Tensor, granularity: str, fmt: str, scaling: str) -> Request:
    return Request(
        op="quantize_qkv",
        device=describe(q.device),
        dtype=q.dtype,
        other_dtype=format_named(fmt).dtype,
        head_dim=q.shape[-1],
        granularity=granularity,
        features=frozenset({scaling}),
    )


def _static(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    fmt: str,
    impl: str | None,
) -> Three:
    granularity = "head" if q_scale.dim() else "tensor"
    run = find_run(_request(q, granularity, fmt, "static"), impl)
    result: QuantizedQkv = run(
        q, k, v, format_named(fmt), scales=QkvScales(q_scale, k_scale, v_scale)
    )
    return result.q.contiguous(), result.k.contiguous(), result.v.contiguous()


def _static_fake(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Three:
    dtype = format_named(str(rest[3])).dtype
    return (
        q.new_empty(q.shape, dtype=dtype),
        k.new_empty(k.shape, dtype=dtype),
        v.new_empty(v.shape, dtype=dtype),
    )


def _dynamic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    granularity: str,
    fmt: str,
    impl: str | None,
) -> tuple[Tensor, ...]:
    run = find_run(_request(q, granularity, fmt, "dynamic"), impl)
    rings = tuple(AmaxRing(*buffers[i : i + 3]) for i in range(0, len(buffers), 3))
    result: QuantizedQkv = run(
        q,
        k,
        v,
        format_named(fmt),
        rings=rings or None,
        granularity=parse_granularity(granularity),
    )
    data = (x.contiguous() for x in (result.q, result.k, result.v))
    return *data, result.scales.q, result.scales.k, result.scales.v


def _dynamic_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: list[Tensor],
    granularity: str,
    fmt: str,
    impl: str | None,
) -> tuple[Tensor, ...]:
    choice, dtype = parse_granularity(granularity), format_named(fmt).dtype
    data = [x.new_empty(x.shape, dtype=dtype) for x in (q, k, v)]
    scales = [
        x.new_empty(choice.scale_shape(tuple(x.shape)), dtype=torch.float32) for x in (q, k, v)
    ]
    return (*data, *scales)


define(
    "quantize_qkv_static(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, "
    "Tensor v_scale, str format, str? impl) -> (Tensor, Tensor, Tensor)",
    _static,
    _static_fake,
)
define(
    "quantize_qkv_dynamic(Tensor q, Tensor k, Tensor v, Tensor(a!)[] history, str granularity, "
    "str format, str? impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dynamic,
    _dynamic_fake,
)
register_reference("quantize_qkv", reference)
