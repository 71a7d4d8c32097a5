"""Scale files: the static scales of attention layers as JSON, in a form that vLLM reads too.

    {
      "octavo": {"format_version": 1, "model": "Qwen/Qwen3-VL-8B-Instruct", "margin": 1.5},
      "layers": {
        "visual.blocks.0.attn.attn": {"q": 0.021, "k": 0.034, "v": 0.012},
        "visual.blocks.1.attn.attn": {"q": 0.025, "k": 0.03, "v": 0.01, "q_heads": [0.025, 0.019]}
      }
    }

vLLM's loader takes "layers" where there is one, and of each layer q, k and v; it looks at nothing
else. So the header stands beside "layers", and scales per head stand beside q, k and v, which then
are the largest of them: the scales that serve all heads. Reading also accepts layers without
"layers" around them, and q_scale, k_scale and v_scale for q, k and v. Whatever it does not
understand it refuses, where vLLM's loader passes over it. "q": null says that there is no scale for
Q, as in most checkpoints with scales of the KV cache; vLLM's loader fails on it.

Scales of a KV cache may be those of keys to which something was done first: "rotate_keys": true in
the header says that keys and queries were multiplied by a Hadamard matrix, and "k_mean" in a layer
is the mean key of each KV head, [num_kv_heads][head_dim], that was subtracted before. Such scales
are for octavo alone: for plain keys, which vLLM stores, they are wrong.
"""

import difflib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, get_args

from octavo.atomic import write_atomically
from octavo.brief import brief, list_names, unique_keys
from octavo.errors import CheckpointError, ConfigError

FORMAT_VERSION = 1
MAX_FILE_BYTES = 32 * 2**20  # some 300,000 layers, or 10,000 with 32 heads
MAX_FILE_VALUES = 2_000_000  # 32 MiB of [[],[],… would take 1 GB of memory
MAX_TEXT_LENGTH = 1000
MAX_MEAN = 2.0**127  # a float32 number
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126  # normal float32 numbers, and so are their reciprocals

Scale = float | tuple[float, ...]
KeyMean = tuple[tuple[float, ...], ...]
# What scales are for, in the words of a recipe.
Kind = Literal["vision_attention", "kv_cache"]

_KEYS = [(key, f"{key}_scale", f"{key}_heads") for key in ("q", "k", "v")]
_ALL_KEYS = frozenset(key for keys in _KEYS for key in keys) | {"k_mean"}
_NUM_SUGGESTION_CANDIDATES = 2000  # difflib needs about 10 µs for each


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
            object.__setattr__(self, key, _checked_scale(key, getattr(self, key)))
        if isinstance(self.k, tuple) and isinstance(self.v, tuple) and len(self.k) != len(self.v):
            raise ConfigError(
                f"expected as many heads in k as in v, got {len(self.k)} and {len(self.v)}"
            )
        if self.k_mean is not None:
            object.__setattr__(self, "k_mean", _checked_mean(self.k_mean, self.k))

    def per_tensor(self) -> "LayerScales":
        """The scales that serve all heads: the largest of each."""
        q = None if self.q is None else _largest(self.q)
        return LayerScales(q, _largest(self.k), _largest(self.v), k_mean=self.k_mean)


@dataclass(frozen=True, kw_only=True)
class ScaleHeader:
    """What scales are for and where they come from; what is not known is None.

    date is in ISO 8601. rotate_keys: whether keys and queries were rotated before they were seen.
    """

    kind: Kind | None = None
    model: str | None = None
    data: str | None = None
    date: str | None = None
    observer: str | None = None
    passes: int | None = None
    margin: float | None = None
    rotate_keys: bool = False

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in get_args(Kind):
            raise ConfigError(
                f"expected kind to be one of {', '.join(get_args(Kind))}, got {brief(self.kind)}"
            )
        for key in ("model", "data", "date", "observer"):
            if (text := getattr(self, key)) is not None:
                _check_text(key, text)
        if self.passes is not None:
            _checked_count("passes", self.passes)
        if not isinstance(self.rotate_keys, bool):
            raise ConfigError(
                f"expected rotate_keys to be true or false, got {brief(self.rotate_keys)}"
            )
        if self.margin is not None:
            object.__setattr__(self, "margin", _checked_number("margin", self.margin))
        try:
            datetime.fromisoformat(self.date or "2000-01-01")
        except ValueError:
            raise ConfigError(
                f"expected a date such as 2026-08-22T10:00:00, got {brief(self.date)}"
            ) from None


