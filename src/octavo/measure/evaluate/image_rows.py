"""Rows of a table about pictures by name: what is done to the pipeline that draws them.

    WORD[+WORD]…

`WORDS` says what each means. A name that ends in .json or .toml is the file of a recipe, alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.recipe import Recipe

# Rows that quantize nothing -> the dtype that the pipeline must have been loaded in.
PLAIN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
WORDS = {
    "bf16": "nothing is quantized; likewise fp16 and fp32: the dtype that --dtype names",
    "fp8": "linear layers of transformers in FP8: weights per channel, activations per token",
    "tensor": "linear layers with one scale for a weight, and one for its input",
    "block": "linear layers with weights in blocks of 128 × 128, inputs in blocks of 1 × 128",
    "weights": "linear layers with FP8 weights alone",
    "static=FILE": "linear layers with static scales of their inputs, from a scale file",
    "text_encoder": "linear layers of text encoders as well, per channel and token",
    "attention": "attention in FP8, per tensor; attention=head: per head; attention=static: with "
    "scales of the file of static=FILE",
    "ignore=PATTERN": "linear layers that stay as they are",
    "include=PATTERN": "linear layers that are quantized although they stay by default",
    "weight_only=PATTERN": "linear layers with FP8 weights alone, those of modulation too",
    "skip=PATTERN": "attention layers that stay as they are",
}
_LINEAR: dict[str, Any] = {
    "fp8": "fp8",
    "tensor": {"weight": "tensor", "activation": "tensor"},
    "block": {"weight": "block 128x128"},
    "weights": {"activation": None},
    "static": {"scaling": "static"},
}
_PATTERNS = {
    "ignore": "ignored_layers",
    "include": "included_layers",
    "weight_only": "weight_only_layers",
    "skip": "skip_layers",
}
_VALUES = frozenset({"static", *_PATTERNS})  # words that say nothing without a value
_NAMES = tuple(dict.fromkeys(text.partition("=")[0] for text in (*PLAIN, *WORDS)))
# A + inside a pattern or a path belongs to it unless a word follows.
_PLUS = re.compile(rf"\+(?=(?:{'|'.join(_NAMES)})(?:[=+]|$))")


@dataclass(frozen=True)
class ImageRow:
    """A row of the table: its name, and what is done to the pipeline; None leaves it as it is."""

    name: str
    recipe: Recipe | None


def parse_row(text: str) -> Recipe | None:
    """The recipe of a row's name; None for a row that quantizes nothing."""
    if text in PLAIN:
        return None
    words = _PLUS.split(text)
    is_file = len(words) == 1 and text.partition("=")[0] not in _NAMES
    if is_file and text.endswith((".json", ".toml")):
        return Recipe.load(text)
    said: dict[str, list[str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        is_known = name in _NAMES and name not in PLAIN
        if not is_known or (bool(equals) != bool(value)) or (name in _VALUES and not value):
            raise ConfigError(f"row {text}: expected words out of {_known()}, got {word!r}")
        said.setdefault(name, []).append(value)
    try:
        return Recipe(**_fields(said))
    except ConfigError as error:
        raise ConfigError(f"row {text}: {error}") from None


def parse_rows(names: Sequence[str], dtype: str) -> list[ImageRow]:
    """The rows of these names; a first row that quantizes, or in another dtype, is an error.

    dtype: of the pipeline, such as "bfloat16".
    """
    if len(names) < 2 or len(set(names)) != len(names):
        raise ConfigError(f"expected two different rows or more, got {list(names)}")
    rows = [ImageRow(name, parse_row(name)) for name in names]
    if rows[0].recipe is not None:
        raise ConfigError(
            f"expected a first row to compare with, {', '.join(PLAIN)}, got {names[0]!r}"
        )
    for name in names:
        if PLAIN.get(name, dtype) != dtype:
            raise ConfigError(f"expected rows in {dtype}, as the pipeline is, got {name!r}")
    return rows


def plain_row(dtype: str) -> str:
    """The name of the row that quantizes nothing, for a pipeline in this dtype."""
    found = [name for name, own in PLAIN.items() if own == dtype]
    if not found:
        raise ConfigError(f"expected a dtype, one of {', '.join(PLAIN.values())}, got {dtype!r}")
    return found[0]


def _known() -> str:
    return ", ".join(WORDS)


def _fields(said: dict[str, list[str]]) -> dict[str, Any]:
    """A recipe's fields of words and their values."""
    for name, values in said.items():
        if name not in _PATTERNS and len(values) > 1:
            raise ConfigError(f"expected each word once, got {name} {len(values)} times")
        if values != [""] and name not in (*_VALUES, "attention"):
            raise ConfigError(f"expected {name} without a value, got {name}={values[0]}")
    fields: dict[str, Any] = {field: said.get(name, []) for name, field in _PATTERNS.items()}
    # fp8 says what the others say in detail.
    kinds = [name for name in _LINEAR if name in said and name != "fp8"]
    if len(kinds) > 1:
        raise ConfigError(f"expected one kind of linear layers, got {' and '.join(kinds)}")
    if kinds or "fp8" in said:
        fields["linear"] = _LINEAR[(kinds or ["fp8"])[0]]
    if "static" in said:
        fields["scales"] = said["static"][0]
    if "text_encoder" in said:
        fields["text_encoder"] = "fp8"
    match said.get("attention", [None])[0]:
        case "":
            fields["attention"] = "fp8"
        case "head" | "tensor" as granularity:
            fields["attention"] = {"granularity": granularity}
        case "static":
            fields["attention"] = {"scaling": "static"}
        case str(value):
            expected = "expected attention, attention=head, =tensor or =static"
            raise ConfigError(f"{expected}, got {value!r}")
    return fields
