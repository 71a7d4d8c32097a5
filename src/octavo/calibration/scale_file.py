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
"transformer_2.blocks.0.attn1.to_q" (`of_component`).
"""

import difflib
import json
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr

from octavo.atomic import write_atomically
from octavo.brief import brief, list_names, unique_keys
from octavo.calibration.scale_document import (
    FORMAT_VERSION,
    MAX_SCALE,
    MIN_SCALE,
    check_name,
    checked_number,
    read_document,
)
from octavo.calibration.scale_document import LayerScales as LayerScales
from octavo.errors import CheckpointError, ConfigError
from octavo.settings import checked

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
T = TypeVar("T")


def _check_date(date: str) -> str:
    try:
        datetime.fromisoformat(date)
    except ValueError:
        raise ConfigError(
            f"expected a date such as 2026-08-22T10:00:00, got {brief(date)}"
        ) from None
    return date


_Text = Annotated[StrictStr, Field(min_length=1, max_length=1000)]
_Margin = Annotated[float, Field(strict=True, ge=MIN_SCALE, le=MAX_SCALE)]
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


@checked
class ScaleHeader:
    """What scales are for and where they come from; what is not known is None.

    date is in ISO 8601. rotate_keys: whether keys and queries were rotated before they were seen.
    """

    kind: Kind | None = None
    model: _Text | None = None
    data: _Text | None = None
    date: Annotated[_Text, AfterValidator(_check_date)] | None = None
    observer: _Text | None = None
    passes: Annotated[StrictInt, Field(ge=1)] | None = None
    margin: _Margin | None = None
    rotate_keys: StrictBool = False


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
            check_name(name)
        for name, scale in self.inputs.items():
            checked_number(f"the input scale of {name}", scale)
        inputs = {name: float(scale) for name, scale in self.inputs.items()}
        object.__setattr__(self, "layers", _in_order(self.layers))
        object.__setattr__(self, "inputs", _in_order(inputs))

    def layer(self, name: str) -> LayerScales:
        """The scales of one layer; CheckpointError if there are none."""
        self.require([name])
        return self.layers[name]

    def require(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless there are scales for every one of these layers."""
        _require(self.layers, names, "scales", self.incomplete)

    def require_inputs(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless there are input scales for all of these linear layers."""
        _require(self.inputs, names, "input scales", {})

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
        _warn(notes, "scales")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The content of a scale file, which `from_dict` reads."""
        header = asdict(self.header)
        # What is not known, or not done, is not written.
        known = {key: x for key, x in header.items() if x is not None and x is not False}
        return {
            "octavo": {"format_version": FORMAT_VERSION, **known},
            "layers": {
                **{name: scales.to_dict() for name, scales in self.layers.items()},
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
        header = ScaleHeader(**found.header)
        incomplete = MappingProxyType(found.incomplete)
        scales = ScaleSet(found.layers, header, found.inputs, incomplete=incomplete)
        return scales, found.notes()
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def _warn(notes: Iterable[str], file: str) -> None:
    for note in notes:
        warnings.warn(f"{file}: {note}", ScaleFileWarning, stacklevel=3)


def _require(
    found: Mapping[str, object], names: Iterable[str], what: str, incomplete: Mapping[str, str]
) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        reason = incomplete.get(missing[0])
        got = "none" if reason is None else f"an incomplete entry ({reason})"
        candidates = list(islice(found, _NUM_SUGGESTION_CANDIDATES))
        close = difflib.get_close_matches(missing[0][:200], candidates, n=3)
        raise CheckpointError(
            f"expected {what} for {list_names(missing)}, got {got}; the {len(found)} layers with "
            f"{what} are {list_names([*close, *(x for x in found if x not in close)])}"
        )


def load_scales(path: str | os.PathLike[str], *, strict: bool | None = None) -> ScaleSet:
    """The scales in a file; CheckpointError, in bounded time and memory, if it is no scale file.

    What vLLM's loader tolerates is a ScaleFileWarning, or an error if `strict`.
    """
    name = brief(os.fspath(path))
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe or a device may never end
            raise CheckpointError("expected a scale file, got something that is no file")
        _check_size(os.stat(path).st_size)
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{name}: expected a scale file: {reason}") from None
    try:
        _check_size(len(content), content.count(b","))
        document = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
        found, notes = _from_document(document, strict)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: expected JSON in UTF-8: {error}") from None
    _warn(notes, name)
    return found


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


def _check_size(num_bytes: int, num_commas: int = 0) -> None:
    if num_bytes > MAX_FILE_BYTES:
        raise CheckpointError(f"expected at most {MAX_FILE_BYTES} bytes, got {num_bytes}")
    if num_commas >= MAX_FILE_VALUES:
        raise CheckpointError(f"expected at most {MAX_FILE_VALUES} values, got {num_commas + 1}")


def _in_order(entries: Mapping[str, T]) -> Mapping[str, T]:
    """Entries by name, blocks.2 before blocks.10."""

    def key(name: str) -> tuple[str, str]:
        return re.sub("[0-9]+", lambda digits: digits[0].zfill(20), name), name

    return MappingProxyType({name: entries[name] for name in sorted(entries, key=key)})


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def of_component(scales: ScaleSet, component: str) -> ScaleSet:
    """The scales of one component, by the names that its layers have in it.

    CheckpointError if there are none, or if the scales are for something else than a pipeline.
    """
    scales.require_kind("pipeline")
    prefix = f"{component}."

    def own(entries: Mapping[str, T]) -> dict[str, T]:
        return {n.removeprefix(prefix): x for n, x in entries.items() if n.startswith(prefix)}

    layers, inputs = own(scales.layers), own(scales.inputs)
    if not layers and not inputs:
        names = [*scales.layers, *scales.inputs]
        raise CheckpointError(
            f"expected scales of layers named {prefix}…, got {list_names(names)}: octavo calibrate "
            "--pipeline finds them"
        )
    header = replace(scales.header, kind=None)
    return ScaleSet(layers, header, inputs, incomplete=own(scales.incomplete))
