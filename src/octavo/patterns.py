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
    """One parsed pattern; `hint` is what to say when it matches nothing."""

    text: str
    matches: Callable[[Layer], bool]
    hint: Callable[[Sequence[Layer]], str]


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
            raise ConfigError(_no_match(pattern, layers))
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
        return Pattern(text, lambda layer: layer.is_sliding_window, _sliding_window_hint)
    if text == MODULATION:
        return _modulation_pattern()
    if text.startswith("re:"):
        return _regex_pattern(text)
    if re.fullmatch(r"[0-9]*-?[0-9]*", text):
        return _index_pattern(text)
    if any(character in text for character in "*?["):
        return _glob_pattern(text)
    return _component_pattern(text)


def _regex_pattern(text: str) -> Pattern:
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

    return Pattern(text, matches, lambda layers: "the expression is searched for in the whole name")


def _index_pattern(text: str) -> Pattern:
    first, dash, last = text.partition("-")
    if not first or (dash and not last) or int(last or first) < int(first):
        raise ConfigError(
            f"expected a layer index such as 7 or a range such as 0-3, got {brief(text)}"
        )
    low, high = int(first), int(last or first)

    def matches(layer: Layer) -> bool:
        return layer.index is not None and low <= layer.index <= high

    return Pattern(text, matches, _index_hint)


def _glob_pattern(text: str) -> Pattern:
    regex = re.compile(fnmatch.translate(text))
    return Pattern(
        text,
        lambda layer: regex.match(layer.name) is not None,
        lambda layers: "a glob must describe the whole name; put * at both ends to look inside it",
    )


def _component_pattern(text: str) -> Pattern:
    def hint(layers: Sequence[Layer]) -> str:
        close = difflib.get_close_matches(text, _component_runs(layers, 1 + text.count(".")), n=1)
        return f"did you mean {close[0]!r}?" if close else "it must name whole dotted components"

    return Pattern(text, lambda layer: f".{text}." in f".{layer.name}.", hint)


def _modulation_pattern() -> Pattern:
    named = _component_pattern(MODULATION)  # as any word, where nobody knows what is modulation
    return Pattern(
        MODULATION,
        lambda layer: layer.is_modulation or named.matches(layer),
        lambda layers: "none of them is modulation of a diffusion transformer",
    )


def _component_runs(layers: Sequence[Layer], length: int) -> list[str]:
    runs: dict[str, None] = {}
    for layer in layers:
        components = layer.name[:200].split(".")
        for start in range(len(components) - length + 1):
            runs[".".join(components[start : start + length])] = None
        if len(runs) >= _NUM_SUGGESTION_CANDIDATES:
            break
    return list(runs)


def _index_hint(layers: Sequence[Layer]) -> str:
    indices = [layer.index for layer in layers if layer.index is not None]
    if not indices:
        return "none of them has an index"
    return f"their indices lie in {min(indices)}-{max(indices)}"


def _sliding_window_hint(layers: Sequence[Layer]) -> str:
    return "none of them has a sliding window"


def _no_match(pattern: Pattern, layers: Sequence[Layer]) -> str:
    wanted = f"pattern {brief(pattern.text)}"
    if not layers:
        return f"{wanted} matches nothing: there are no layers"
    names = list_names([layer.name for layer in layers])
    return (
        f"{wanted} matches none of the {len(layers)} layers; {pattern.hint(layers)} "
        f"(the layers are {names})"
    )
