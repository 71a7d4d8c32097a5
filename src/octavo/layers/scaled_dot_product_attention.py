"""ScaledDotProductAttention: torch's attention function as an FP8 layer that keeps its scales."""

from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.layers.scaling import DynamicScaling, StaticScaling
from octavo.numerics.amax import HISTORY_LENGTH
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.value_layout import ValueLayout
from octavo.ops.scaled_dot_product_attention import attend_heads_first


class ScaledDotProductAttention(nn.Module):
    """Attention in FP8 for a module of your own, in the layout and with the arguments of torch.

    It takes what torch.nn.functional.scaled_dot_product_attention takes and keeps the scales of q,
    k and v: dynamic ones follow the largest values of the last 16 calls, this one included; given
    `scales` are static. Both are float32 buffers, in the state dict, and survive `.to(dtype)`.

    granularity: PerTensor() or PerHead(), of dynamic scales. num_heads, num_kv_heads: needed for
    PerHead() alone; num_kv_heads is num_heads unless given. name: what errors call the layer.
    impl: of `ops.attention`; left out, the fastest that can run.
    """

    def __init__(
        self,
        granularity: PerTensor | PerHead | None = None,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        scales: QkvScales | None = None,
        history_length: int = HISTORY_LENGTH,
        name: str = "",
        impl: str | None = None,
    ) -> None:
        super().__init__()
        self.name, self.impl = name, impl
        self.label = f"attention layer {name or '(unnamed)'}"
        self.scaling: DynamicScaling | StaticScaling
        if scales is not None:
            if granularity is not None or num_heads is not None or num_kv_heads is not None:
                raise ConfigError(
                    f"{self.label}: expected static scales, or granularity and heads of dynamic "
                    "ones, got both"
                )
            num_kv_heads = max(scales.k.numel(), scales.v.numel())
            self.scaling = StaticScaling(scales, scales.q.numel(), num_kv_heads)
            return
        granularity = granularity or PerTensor()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if isinstance(granularity, PerHead) and (num_heads is None or num_kv_heads is None):
            raise ConfigError(f"{self.label}: expected num_heads for scales per head, got none")
        self.scaling = DynamicScaling(
            granularity, num_heads or 1, num_kv_heads or 1, history_length=history_length
        )

    def scales(self, margin: float = 1.0) -> QkvScales:
        """The scales in use, times `margin`: what a layer with static scales is made of."""
        return self.scaling.scales(margin)

    def extra_repr(self) -> str:
        """What a printed model shows of the layer."""
        return "static" if isinstance(self.scaling, StaticScaling) else "dynamic"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As `octavo.scaled_dot_product_attention`, with this layer's scales.

        query: [..., num_heads, q_len, head_dim]; key, value: [..., num_kv_heads, kv_len, head_dim].
        A call without queries or keys leaves dynamic scales as they are.
        """
        return attend_heads_first(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            quantize=self._quantize,
            label=self.label,
            impl=self.impl,
        )

    def _quantize(
        self, q: Tensor, k: Tensor, v: Tensor, *, value_layout: ValueLayout
    ) -> QuantizedQkv:
        return self.scaling.quantize(
            (q, k, v), rotary=None, value_layout=value_layout, cu_seqlens=None, num_tokens=None
        )
