"""What may stand in a scale file, and reading it with or without the tolerance of vLLM's loader.

vLLM's loader passes over what it does not know. Reading does the same unless it is strict, and
notes all that it passed over.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.brief import brief, list_names
from octavo.errors import ConfigError

FORMAT_VERSION = 1
MAX_MEAN = 2.0**127  # a float32 number
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126  # normal float32 numbers, and so are their reciprocals

Scale = float | tuple[float, ...]
KeyMean = tuple[tuple[float, ...], ...]

_KEYS = [(key, f"{key}_scale", f"{key}_heads") for key in ("q", "k", "v")]
_ALL_KEYS = frozenset(key for keys in _KEYS for key in keys) | {"k_mean"}
_INPUT_KEYS = frozenset({"input", "input_scale"})


def checked_scale(key: str, value: object) -> Scale:
    """A scale, or one for each head, if it is such."""
    if type(value) is float and MIN_SCALE <= value <= MAX_SCALE:
        return value  # nearly always; files have up to 100,000 layers
    if not isinstance(value, list | tuple):
        return checked_number(key, value)
    if not value:
        raise ConfigError(f"expected a scale for each head in {key}, got none")
    return tuple(checked_number(key, number) for number in value)


def checked_mean(mean: object, k: Scale) -> KeyMean:
    """The mean key of each head, as many as k has scales, if it is such."""
    rows = mean if isinstance(mean, list | tuple) else ()
    lengths = {len(row) if isinstance(row, list | tuple) else 0 for row in rows}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            "expected k_mean to be a list of head_dim numbers for each head, all of one length, "
            f"got {brief(mean)}"
        )
    if isinstance(k, tuple) and len(k) != len(rows):
        raise ConfigError(f"expected as many heads in k_mean as in k, got {len(rows)}, {len(k)}")
    for number in (number for row in rows for number in row):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not abs(number) <= MAX_MEAN:
            raise ConfigError(
                f"expected k_mean to be finite numbers up to 2^127, got {brief(number)}"
            )
    return tuple(tuple(map(float, row)) for row in rows)


def checked_number(key: str, value: object) -> float:
    """A number that can be a scale or a margin."""
    is_bool = isinstance(value, bool)
    if isinstance(value, int | float) and not is_bool and MIN_SCALE <= value <= MAX_SCALE:
        return float(value)
    raise ConfigError(
        f"expected {key} to be a positive finite number, 2^-126 to 2^126, got {brief(value)}"
    )


def check_name(name: object) -> None:
    """Raise unless the name of a layer is Unicode of 1 to 1000 characters."""
    try:
        is_name = isinstance(name, str) and len(name.encode()) > 0 and len(name) <= 1000
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(
            "expected the name of a layer to be a text of 1 to 1000 characters without lone "
            f"surrogates, got {brief(name)}"
        )


@dataclass(frozen=True, slots=True)
class LayerScales:
    """The scales of one attention layer's Q, K and V: one number, or one for each head.

    q is None where only the KV cache has scales. k_mean: the mean key of each KV head, which was
    subtracted from all keys before k was found; None if nothing was.
    """

    q: Scale | None
    k: Scale
    v: Scale
    k_mean: KeyMean | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for key in ("q", "k", "v") if self.q is not None else ("k", "v"):
            object.__setattr__(self, key, checked_scale(key, getattr(self, key)))
        if isinstance(self.k, tuple) and isinstance(self.v, tuple) and len(self.k) != len(self.v):
            raise ConfigError(
                f"expected as many heads in k as in v, got {len(self.k)} and {len(self.v)}"
            )
        if self.k_mean is not None:
            object.__setattr__(self, "k_mean", checked_mean(self.k_mean, self.k))

    def per_tensor(self) -> "LayerScales":
        """The scales that serve all heads: the largest of each."""
        return LayerScales(*map(_largest, (self.q, self.k, self.v)), k_mean=self.k_mean)

    def to_dict(self) -> dict[str, Any]:
        """The layer's entry in a scale file."""
        entry: dict[str, Any] = {key: _largest(getattr(self, key)) for key, _, _ in _KEYS}
        heads = {name: getattr(self, key) for key, _, name in _KEYS}
        entry |= {name: [*scale] for name, scale in heads.items() if isinstance(scale, tuple)}
        if self.k_mean is not None:
            entry["k_mean"] = [list(row) for row in self.k_mean]
        return entry


def _largest(scale: Scale | None) -> Any:
    return max(scale) if isinstance(scale, tuple) else scale


class _Incomplete(ConfigError):
    """An entry without q, k or v."""


@dataclass
class ScaleDocument:
    """The content of a scale file: fields of its header, scales of attention layers and of inputs.

    incomplete: layers whose entry was passed over, with the reason. tolerated: what else was passed
    over, or read although it is not as octavo writes it.
    """

    is_strict: bool
    header: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, LayerScales] = field(default_factory=dict)
    inputs: dict[str, float] = field(default_factory=dict)
    incomplete: dict[str, str] = field(default_factory=dict)
    tolerated: dict[str, list[str]] = field(default_factory=dict)

    def tolerate(self, what: str, names: list[str], refusal: str) -> None:
        """Note what was done about these names, or raise ConfigError in strict reading."""
        if names and self.is_strict:
            raise ConfigError(refusal)
        if names:
            self.tolerated.setdefault(what, []).extend(names)

    def notes(self) -> list[str]:
        """A sentence for each kind of thing that strict reading refuses."""
        notes = [f"{what}: {list_names(names)}" for what, names in self.tolerated.items()]
        if self.incomplete:
            names, reason = [*self.incomplete], next(iter(self.incomplete.values()))
            notes.append(f"ignored incomplete entries of layers: {list_names(names)} ({reason})")
        return notes


