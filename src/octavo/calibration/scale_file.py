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
"layers" around them, and q_scale, k_scale and v_scale for q, k and v. What vLLM's loader passes
over is a warning here, and an error in strict reading. "q": null says that there is no scale for Q,
as in most checkpoints with scales of the KV cache; vLLM's loader fails on it.

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
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, get_args

from octavo.atomic import write_atomically
from octavo.brief import brief, list_names, unique_keys
from octavo.calibration.scale_document import (
    FORMAT_VERSION,
    KeyMean,
    Scale,
    check_text,
    checked_count,
    checked_mean,
    checked_number,
    checked_scale,
    read_document,
)
from octavo.errors import CheckpointError, ConfigError

MAX_FILE_BYTES = 32 * 2**20  # some 300,000 layers, or 10,000 with 32 heads
MAX_FILE_VALUES = 2_000_000  # 32 MiB of [[],[],… would take 1 GB of memory
# What scales are for, in the words of a recipe.
Kind = Literal["vision_attention", "kv_cache", "linear", "pipeline"]

_COMMANDS: dict[Kind, str] = {
    "vision_attention": "octavo calibrate",
    "kv_cache": "octavo calibrate --kv",
    "linear": "octavo.calibrate_linear",
    "pipeline": "octavo calibrate --pipeline",
}
_NUM_SUGGESTION_CANDIDATES = 2000  # difflib needs about 10 µs for each


_is_strict = False


@contextmanager
def strict_reading() -> Iterator[None]:
    """Inside, scale files are read strictly unless the caller says otherwise, in all threads."""
    global _is_strict
    before, _is_strict = _is_strict, True
    try:
        yield
    finally:
        _is_strict = before


class ScaleFileWarning(UserWarning):
    """A scale file has something that octavo does not write and vLLM's loader tolerates."""


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

    layers: of attention. inputs: of the activations that linear layers are given. incomplete:
    layers that a file names without all of q, k and v, and what is missing.
    """

    layers: Mapping[str, LayerScales]
    header: ScaleHeader = ScaleHeader()
    inputs: Mapping[str, float] = field(default_factory=dict)
    incomplete: Mapping[str, str] = field(default_factory=dict, compare=False, kw_only=True)

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
        _require(self.layers, names, "scales", self.incomplete)

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
    def from_dict(cls, document: object, *, strict: bool | None = None) -> "ScaleSet":
        """The scales in the decoded JSON of a scale file; CheckpointError if it is none.

        What vLLM's loader tolerates is a ScaleFileWarning, or an error if `strict`.
        """
        found, notes = _from_document(document, strict)
        _warn(notes)
        return found

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


def _from_document(document: object, strict: bool | None) -> tuple[ScaleSet, list[str]]:
    """The scales of a decoded file, and what in it strict reading would refuse."""
    try:
        found = read_document(document, strict=_is_strict if strict is None else strict)
        known = [each.name for each in fields(ScaleHeader)]
        if unknown := [key for key in found.header if key not in known]:
            raise ConfigError(
                f"expected only {', '.join(known)} in the header, got {list_names(unknown)}"
            )
        layers = {}
        for name, entry in found.layers.items():
            try:
                layers[name] = LayerScales(**entry)
            except ConfigError as error:
                raise ConfigError(f"layer {brief(name)}: {error}") from None
        header = ScaleHeader(**found.header)
        incomplete = MappingProxyType(found.incomplete)
        return ScaleSet(layers, header, found.inputs, incomplete=incomplete), found.notes()
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def _warn(notes: Iterable[str], file: str = "scales") -> None:
    for note in notes:
        warnings.warn(f"{file}: {note}", ScaleFileWarning, stacklevel=3)


def _require(
    found: Mapping[str, object],
    names: Iterable[str],
    what: str,
    incomplete: Mapping[str, str] = MappingProxyType({}),
) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        reason = incomplete.get(missing[0])
        got = "none" if reason is None else f"an incomplete entry ({reason})"
        raise CheckpointError(
            f"expected {what} for {list_names(missing)}, got {got}; the {len(found)} layers with "
            f"{what} are {list_names(_closest_first(missing[0], found))}"
        )


def _closest_first(name: str, found: Mapping[str, object]) -> list[str]:
    candidates = list(islice(found, _NUM_SUGGESTION_CANDIDATES))
    close = difflib.get_close_matches(name[:200], candidates, n=3)
    return [*close, *(other for other in found if other not in close)]


def load_scales(path: str | os.PathLike[str], *, strict: bool | None = None) -> ScaleSet:
    """The scales in a file; CheckpointError, in bounded time and memory, if it is no scale file.

    What vLLM's loader tolerates is a ScaleFileWarning, or an error if `strict`.
    """
    try:
        content = _read_content(path)
        document = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
        found, notes = _from_document(document, strict)
    except CheckpointError as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem = f"expected JSON in UTF-8: {error}"
    else:
        _warn(notes, brief(os.fspath(path)))
        return found
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
