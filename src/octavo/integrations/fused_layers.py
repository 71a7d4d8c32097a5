"""Linear layers that are several projections in one: their parts, by the layer's name."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from octavo.patterns import Layer, parse_pattern
from octavo.recipe import LinearSettings

# Names of layers that are so many projections of one size.
EQUAL_PARTS = {
    **dict.fromkeys(("gate_up_proj", "w13", "to_kv", "to_added_kv"), 2),
    **dict.fromkeys(("to_qkv", "to_added_qkv"), 3),
}
QKV = "qkv_proj"  # with fewer heads of keys and values, as its model's config says
By = Literal["layer", "group", "block"]


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
    # Other models than transformers' have no config that tells.
    find: Any = getattr(getattr(model, "config", None), "get_text_config", None)
    return part_sizes(name, layer.out_features, {} if find is None else find().to_dict())


def group_of(name: str) -> str:
    """The kind of a layer: its name with * for the number of its block."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name, count=1)


def block_of(name: str) -> str:
    """The block of a layer, or the layer itself if it is in none."""
    found = re.match(r"(.*?\.)??\d+(?=\.|$)", name)
    return found[0] if found else name


def units(names: Iterable[str], by: By) -> dict[str, list[str]]:
    """The layers that are taken together, by what they are called together."""
    found: dict[str, list[str]] = {}
    for name in names:
        together = {"layer": name, "group": group_of(name), "block": block_of(name)}[by]
        found.setdefault(together, []).append(name)
    return found


def pattern_of(members: Iterable[str], name: str, among: Iterable[str]) -> str:
    """The pattern that matches these layers and no others: their name, if that does."""
    members = set(members)
    if {n for n in among if parse_pattern(name).matches(Layer(n))} == members:
        return name
    return f"re:^({'|'.join(re.escape(member) for member in sorted(members))})$"
