"""Decoders of transformers by name, with random weights, and steps of them over a cache."""

from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError

_SHARED = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1, "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072 + 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
    },
}


def make_decoder(name: str, device: torch.device, num_layers: int | None = None) -> Any:
    """The decoder of a name with random weights, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in CONFIGS:
        raise ConfigError(f"expected one of {', '.join(CONFIGS)}, got {name!r}")
    settings = {**_SHARED, **CONFIGS[name]}
    if num_layers is not None:
        settings["num_hidden_layers"] = num_layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        family: Any = AutoModelForCausalLM
        return family.from_config(config, dtype=torch.bfloat16).eval()


def make_static_cache(model: Any, max_length: int) -> Any:
    """A cache with room for so many tokens, which never moves."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=max_length)


def fill_cache(model: Any, cache: Any, ids: Tensor, num_columns: int = 4096) -> None:
    """Run tokens [batch, length] through the model, some columns at a time."""
    for start in range(0, ids.shape[1], num_columns):
        model(ids[:, start : start + num_columns], past_key_values=cache, logits_to_keep=1)


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache's keys and values, its own or ours, with the scales beside them."""
    total = 0
    for layer in cache.layers:
        total += getattr(layer, "nbytes", None) or layer.keys.nbytes + layer.values.nbytes
    return total
