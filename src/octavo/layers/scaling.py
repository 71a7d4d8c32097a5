"""Where the scales of one attention layer come from: its own data, or given."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.numerics.amax import HISTORY_LENGTH, AmaxHistory
from octavo.numerics.buffers import Float32Buffers
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.rotary import Rotary
from octavo.numerics.scales import count_nonfinite, finite_amax, without_padding
from octavo.numerics.value_layout import ValueLayout

Three = tuple[Tensor, Tensor, Tensor]


class DynamicScaling(nn.Module):
    """Scales that follow the data: the largest values of the last passes, this one included.

    All state lies in buffers on the device and nothing waits for it, so that passes captured in a
    CUDA graph go on counting when it is replayed.
    group: ranks that have other heads of the same layer; scales per tensor are then those of all
    ranks' heads together.
    """

    def __init__(
        self,
        granularity: PerTensor | PerHead,
        num_heads: int,
        num_kv_heads: int,
        *,
        history_length: int = HISTORY_LENGTH,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.granularity = granularity
        self.group = group
        heads = (num_heads, num_kv_heads, num_kv_heads)
        shapes = [(n,) if isinstance(granularity, PerHead) else () for n in heads]
        self.q, self.k, self.v = (AmaxHistory(shape, history_length) for shape in shapes)

    def scales(self, margin: float = 1.0) -> QkvScales:
        """The scales that the passes so far ask for, times `margin`."""
        return QkvScales(*(part.scale(margin=margin) for part in (self.q, self.k, self.v)))

    @property
    def num_passes(self) -> Tensor:
        """How many passes the layer has seen, on the device."""
        return self.q.num_passes

    def quantize(
        self,
        qkv: Three,
        *,
        rotary: Rotary | None,
        value_layout: ValueLayout,
        cu_seqlens: Tensor | None,
        num_tokens: Tensor | None,
    ) -> QuantizedQkv:
        """q, k and v in e4m3, their amax pushed into the history first."""
        history = (self.q, self.k, self.v)
        quantize = partial(ops.quantize_qkv, *qkv, value_layout=value_layout, cu_seqlens=cu_seqlens)
        if self.group is None or isinstance(self.granularity, PerHead):
            return quantize(
                history=history,
                granularity=self.granularity,
                rotary=rotary,
                num_tokens=num_tokens,
            )
        if rotary is not None:
            raise UnsupportedError(
                "scales shared by ranks are those of queries and keys as they come: rotate them "
                "before, got rotary tables"
            )
        for part, x in zip(history, qkv, strict=True):
            x = x if num_tokens is None else without_padding(x, num_tokens)
            amax = finite_amax(x, PerTensor())
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
            part.push(amax, count_nonfinite(x))
        return quantize(scales=self.scales())


class StaticScaling(Float32Buffers):
    """Scales that were found before, such as a scale file's; one for each tensor or each head."""

    q: Tensor
    k: Tensor
    v: Tensor

    def __init__(self, scales: QkvScales, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        heads = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
        for name, num in heads.items():
            scale = getattr(scales, name)
            if scale.dtype != torch.float32 or scale.shape not in ((), (num,)):
                raise ConfigError(
                    f"expected a float32 scale of {name} for all heads, or {num} of them, got "
                    f"{scale.dtype} {list(scale.shape)}"
                )
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise ConfigError(f"expected positive finite scales of {name}, got {scale}")
            self.register_buffer(name, scale.detach().clone())

    def scales(self, margin: float = 1.0) -> QkvScales:
        """The scales as they were given, times `margin`."""
        return QkvScales(self.q * margin, self.k * margin, self.v * margin)

    def quantize(
        self,
        qkv: Three,
        *,
        rotary: Rotary | None,
        value_layout: ValueLayout,
        cu_seqlens: Tensor | None,
        num_tokens: Tensor | None,
    ) -> QuantizedQkv:
        """q, k and v in e4m3; what is beyond the scale's range saturates."""
        return ops.quantize_qkv(
            *qkv,
            QkvScales(self.q, self.k, self.v),
            fmt=E4M3,
            rotary=rotary,
            value_layout=value_layout,
            cu_seqlens=cu_seqlens,
        )