@dataclass(frozen=True)
class ScaleSet:
    """The static scales of a model's attention layers, by layer name, and where they come from."""

    layers: Mapping[str, LayerScales]
    header: ScaleHeader = ScaleHeader()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("expected the scales of at least one layer, got none")
        for name in self.layers:
            _check_text("the name of a layer", name)
        ordered = {name: self.layers[name] for name in sorted(self.layers, key=_by_number)}
        object.__setattr__(self, "layers", MappingProxyType(ordered))

    def layer(self, name: str) -> LayerScales:
        """The scales of one layer; CheckpointError if there are none."""
        self.require([name])
        return self.layers[name]

    def require(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless there are scales for every one of these layers."""
        missing = [name for name in names if name not in self.layers]
        if missing:
            raise CheckpointError(
                f"expected scales for {list_names(missing)}, got none; "
                f"the {len(self.layers)} layers with scales are "
                f"{list_names(self._closest_first(missing[0]))}"
            )

    def require_kind(self, kind: Kind) -> None:
        """Raise CheckpointError if the header says that these scales are for something else."""
        if self.header.kind not in (None, kind):
            command = "octavo calibrate --kv" if kind == "kv_cache" else "octavo calibrate"
            raise CheckpointError(
                f"expected scales for {kind}, got a file for {self.header.kind}: {command} finds "
                f"those for {kind}"
            )

    def require_plain_keys(self, use: str) -> None:
        """Raise CheckpointError if these are scales of rotated or centered keys."""
        done = ["rotated"] if self.header.rotate_keys else []
        done += ["centered"] if any(x.k_mean is not None for x in self.layers.values()) else []
        if done:
            raise CheckpointError(
                f"expected scales of keys as they are for {use}, got those of keys that were "
                f"{' and '.join(done)}, which only octavo's KV cache does: calibrate without "
                "--rotate-keys and --center-keys"
            )

    def _closest_first(self, name: str) -> list[str]:
        candidates = list(islice(self.layers, _NUM_SUGGESTION_CANDIDATES))
        close = difflib.get_close_matches(name[:200], candidates, n=3)
        return [*close, *(other for other in self.layers if other not in close)]

    @classmethod
    def from_dict(cls, document: object) -> "ScaleSet":
        """The scales in the decoded JSON of a scale file; CheckpointError if it is none."""
        try:
            if not isinstance(document, Mapping):
                raise ConfigError(f"expected an object of layers, got {brief(document)}")
            header = _read_header(document["octavo"]) if "octavo" in document else ScaleHeader()
            layers = {key: value for key, value in document.items() if key != "octavo"}
            if "layers" in layers:
                unknown = [key for key in layers if key != "layers"]
                if unknown:
                    raise ConfigError(f"expected nothing beside layers, got {list_names(unknown)}")
                layers = layers["layers"]
                if not isinstance(layers, Mapping):
                    raise ConfigError(f"expected layers to be an object, got {brief(layers)}")
            return cls({name: _read_layer(name, layers[name]) for name in layers}, header)
        except ConfigError as error:
            raise CheckpointError(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """The content of a scale file, which `from_dict` reads."""
        header = asdict(self.header)
        # What is not known, or not done, is not written.
        known = {key: x for key, x in header.items() if x is not None and x is not False}
        return {
            "octavo": {"format_version": FORMAT_VERSION, **known},
            "layers": {name: _layer_entry(scales) for name, scales in self.layers.items()},
        }

    def __reduce__(self) -> tuple[type, tuple[dict[str, LayerScales], ScaleHeader]]:
        return ScaleSet, (dict(self.layers), self.header)  # a mapping proxy cannot be pickled


def load_scales(path: str | os.PathLike[str]) -> ScaleSet:
    """The scales in a file; CheckpointError, in bounded time and memory, if it is no scale file."""
    try:
        content = _read_content(path)
        document = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
        return ScaleSet.from_dict(document)
    except CheckpointError as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem = f"expected JSON in UTF-8: {error}"
    raise CheckpointError(f"{brief(os.fspath(path))}: {problem}")


def save_scales(path: str | os.PathLike[str], scale_set: ScaleSet) -> None:
    """Write a scale file, one line for each layer; a crash leaves the old file or the new one."""
    document = scale_set.to_dict()
    layers = ",\n".join(
        f"    {_to_json(name)}: {_to_json(entry)}" for name, entry in document["layers"].items()
    )
    header = _to_json(document["octavo"])
    text = f'{{\n  "octavo": {header},\n  "layers": {{\n{layers}\n  }}\n}}\n'
    content = text.encode()
    _check_size(len(content), content.count(b","))
    write_atomically(path, content)


def _read_content(path: str | os.PathLike[str]) -> bytes:
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):  # reading a pipe or a device may never end
            raise CheckpointError("expected a scale file, got something that is no file")
        _check_size(info.st_size)
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"expected a scale file: {reason}") from None
    _check_size(len(content), content.count(b","))
    return content


def _check_size(num_bytes: int, num_commas: int = 0) -> None:
    if num_bytes > MAX_FILE_BYTES:
        raise CheckpointError(f"expected at most {MAX_FILE_BYTES} bytes, got {num_bytes}")
    if num_commas >= MAX_FILE_VALUES:
        raise CheckpointError(f"expected at most {MAX_FILE_VALUES} values, got {num_commas + 1}")


def _read_header(entry: object) -> ScaleHeader:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"expected octavo to be the header, an object, got {brief(entry)}")
    version = _checked_count("format_version", entry.get("format_version"))
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"expected format_version {FORMAT_VERSION}, got {brief(version)}; upgrade octavo"
        )
    values = {key: value for key, value in entry.items() if key != "format_version"}
    known = [each.name for each in fields(ScaleHeader)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ConfigError(
            f"expected only {', '.join(known)} in the header, got {list_names(unknown)}"
        )
    return ScaleHeader(**values)


def _read_layer(name: object, entry: object) -> LayerScales:
    try:
        if not isinstance(entry, Mapping):
            raise ConfigError(f"expected an object with q, k and v, got {brief(entry)}")
        if not entry.keys() <= _ALL_KEYS:
            unknown = [key for key in entry if key not in _ALL_KEYS]
            raise ConfigError(
                f"expected only {', '.join(sorted(_ALL_KEYS))}, got {list_names(unknown)}"
            )
        if "q" in entry and entry["q"] is None and not entry.keys() & {"q_scale", "q_heads"}:
            q = None
        else:
            q = _read_scale(entry, *_KEYS[0])
        others = [_read_scale(entry, *keys) for keys in _KEYS[1:]]
        if "k_mean" in entry and entry["k_mean"] is None:
            raise ConfigError("expected k_mean to be a list for each head, got null")
        return LayerScales(q, *others, k_mean=entry.get("k_mean"))
    except ConfigError as error:
        raise ConfigError(f"layer {brief(name)}: {error}") from None


def _read_scale(entry: Mapping[str, Any], key: str, alias: str, heads_key: str) -> Scale:
    if (key in entry) == (alias in entry):
        got = "both" if key in entry else f"only {list_names(list(entry)) or 'nothing'}"
        raise ConfigError(f"expected {key} or {alias}, got {got}")
    scale = entry[key] if key in entry else entry[alias]
    if isinstance(scale, list | tuple):
        raise ConfigError(f"expected {key} to be one number, got a list; move it to {heads_key}")
    if heads_key not in entry:
        return scale  # type: ignore[no-any-return]  # LayerScales checks it
    heads = _checked_scale(heads_key, entry[heads_key])
    if not isinstance(heads, tuple):
        raise ConfigError(f"expected {heads_key} to be a list, got {heads}")
    # Not equal to the bit: another program may have rounded the file's numbers.
    if not math.isclose(_checked_number(key, scale), max(heads), rel_tol=1e-6):
        raise ConfigError(f"expected {key} to be the largest of {heads_key}, got {scale}")
    return heads


def _layer_entry(scales: LayerScales) -> dict[str, Any]:
    by_key = {"q": scales.q, "k": scales.k, "v": scales.v}
    entry: dict[str, Any] = {
        key: None if scale is None else _largest(scale) for key, scale in by_key.items()
    }
    for key, scale in by_key.items():
        if isinstance(scale, tuple):
            entry[f"{key}_heads"] = list(scale)
    if scales.k_mean is not None:
        entry["k_mean"] = [list(row) for row in scales.k_mean]
    return entry


def _checked_scale(key: str, value: object) -> Scale:
    if type(value) is float and MIN_SCALE <= value <= MAX_SCALE:
        return value  # nearly always; files have up to 100,000 layers
    if not isinstance(value, list | tuple):
        return _checked_number(key, value)
    if not value:
        raise ConfigError(f"expected a scale for each head in {key}, got none")
    return tuple(_checked_number(key, number) for number in value)


def _checked_mean(mean: object, k: Scale) -> KeyMean:
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


def _checked_number(key: str, value: object) -> float:
    is_bool = isinstance(value, bool)
    if isinstance(value, int | float) and not is_bool and MIN_SCALE <= value <= MAX_SCALE:
        return float(value)
    raise ConfigError(
        f"expected {key} to be a positive finite number, 2^-126 to 2^126, got {brief(value)}"
    )


def _checked_count(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"expected {key} to be a whole number from 1 on, got {brief(value)}")
    return value


def _check_text(key: str, text: object) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT_LENGTH:
        raise ConfigError(
            f"expected {key} to be a text of 1 to {MAX_TEXT_LENGTH} characters, got {brief(text)}"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"expected {key} to be Unicode, got a lone surrogate in {brief(text)}"
        ) from None


def _largest(scale: Scale) -> float:
    return max(scale) if isinstance(scale, tuple) else scale


def _by_number(name: str) -> tuple[str, str]:
    """A sort key that puts blocks.2 before blocks.10."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(20), name), name


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
