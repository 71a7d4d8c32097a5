"""Whether the FP8 attention of a vision tower can run where the tower is."""

from torch import nn

from octavo.layers.encoder_attention import EncoderAttention
from octavo.ops.check import check_attention_impl


def check_vision_impl(model: nn.Module, impl: str | None) -> None:
    """UnsupportedError unless all layers in FP8 can run there, by `impl` if it is given."""
    device = next(model.parameters()).device
    layers = [m for m in model.modules() if isinstance(m, EncoderAttention)]
    for layer in layers:
        if layer.scaling is not None:
            check_attention_impl(
                impl,
                device,
                layer.spec,
                head_dim=layer.head_dim,
                group=layer.num_heads // layer.num_kv_heads,
                is_per_head=layer.scaling.scales().k.dim() > 0,
            )
