"""Decoders of transformers by name, with random weights, and caches full of random tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers import kv_cache, text
from octavo.numerics.granularity import PerHead
from octavo.numerics.scales import amax_to_scale, finite_amax

# Keys and values [batch, num_kv_heads, columns, head_dim] of a layer's columns start … stop.
KeysAndValues = Callable[[int, int, int], tuple[Tensor, Tensor]]
# Columns that are stored at a time.
NUM_COLUMNS = 4096

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


def random_keys_and_values(model: Any, batch: int, seed: int = 0) -> KeysAndValues:
    """Normal keys and values for a model's cache: the same for the same columns of a layer.

    Values of a head have a mean, as large as they scatter. Without it attention to many keys would
    come to nothing (1 / √keys), and no logit would tell whether there was any.
    """
    modules: dict[int, Any] = {m.layer_idx: m for m in text.find_layers(model).values()}  # type: ignore[misc]
    weight = next(model.parameters())

    def normal(layer: int, of: int, num_columns: int) -> Tensor:
        shape = (batch, modules[layer].config.num_key_value_heads, num_columns)
        generator = torch.Generator(weight.device).manual_seed(hash((seed, layer, of)))
        return torch.randn(
            *(*shape, modules[layer].head_dim),
            generator=generator,
            dtype=weight.dtype,
            device=weight.device,
        )

    def draw(layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        key, value = (normal(layer, 2 * start + i, stop - start) for i in (1, 2))
        return key, value.add_(normal(layer, 0, 1))

    return draw


def fill_cache(model: Any, cache: Any, source: KeysAndValues, length: int) -> None:
    """Store the keys and values of so many tokens, as a prefill would, without running the model.

    The cache is transformers' own, or ours if `kv_cache.attach` gave the model one.
    """
    from octavo.integrations.transformers.paged_steps import Pass

    _, decoder = text.find_decoder(model)
    has_pages = hasattr(decoder, kv_cache.HOOK)
    sequences = kv_cache.convert(cache, decoder) if has_pages else None
    for start, stop in _parts(length):
        run = None if sequences is None else Pass(cache.layers, sequences)
        for index, layer in enumerate(cache.layers):
            key, value = source(index, start, stop)
            cache.update(key, value, index)
            if run is not None:
                layer.store(key.transpose(1, 2), value.transpose(1, 2), run)


def find_scales(model: Any, source: KeysAndValues, length: int) -> ScaleSet:
    """The scales per head of so many tokens' keys and values, from their amax."""
    layers = {}
    for name, module in text.find_layers(model).items():
        parts = (source(module.layer_idx, *part) for part in _parts(length))  # type: ignore[arg-type]
        amaxes = [
            torch.stack([finite_amax(x.transpose(1, 2), PerHead()) for x in part]) for part in parts
        ]
        k, v = amax_to_scale(torch.stack(amaxes).amax(0)).tolist()
        layers[name] = LayerScales(None, tuple(k), tuple(v))
    return ScaleSet(layers, ScaleHeader(kind="kv_cache"))


def _parts(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, NUM_COLUMNS):
        yield start, min(start + NUM_COLUMNS, length)


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache's keys and values, its own or ours, with the scales beside them."""
    total = 0
    for layer in cache.layers:
        total += getattr(layer, "nbytes", None) or layer.keys.nbytes + layer.values.nbytes
    return total
