"""What a model's KV cache will hold, from its config.json alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError
from octavo.integrations.transformers import text
from octavo.integrations.transformers.gguf_file import model_name
from octavo.integrations.transformers.load import load_config, served_class
from octavo.integrations.transformers.paged_cache import WINDOW_COLUMNS
from octavo.integrations.transformers.paged_steps import PAGE_SIZE, whole_pages
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
            return whole_pages(context)
        return whole_pages(self.window + WINDOW_COLUMNS) + PAGE_SIZE

    @property
    def as_patterns_see(self) -> Layer:
        """The layer as skip_layers looks at it."""
        return Layer(self.name, self.index, self.window is not None)


@dataclass(frozen=True)
class CachedModel:
    """A decoder's layers with keys and values; others: layers with another state, by name: kind."""

    name: str
    layers: tuple[CacheLayer, ...]
    weight_bytes: int
    max_length: int | None = None
    others: Mapping[str, str] = field(default_factory=dict)


def read_cached_model(name: str) -> CachedModel:
    """The model of a folder, a config.json, a GGUF file or a hub name; no weights are loaded."""
    config = load_config(name)
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    return cached_model(config, model_name(name), sum(file.stat().st_size for file in files))


def cached_model(config: Any, name: str, weight_bytes: int = 0) -> CachedModel:
    """The model of a config; weight_bytes 0 counts its parameters in the config's dtype."""
    try:
        model = empty_model(config)
    except ValueError as error:
        raise CheckpointError(f"{name}: expected a decoder's config: {error}") from error
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return CachedModel(
        name,
        find_cache_layers(model),
        weight_bytes or num_parameters * dtype.itemsize,
        getattr(config.get_text_config(), "max_position_embeddings", None),
        text.find_others(model),
    )


def empty_model(config: Any) -> Any:
    """The model of a config on the meta device, in BF16: its classes know their layers best."""
    with torch.device("meta"):
        model = served_class(config).from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    return model.eval()


def find_cache_layers(model: Any) -> tuple[CacheLayer, ...]:
    """The layers of a model that have keys and values of their own."""
    windows = text.find_windows(model)
    modules: dict[str, Any] = dict(text.find_layers(model))
    return tuple(
        CacheLayer(name, one.layer_idx, one.config.num_key_value_heads, one.head_dim, windows[name])
        for name, one in modules.items()
    )
