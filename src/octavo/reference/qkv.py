"""What it means to quantize queries, keys and values."""

from torch import Tensor

from octavo.numerics.amax import AmaxRing
from octavo.numerics.formats import Fp8Format
from octavo.numerics.granularity import Granularity, PerHead, PerTensor
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.quantize import quantize
from octavo.numerics.scales import amax_to_scale, finite_amax

Rings = tuple[AmaxRing, AmaxRing, AmaxRing]


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fmt: Fp8Format,
    *,
    scales: QkvScales | None = None,
    rings: Rings | None = None,
    granularity: Granularity = PerTensor(),
) -> QuantizedQkv:
    """q, k and v [..., heads, head_dim] in FP8 with static scales or dynamic ones.

    rings: the amax histories of q, k and v; this call is pushed into them, then their maximum gives
    the scales. Without rings the scales are those of this call alone.
    """
    if scales is None:
        scales = QkvScales(
            *(
                _dynamic_scale(x, fmt, granularity, None if rings is None else rings[i])
                for i, x in enumerate((q, k, v))
            )
        )

    def cast(x: Tensor, scale: Tensor) -> Tensor:
        return quantize(x, PerHead() if scale.dim() else PerTensor(), fmt, scale=scale).data

    return QuantizedQkv(cast(q, scales.q), cast(k, scales.k), cast(v, scales.v), scales)


def _dynamic_scale(
    x: Tensor, fmt: Fp8Format, granularity: Granularity, ring: AmaxRing | None
) -> Tensor:
    if ring is None:
        return amax_to_scale(finite_amax(x, granularity), fmt)
    ring.observe(x, granularity)
    return amax_to_scale(ring.amax(), fmt)
