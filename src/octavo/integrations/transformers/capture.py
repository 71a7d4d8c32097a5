"""Capture: the queries, keys and values that a model's attention layers see."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.integrations.patch import Patch
from octavo.internals import internals, require

# Without "flash" or "sdpa" in it: transformers reads meaning into such names.
_IMPLEMENTATION = "octavo_capture"


@dataclass(frozen=True)
class CapturedQkv:
    """What one attention call saw, rotary embedding included.

    q: [batch, length, num_heads, head_dim]; k, v: [batch, length, num_kv_heads, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor


def capture_qkv(model: Any, input_ids: Tensor, layers: Iterable[int]) -> dict[int, CapturedQkv]:
    """One forward pass over input_ids [batch, length] without padding; what `layers` saw."""
    wanted = set(layers)
    num_layers = model.config.num_hidden_layers
    if missing := sorted(wanted - set(range(num_layers))):
        raise ConfigError(f"expected layers 0 to {num_layers - 1}, got {missing}")
    captured: dict[int, CapturedQkv] = {}
    _register()
    require("transformers.PreTrainedConfig._attn_implementation")
    with Patch() as patch, torch.inference_mode():
        patch.set(model.config, "_attn_implementation", _IMPLEMENTATION)
        model(input_ids=input_ids, use_cache=False, octavo_capture=(wanted, captured))
    return captured


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_IMPLEMENTATION, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    octavo_capture: tuple[set[int], dict[int, CapturedQkv]],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    with internals("transformers"):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

    wanted, captured = octavo_capture
    if module.layer_idx in wanted:
        q, k, v = (x.transpose(1, 2).clone() for x in (query, key, value))
        captured[module.layer_idx] = CapturedQkv(q, k, v)
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return out, None
