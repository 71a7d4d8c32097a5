"""Layers of one kind in all blocks, and layers of one block: by what their names share.

The block of a layer is told by the first number in its name: transformer_blocks.3.attn.to_q is in
transformer_blocks.3, and of the kind transformer_blocks.*.attn.to_q.
"""

import re
from collections.abc import Iterable
from typing import Literal

from octavo.patterns import Layer, parse_pattern

By = Literal["layer", "group", "block"]


def group_of(name: str) -> str:
    """The kind of a layer: its name with * for the number of its block."""
    parts = name.split(".")
    index = _first_number(parts)
    return name if index is None else ".".join((*parts[:index], "*", *parts[index + 1 :]))


def block_of(name: str) -> str:
    """The block of a layer, or the layer itself if it is in none."""
    parts = name.split(".")
    index = _first_number(parts)
    return name if index is None else ".".join(parts[: index + 1])


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


def _first_number(parts: list[str]) -> int | None:
    return next((i for i, part in enumerate(parts) if part.isdecimal()), None)
