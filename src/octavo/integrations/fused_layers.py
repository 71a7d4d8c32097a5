"""Linear layers that are several projections in one: their parts, by the layer's name."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from octavo.recipe import LinearSettings

# Names of layers that are so many projections of one size.
EQUAL_PARTS = {
    "gate_up_proj": 2,
    "w13": 2,
    "to_kv": 2,
    "to_added_kv": 2,
    "to_qkv": 3,
    "to_added_qkv": 3,
}
QKV = "qkv_proj"  # with fewer heads of keys and values, as its model's config says


def part_sizes(
    name: str, out_features: int, text_config: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """The outputs of the projections that a layer was fused of, if its name says that it was."""
    sizes: tuple[int, ...] = ()
    leaf = name.rpartition(".")[2]
    if leaf in EQUAL_PARTS:
        sizes = (out_features // EQUAL_PARTS[leaf],) * EQUAL_PARTS[leaf]
    elif leaf == QKV:
        num_heads = text_config.get("num_attention_heads")
        num_kv_heads = text_config.get("num_key_value_heads") or num_heads
        if isinstance(num_heads, int) and isinstance(num_kv_heads, int):
            head_dim = out_features // max(1, num_heads + 2 * num_kv_heads)
            sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    return sizes if sum(sizes) == out_features and min(sizes, default=0) > 0 else None


def shards_of(
    model: nn.Module, name: str, layer: nn.Linear, settings: LinearSettings
) -> tuple[int, ...] | None:
    """The parts of a layer that have scales of their own; None if all share what there is.

    With one scale per tensor a part of small values would be rounded by the scale of a large one.
    """
    if settings.weight != "tensor":
        return None
    return part_sizes(name, layer.out_features, _text_config(model))


def _text_config(model: Any) -> Mapping[str, Any]:
    """The config of a transformers model's text part; other models have none that tells."""
    find: Any = getattr(getattr(model, "config", None), "get_text_config", None)
    found: Mapping[str, Any] = {} if find is None else find().to_dict()
    return found
