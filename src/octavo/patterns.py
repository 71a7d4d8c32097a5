"""Layer patterns: the words of `skip_layers`, `ignored_layers` and `weight_only_layers`.

| pattern                | matches                                                              |
| ---------------------- | -------------------------------------------------------------------- |
| `img_mlp`, `blocks.3`  | whole dotted components in a row: `blocks.3.img_mlp.net.0`           |
| `*.attn`, `blocks.?.*` | the whole name, as a glob; `*` and `?` stand for dots too            |
| `re:mlp$`              | any place in the name, as a regular expression                       |
| `7`, `0-3`             | layers with this index, or with an index in this range, ends included |
| `sliding_window`       | attention layers that have a sliding window                          |
| `modulation`           | linear layers that modulate the blocks of a diffusion transformer    |

Digits alone are always a layer index, never the component "3" of a name. Case counts.
"""

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from octavo.bounded_regex import bounded_search
from octavo.brief import brief, list_names
from octavo.errors import ConfigError

MAX_PATTERN_LENGTH = 1000
SLIDING_WINDOW = "sliding_window"
MODULATION = "modulation"

_NUM_SUGGESTION_CANDIDATES = 2000  # difflib needs about 10 µs for each


@dataclass(frozen=True)
class Layer:
    """What a pattern can ask of a layer: its dotted name, its index and its kind."""

    name: str
    index: int | None = None
    is_sliding_window: bool = False
    is_modulation: bool = False


@dataclass(frozen=True)
class Pattern:
    """One parsed pattern; `hint`, or what it returns, is what to say when it matches nothing."""

    text: str
    matches: Callable[[Layer], bool]
    hint: str | Callable[[Sequence[Layer]], str]


def match_layers(patterns: Iterable[str], layers: Iterable[Layer]) -> list[Layer]:
    """The layers that at least one pattern matches, in their own order.

    Raises ConfigError if a pattern is malformed or matches nothing.
    """
    if isinstance(patterns, str):
        raise ConfigError(f"expected a list of patterns, got the string {brief(patterns)}")
    layers = list(layers)
    matched: set[int] = set()
    for text in patterns:
        pattern = parse_pattern(text)
        hits = [i for i, layer in enumerate(layers) if pattern.matches(layer)]
        if not hits:
            wanted, names = f"pattern {brief(text)}", list_names([layer.name for layer in layers])
            if not layers:
                raise ConfigError(f"{wanted} matches nothing: there are no layers")
            hint = pattern.hint if isinstance(pattern.hint, str) else pattern.hint(layers)
            what = f"none of the {len(layers)} layers; {hint} (the layers are {names})"
            raise ConfigError(f"{wanted} matches {what}")
        matched.update(hits)
    return [layers[i] for i in sorted(matched)]


def parse_pattern(text: str) -> Pattern:
    """The pattern that `text` spells; ConfigError if it spells none."""
    if not isinstance(text, str):
        raise ConfigError(f'expected a pattern as a string such as "img_mlp" or "7", got {text!r}')
    if not 0 < len(text) <= MAX_PATTERN_LENGTH:
        raise ConfigError(
            f"expected a pattern of 1 to {MAX_PATTERN_LENGTH} characters, got {len(text)}"
        )
    if text == SLIDING_WINDOW:
        hint = "none of them has a sliding window"
        return Pattern(text, lambda layer: layer.is_sliding_window, hint)
    if text == MODULATION:  # also as any word, where nobody knows what is modulation
        hint = "none of them is modulation of a diffusion transformer"
        return Pattern(text, lambda layer: layer.is_modulation or _has(layer, text), hint)
    if text.startswith("re:"):
        return Pattern(text, _regex(text), "the expression is searched for in the whole name")
    if re.fullmatch(r"[0-9]*-?[0-9]*", text):
        return Pattern(text, _index_range(text), _index_hint)
    if any(character in text for character in "*?["):
        match = re.compile(fnmatch.translate(text)).match
        hint = "a glob must describe the whole name; put * at both ends to look inside it"
        return Pattern(text, lambda layer: match(layer.name) is not None, hint)
    return Pattern(text, lambda layer: _has(layer, text), partial(_component_hint, text))


def _has(layer: Layer, components: str) -> bool:
    return f".{components}." in f".{layer.name}."


def _regex(text: str) -> Callable[[Layer], bool]:
    expression = text.removeprefix("re:")
    if not expression:
        raise ConfigError("expected a regular expression after re:, got nothing")
    try:
        search = bounded_search(expression)
    except (ConfigError, re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"expected a regular expression after re:, got {brief(text)}: {error}"
        ) from None

    def matches(layer: Layer) -> bool:
        try:
            return search(layer.name)
        except ConfigError as error:
            raise ConfigError(f"pattern {brief(text)}: {error}") from None

    return matches


def _index_range(text: str) -> Callable[[Layer], bool]:
    first, dash, last = text.partition("-")
    if not first or (dash and not last) or int(last or first) < int(first):
        raise ConfigError(
            f"expected a layer index such as 7 or a range such as 0-3, got {brief(text)}"
        )
    low, high = int(first), int(last or first)
    return lambda layer: layer.index is not None and low <= layer.index <= high


def _index_hint(layers: Sequence[Layer]) -> str:
    found = [layer.index for layer in layers if layer.index is not None]
    return (
        f"their indices lie in {min(found)}-{max(found)}" if found else "none of them has an index"
    )


def _component_hint(text: str, layers: Sequence[Layer]) -> str:
    length = 1 + text.count(".")
    runs: dict[str, None] = {}
    for layer in layers:
        components = layer.name[:200].split(".")
        for start in range(len(components) - length + 1):
            runs[".".join(components[start : start + length])] = None
        if len(runs) >= _NUM_SUGGESTION_CANDIDATES:
            break
    close = difflib.get_close_matches(text, runs, n=1)
    return f"did you mean {close[0]!r}?" if close else "it must name whole dotted components"
