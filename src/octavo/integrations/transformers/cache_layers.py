"""What a model's KV cache will hold, from its config.json alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError
from octavo.integrations.transformers import text
from octavo.integrations.transformers.gguf_file import model_name, pretrained_source
from octavo.integrations.transformers.load import loading
from octavo.integrations.transformers.paged_cache import WINDOW_COLUMNS
from octavo.integrations.transformers.paged_steps import PAGE_SIZE
from octavo.patterns import Layer


@dataclass(frozen=True)
class CacheLayer:
    """One layer's place in the cache; window: how many keys its queries see, None if all."""

    name: str
    index: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def num_stored(self, context: int) -> int:
        """How many tokens of a sequence have room: whole pages, or a ring if it has a window."""
        if self.window is None:
            return _whole_pages(context)
        return _whole_pages(self.window + WINDOW_COLUMNS) + PAGE_SIZE

    @property
    def as_patterns_see(self) -> Layer:
        """The layer as skip_layers looks at it."""
        return Layer(self.name, self.index, self.window is not None)


@dataclass(frozen=True)
class CachedModel:
    """A decoder's layers with keys and values, and what else takes memory.

    others: layers that keep something else (linear attention), by name: their kind.
    """

    name: str
    layers: tuple[CacheLayer, ...]
    weight_bytes: int
    max_length: int | None = None
    others: Mapping[str, str] = field(default_factory=dict)


def read_cached_model(name: str) -> CachedModel:
    """The model of a folder, a config.json, a GGUF file or a hub name; no weights are loaded."""
    from transformers import AutoConfig

    source, options = pretrained_source(name)
    with loading(name, "a model's config.json"):
        config: Any = AutoConfig.from_pretrained(source, **options, trust_remote_code=False)
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    return cached_model(config, model_name(name), sum(file.stat().st_size for file in files))


def cached_model(config: Any, name: str, weight_bytes: int = 0) -> CachedModel:
    """The model of a config; weight_bytes 0 counts its parameters in the config's dtype."""
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    # The classes know their layers best; on the meta device their weights take no memory.
    with torch.device("meta"):
        try:
            model = kind.from_config(config, trust_remote_code=False)
        except ValueError as error:
            raise CheckpointError(f"{name}: expected a decoder's config: {error}") from error
    windows = text.find_windows(model)
    layers = tuple(
        CacheLayer(
            layer,
            module.layer_idx,
            module.config.num_key_value_heads,
            module.head_dim,
            windows[layer],
        )
        for layer, module in _modules(model)
    )
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    decoder = config.get_text_config()
    return CachedModel(
        name,
        layers,
        weight_bytes or num_parameters * dtype.itemsize,
        getattr(decoder, "max_position_embeddings", None),
        text.find_others(model),
    )


def _modules(model: Any) -> list[tuple[str, Any]]:
    return list(text.find_layers(model).items())


def _whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
