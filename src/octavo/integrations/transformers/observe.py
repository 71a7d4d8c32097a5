"""Watching what the attention layers of a vision tower are given, while the model runs as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo import ops
from octavo.calibration.run import See
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.vision import PACKED, REFUSED, find_layers, scale_name
from octavo.internals import internals, require
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.attention import AttentionSpec, Packing

# With "flash" in the name, towers of packed images hand over all of them in one call per layer.
IMPLEMENTATION = "octavo_flash_observe"
_ATTRIBUTE = "octavo_see"


def layer_names(model: nn.Module) -> list[str]:
    """What scale files call the attention layers of a model's vision tower."""
    return [scale_name(name) for name in find_layers(model)]


@contextmanager
def observe(model: nn.Module, see: See) -> Iterator[None]:
    """Call `see(name, q, k, v)` for every pass of every layer; attention stays in its own dtype.

    q, k and v are [batch, length, heads, head_dim], after rotary embedding: as FP8 attention would
    quantize them. The model is as it was when the context ends.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    with internals("transformers"):
        from transformers.masking_utils import flash_attention_mask

    require("transformers.PreTrainedConfig._attn_implementation")
    found = find_layers(model)
    if any(isinstance(module, EncoderAttention) for module in model.modules()):
        raise ConfigError(
            "expected a model as it was, got one that apply_ changed: restore_ it first"
        )
    if whisper := [n for n, module in found.items() if type(module).__name__ == "WhisperAttention"]:
        raise UnsupportedError(
            f"{whisper[0]}: expected a vision tower, got Whisper's encoder, which shares its "
            "config with the decoder: save the scales of a dynamic run"
        )
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, flash_attention_mask)
    before = [(module, _config(module)._attn_implementation) for module in found.values()]
    try:
        for name, module in found.items():
            setattr(module, _ATTRIBUTE, (scale_name(name), see))
            _config(module)._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for module, implementation in before:
            _config(module)._attn_implementation = implementation
            vars(module).pop(_ATTRIBUTE, None)


def _config(module: nn.Module) -> Any:
    return module.config


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: q, k, v [batch, heads, length, head_dim] → [batch, length, …]."""
    name, see = getattr(module, _ATTRIBUTE)
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if attention_mask is not None or is_causal or dropout:
        raise UnsupportedError(
            f"{name}: expected images without padding, causal order or dropout, as FP8 attention "
            "takes them"
        )
    given = sorted(key for key in REFUSED if kwargs.get(key) is not None)
    if given or (cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q):
        raise UnsupportedError(
            f"{name}: expected one cu_seq_lens and nothing that changes attention, got "
            f"{', '.join(given) or 'two cu_seq_lens'}"
        )
    if type(module).__name__ in PACKED and (cu_seq_lens_q is None or max_length_q is None):
        raise UnsupportedError(
            f"{name}: expected cu_seq_lens_q and max_length_q, which keep images apart, got none: "
            "update transformers"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    see(name, q, k, v)
    spec = AttentionSpec(softmax_scale=scaling)
    if cu_seq_lens_q is None or max_length_q is None:
        return ops.attention(q, k, v, spec), None
    packing = Packing.same(cu_seq_lens_q.to(torch.int32), int(max_length_q))
    out = ops.attention(q.squeeze(0), k.squeeze(0), v.squeeze(0), spec, packing=packing)
    return out.unsqueeze(0), None
