"""Scale files: the static scales of a model's layers as JSON, in a form that vLLM reads too.

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

A linear layer has the scale of its activations: "model.layers.0.mlp.up_proj": {"input": 0.013}. It
stands among the attention layers; vLLM's loader passes over entries without q, k and v.

In a file for a diffusion pipeline (kind "pipeline") names begin with that of the component:
"transformer_2.blocks.0.attn1.to_q" (octavo.calibration.component_scales).
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
from octavo.calibration.scale_values import (
    KeyMean,
    Scale,
    check_text,
    checked_count,
    checked_mean,
    checked_number,
    checked_scale,
)
from octavo.errors import CheckpointError, ConfigError

FORMAT_VERSION = 1
MAX_FILE_BYTES = 32 * 2**20  # some 300,000 layers, or 10,000 with 32 heads
MAX_FILE_VALUES = 2_000_000  # 32 MiB of [[],[],… would take 1 GB of memory
# What scales are for, in the words of a recipe.
Kind = Literal["vision_attention", "kv_cache", "linear", "pipeline"]

_KEYS = [(key, f"{key}_scale", f"{key}_heads") for key in ("q", "k", "v")]
_ALL_KEYS = frozenset(key for keys in _KEYS for key in keys) | {"k_mean"}
_INPUT_KEYS = frozenset({"input", "input_scale"})
_COMMANDS: dict[Kind, str] = {
    "vision_attention": "octavo calibrate",
    "kv_cache": "octavo calibrate --kv",
    "linear": "octavo.calibrate_linear",
    "pipeline": "octavo calibrate --pipeline",
}
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
            object.__setattr__(self, key, checked_scale(key, getattr(self, key)))
        if isinstance(self.k, tuple) and isinstance(self.v, tuple) and len(self.k) != len(self.v):
            raise ConfigError(
                f"expected as many heads in k as in v, got {len(self.k)} and {len(self.v)}"
            )
        if self.k_mean is not None:
            object.__setattr__(self, "k_mean", checked_mean(self.k_mean, self.k))

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
                check_text(key, text)
        if self.passes is not None:
            checked_count("passes", self.passes)
        if not isinstance(self.rotate_keys, bool):
            raise ConfigError(
                f"expected rotate_keys to be true or false, got {brief(self.rotate_keys)}"
            )
        if self.margin is not None:
            object.__setattr__(self, "margin", checked_number("margin", self.margin))
        try:
            datetime.fromisoformat(self.date or "2000-01-01")
        except ValueError:
            raise ConfigError(
                f"expected a date such as 2026-08-22T10:00:00, got {brief(self.date)}"
            ) from None


@dataclass(frozen=True)
class ScaleSet:
    """The static scales of a model's layers, by layer name, and where they come from.

    layers: of attention. inputs: of the activations that linear layers are given.
    """

    layers: Mapping[str, LayerScales]
    header: ScaleHeader = ScaleHeader()
    inputs: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers and not self.inputs:
            raise ConfigError("expected the scales of at least one layer, got none")
        if both := sorted(self.layers.keys() & self.inputs.keys()):
            raise ConfigError(f"expected scales of attention or of an input, got both: {both[0]}")
        for name in (*self.layers, *self.inputs):
            check_text("the name of a layer", name)
        layers = {name: self.layers[name] for name in sorted(self.layers, key=_by_number)}
        object.__setattr__(self, "layers", MappingProxyType(layers))
        inputs = {
            name: checked_number(f"the input scale of {name}", self.inputs[name])
            for name in sorted(self.inputs, key=_by_number)
        }
        object.__setattr__(self, "inputs", MappingProxyType(inputs))

    def layer(self, name: str) -> LayerScales:
        """The scales of one layer; CheckpointError if there are none."""
        self.require([name])
        return self.layers[name]

    def require(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless there are scales for every one of these layers."""
        _require(self.layers, names, "scales")

    def require_inputs(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless there are input scales for all of these linear layers."""
        _require(self.inputs, names, "input scales")

    def require_kind(self, kind: Kind) -> None:
        """Raise CheckpointError if the header says that these scales are for something else."""
        if self.header.kind not in (None, kind):
            command = _COMMANDS[kind]
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
            inputs = {name: _read_input(name, x) for name, x in layers.items() if _is_input(x)}
            attention = [name for name in layers if name not in inputs]
            return cls(
                {name: _read_layer(name, layers[name]) for name in attention}, header, inputs
            )
        except ConfigError as error:
            raise CheckpointError(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """The content of a scale file, which `from_dict` reads."""
        header = asdict(self.header)
        # What is not known, or not done, is not written.
        known = {key: x for key, x in header.items() if x is not None and x is not False}
        return {
            "octavo": {"format_version": FORMAT_VERSION, **known},
            "layers": {
                **{name: _layer_entry(scales) for name, scales in self.layers.items()},
                **{name: {"input": scale} for name, scale in self.inputs.items()},
            },
        }

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # A mapping proxy cannot be pickled.
        return ScaleSet, (dict(self.layers), self.header, dict(self.inputs))


def _require(found: Mapping[str, object], names: Iterable[str], what: str) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(
            f"expected {what} for {list_names(missing)}, got none; the {len(found)} layers with "
            f"{what} are {list_names(_closest_first(missing[0], found))}"
        )


def _closest_first(name: str, found: Mapping[str, object]) -> list[str]:
    candidates = list(islice(found, _NUM_SUGGESTION_CANDIDATES))
    close = difflib.get_close_matches(name[:200], candidates, n=3)
    return [*close, *(other for other in found if other not in close)]


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
    version = checked_count("format_version", entry.get("format_version"))
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


def _is_input(entry: object) -> bool:
    """Whether an entry is that of a linear layer."""
    return isinstance(entry, Mapping) and bool(entry.keys() & _INPUT_KEYS)


def _read_input(name: object, entry: Mapping[str, Any]) -> float:
    if len(entry) > 1:
        raise ConfigError(f"layer {brief(name)}: expected input alone, got {list_names([*entry])}")
    (scale,) = entry.values()
    return checked_number(f"layer {brief(name)}: input", scale)


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
    heads = checked_scale(heads_key, entry[heads_key])
    if not isinstance(heads, tuple):
        raise ConfigError(f"expected {heads_key} to be a list, got {heads}")
    # Not equal to the bit: another program may have rounded the file's numbers.
    if not math.isclose(checked_number(key, scale), max(heads), rel_tol=1e-6):
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


def _largest(scale: Scale) -> float:
    return max(scale) if isinstance(scale, tuple) else scale


def _by_number(name: str) -> tuple[str, str]:
    """A sort key that puts blocks.2 before blocks.10."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(20), name), name


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