def read_document(document: object, *, strict: bool) -> ScaleDocument:
    """What a decoded scale file says; ConfigError if it is none, or is not as strict wants it."""
    if not isinstance(document, Mapping):
        raise ConfigError(f"expected an object of layers, got {brief(document)}")
    found = ScaleDocument(strict)
    if "octavo" in document:
        header = document["octavo"]
        if not isinstance(header, Mapping):
            raise ConfigError(f"expected octavo to be the header, an object, got {brief(header)}")
        version = header.get("format_version")
        if type(version) is not int or version < 1:
            raise ConfigError(
                f"expected format_version to be a whole number from 1 on, got {brief(version)}"
            )
        if version > FORMAT_VERSION:
            raise ConfigError(
                f"expected format_version {FORMAT_VERSION}, got {brief(version)}; upgrade octavo"
            )
        found.header = {key: value for key, value in header.items() if key != "format_version"}
    layers = {key: value for key, value in document.items() if key != "octavo"}
    if "layers" in layers:
        extra = [key for key in layers if key != "layers"]
        refusal = f"expected nothing beside layers, got {list_names(extra)}"
        found.tolerate("ignored keys beside layers", extra, refusal)
        layers = layers["layers"]
        if not isinstance(layers, Mapping):
            raise ConfigError(f"expected layers to be an object, got {brief(layers)}")
    for name, entry in layers.items():
        try:
            _read_entry(found, name, entry)
        except ConfigError as error:
            raise ConfigError(f"layer {brief(name)}: {error}") from None
    return found


def _read_entry(found: ScaleDocument, name: str, entry: object) -> None:
    if not isinstance(entry, Mapping):
        refusal = f"expected an object with q, k and v, got {brief(entry)}"
        found.tolerate("ignored entries that are no objects", [name], refusal)
        return
    if not found.is_strict:
        known = {key: entry[key] for key in entry if key in _ALL_KEYS or key in _INPUT_KEYS}
        unknown = [f"{name}.{key}" for key in entry if key not in known]
        found.tolerate("ignored unknown keys of layers", unknown, "")
        entry = {key: _number_of(value) for key, value in known.items()}
        if any(entry[key] is not known[key] for key in known):
            found.tolerate("read strings as numbers in layers", [name], "")
    if entry.keys() & _INPUT_KEYS:
        if len(entry) > 1:
            raise ConfigError(f"expected input alone, got {list_names([*entry])}")
        found.inputs[name] = checked_number("input", *entry.values())
        return
    try:
        found.layers[name] = _read_layer(entry)
    except _Incomplete as error:
        if found.is_strict:
            raise
        found.incomplete[name] = str(error)


def _number_of(value: object) -> object:
    """The number that a string spells, or `value`."""
    if isinstance(value, list) and any(isinstance(number, str) for number in value):
        return [_number_of(number) for number in value]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    return value


def _read_layer(entry: Mapping[str, Any]) -> LayerScales:
    if not entry.keys() <= _ALL_KEYS:
        unknown = [key for key in entry if key not in _ALL_KEYS]
        raise ConfigError(
            f"expected only {', '.join(sorted(_ALL_KEYS))}, got {list_names(unknown)}"
        )
    if "k_mean" in entry and entry["k_mean"] is None:
        raise ConfigError("expected k_mean to be a list for each head, got null")
    has_q = entry.get("q", 0) is not None or entry.keys() & {"q_scale", "q_heads"}
    q = _read_scale(entry, *_KEYS[0]) if has_q else None
    k, v = (_read_scale(entry, *keys) for keys in _KEYS[1:])
    return LayerScales(q, k, v, k_mean=entry.get("k_mean"))


def _read_scale(entry: Mapping[str, Any], key: str, alias: str, heads_key: str) -> Any:
    if key not in entry and alias not in entry:
        got = f"only {list_names(list(entry)) or 'nothing'}"
        raise _Incomplete(f"expected {key} or {alias}, got {got}")
    if key in entry and alias in entry:
        raise ConfigError(f"expected {key} or {alias}, got both")
    scale = entry[key] if key in entry else entry[alias]
    if isinstance(scale, list | tuple):
        raise ConfigError(f"expected {key} to be one number, got a list; move it to {heads_key}")
    if heads_key not in entry:
        return scale  # LayerScales checks it
    heads = checked_scale(heads_key, entry[heads_key])
    if not isinstance(heads, tuple):
        raise ConfigError(f"expected {heads_key} to be a list, got {heads}")
    # Not equal to the bit: another program may have rounded the file's numbers.
    if not math.isclose(checked_number(key, scale), max(heads), rel_tol=1e-6):
        raise ConfigError(f"expected {key} to be the largest of {heads_key}, got {scale}")
    return heads
