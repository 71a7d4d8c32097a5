"""The scales of the KV cache in a checkpoint, whoever wrote it: their names, and their values."""

import json
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.brief import brief, list_names
from octavo.calibration.scale_document import Scale
from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.checkpoints.scheme import (
    Announcement,
    Strategy,
    find_quantization_config,
    read_announcement,
)
from octavo.integrations.checkpoints.tensor_files import (
    CheckpointFiles,
    TensorEntry,
    check_zeros,
    read_scales,
)
from octavo.integrations.fused_layers import group_of
from octavo.integrations.linear import layer_index

_LAYER = r"(?P<layer>(?:.+\.)?(?:self_attn|self_attention|attention|attn|mixer))"
_PART = r"(?P<part>[qkv])"
_KIND = r"(?P<kind>scale|zero_point)"
# Layout -> names; the first that matches decides.
_LAYOUTS = {
    "vllm": re.compile(rf"{_LAYER}\.attn\.{_PART}_{_KIND}"),
    "compressed-tensors": re.compile(rf"{_LAYER}\.{_PART}_{_KIND}"),
    "modelopt": re.compile(rf"{_LAYER}\.(?P<part>[kv])_proj\.(?P=part)_(?P<kind>scale)"),
    "fused": re.compile(rf"{_LAYER}\.qk(?:qk)?v_proj\.(?P<part>[kv])_(?P<kind>scale)"),
    "hyv3_cache": re.compile(rf"{_LAYER}\.(?P<part>[kv])_cache\.(?P<kind>scale)"),
    "hyv3_query": re.compile(rf"{_LAYER}\.(?P<part>q)\.(?P<kind>scale)"),
    "kv_scale": re.compile(rf"{_LAYER}\.(?P<part>kv)_(?P<kind>scale)"),
    "output": re.compile(rf"{_LAYER}\.{_PART}_proj\.output_{_KIND}"),
}
_LOOKS_LIKE_ONE = re.compile(
    r"(?:^|[._])(?:[qkv]|kv|qkv|query|key|value|prob|prob_output)(?:_cache)?"
    r"[._](?:scales?|scale_inv|inv_scale|global_scale|descale|zero_point|amax|scaling_factor)$"
    r"|[._][qkv]_(?:bmm|fake)_quantizer\.|kv_cache"
)
# Modules that hold the language model in one class and not in another: they carry no meaning.
_WRAPPERS = {"model", "language_model", "text_model", "transformer", "backbone", "base_model"}
_HAS_KEYS = re.compile(rf"{_LAYER}\.(?:k_proj|v_proj|qkv_proj|qkqkv_proj|kv_b_proj)\..+")


@dataclass(frozen=True)
class ScaleName:
    """What the name of a KV-cache scale says; part kv is one scale for keys and values."""

    tensor: str
    layer: str
    part: str  # q, k, v, kv
    kind: str  # scale, zero_point
    layout: str


def parse_scale_name(tensor: str) -> ScaleName | None:
    """What the name of a tensor says if it is understood as a scale or zero point, else None."""
    for layout, pattern in _LAYOUTS.items():
        if match := pattern.fullmatch(tensor):
            return ScaleName(tensor, match["layer"], match["part"], match["kind"], layout)
    return None


def find_attention(tensors: Iterable[str]) -> list[str]:
    """The attention layers of a checkpoint: whatever projects keys or values, in order."""
    matches = (_HAS_KEYS.fullmatch(tensor) for tensor in tensors)
    return list(dict.fromkeys(match["layer"] for match in matches if match))


def split_number(layer: str) -> tuple[str, int | None]:
    """A layer's name with * for its number, and the number: what layers of a stack share."""
    return group_of(layer), layer_index(layer)


def missing_layers(
    layers: Iterable[str], attention: Iterable[str], num_layers: int | None
) -> list[str]:
    """The layers of the same stacks that are not among `layers`, by `attention`, else by number.

    Layers from num_layers on predict tokens further ahead, and are not run by transformers.
    """
    known = set(layers)
    stacks = {stack for stack, number in map(split_number, known) if number is not None}
    expected = [name for name in attention if split_number(name)[0] in stacks]
    for stack in sorted(stacks - {split_number(name)[0] for name in expected}):
        expected += [stack.replace("*", str(number)) for number in range(num_layers or 0)]
    return [
        name
        for name in expected
        if name not in known and (num_layers is None or (split_number(name)[1] or 0) < num_layers)
    ]


def match_layers(names: Iterable[str], targets: Sequence[str]) -> dict[str, str]:
    """For each layer name the same layer's name among the targets.

    Names that differ only in the modules around the language model are the same layer:
    language_model.model.layers.0.self_attn, model.language_model.layers.0.self_attn and
    model.layers.0.self_attn. CheckpointError if a name has no target, or it is ambiguous.
    """
    known = set(targets)
    by_key: dict[tuple[str, ...], list[str]] = {}
    for target in targets:
        by_key.setdefault(layer_key(target), []).append(target)
    found: dict[str, str] = {}
    unmatched = []
    for name in names:
        match [name] if name in known else by_key.get(layer_key(name), []):
            case [target]:
                found[name] = target
            case []:
                unmatched.append(name)
            case candidates:
                raise CheckpointError(
                    f"expected one layer that {name!r} stands for, got {list_names(candidates)}"
                )
    if unmatched:
        raise CheckpointError(
            f"expected scales for {list_names(list(targets)) or 'no layer'}, "
            f"got some for {list_names(unmatched)}"
        )
    by_target: dict[str, str] = {}
    for name, target in found.items():
        if (other := by_target.setdefault(target, name)) != name:
            raise CheckpointError(
                f"expected the scales of {target!r} once, got {other!r} and {name!r}"
            )
    return found


def layer_key(name: str) -> tuple[str, ...]:
    """What the names of one layer have in common: all but the modules around the language model."""
    stack, number = split_number(name)
    before, _, after = stack.partition("*") if number is not None else (stack, "", "")
    kept = [part for part in before.split(".") if part not in _WRAPPERS]
    return (*kept, str(number), after)


def read_kv_scales(folder: Path, modules: Sequence[str] | None = None) -> ScaleSet | None:
    """The KV-cache scales in a checkpoint folder, or None if it neither has nor announces any.

    modules: the model's attention layers, by whose names the scales are returned; by default they
    have the checkpoint's own. q is None where the checkpoint has no scale for queries. Of the
    weights only headers are read. Raises CheckpointError for scales that are not understood, not
    complete or not as announced, and if they are not those of exactly these modules.
    """
    try:
        files = CheckpointFiles.open(folder)
        announced = read_announcement(files)
        names = find_kv_scale_names(files, announced)
        if not names and not announced.is_announced:
            return None
        _check_announced(names, announced)
        said = [find_quantization_config(files.config), files.hf_quant_config]
        dtypes = {entry.dtype for entry in files.tensors.values()}
        # The scales of e4m3fnuz mean something else.
        if "fnuz" in json.dumps([*said, *sorted(dtypes)]).lower():
            raise CheckpointError(
                "expected scales for e4m3 (fn), got a checkpoint for fnuz formats"
            )
        layers = _read_layers(files, names, announced.strategy)
        attention = find_attention(files.tensors)
        if missing := missing_layers(layers, attention, num_hidden_layers(files)):
            expected = f"expected KV-cache scales for {list_names(missing)} too"
            raise CheckpointError(f"{expected}, got none")
        without = [name for name, scales in layers.items() if scales.q is None]
        if without and len(without) < len(layers):
            expected = "expected q scales for all layers"
            raise CheckpointError(f"{expected}, got none for {list_names(without)}")
        if modules is not None:
            targets = match_layers(layers, modules)
            layers = {targets[name]: scales for name, scales in layers.items()}
        scale_set = ScaleSet(layers)
        scale_set.require(modules or ())
        return scale_set
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def find_kv_scale_names(files: CheckpointFiles, announced: Announcement) -> list[ScaleName]:
    """The tensors of a checkpoint that are KV-cache scales or their zero points.

    The scale of a projection's output is one of the cache if the cache is announced to have some.
    CheckpointError for any that only looks like one.
    """
    parsed = {tensor: parse_scale_name(tensor) for tensor in files.tensors}
    names = [name for name in parsed.values() if name is not None]
    by_output = [name.tensor for name in names if name.layout == "output"]
    if unknown := [x for x, name in parsed.items() if not name and _LOOKS_LIKE_ONE.search(x)]:
        raise CheckpointError(
            "expected scales of the KV cache by a known name such as model.layers.0.self_attn."
            f"k_scale, got {list_names(unknown)}"
        )
    if by_output and announced.is_announced and announced.has_output_scales:
        raise CheckpointError(
            "expected scales of outputs or of the KV cache, got both announced and "
            f"{list_names(by_output)}"
        )
    return [name for name in names if announced.is_announced or name.layout != "output"]


def _check_announced(names: list[ScaleName], announced: Announcement) -> None:
    if not names:
        raise CheckpointError(
            "expected the KV-cache scales that its config announces, got none in its weights; "
            "copy the missing files, or remove kv_cache_scheme (kv_cache_quant_algo)"
        )
    is_modelopt = all(name.layout == "modelopt" for name in names)
    method = announced.method or ("modelopt" if is_modelopt else "")
    is_clear = method == "fp8" or method.startswith("modelopt")  # whose scales need no scheme
    if not announced.is_announced and not is_clear:
        method = f"quant_method {announced.method}" if announced.method else "nothing quantized"
        raise CheckpointError(
            f"expected a kv_cache_scheme for {list_names([name.tensor for name in names])}, "
            f"got {method} without one"
        )


def _read_layers(
    files: CheckpointFiles, names: list[ScaleName], strategy: Strategy | None
) -> dict[str, LayerScales]:
    by_layer: dict[str, dict[str, ScaleName]] = {}
    for name in names:
        if name.kind == "zero_point":
            check_zeros(files.tensors[name.tensor])
            continue
        parts = by_layer.setdefault(name.layer, {})
        for part in name.part:  # "kv" is both
            if part in parts:
                raise CheckpointError(
                    f"expected one scale, got {brief(parts[part].tensor)} and {brief(name.tensor)}"
                )
            parts[part] = name
    if not by_layer:
        raise CheckpointError(
            f"expected scales, got only {list_names([name.tensor for name in names])}"
        )
    if any(name.part == "kv" for name in names):
        warnings.warn(
            f"{files.folder} has kv_scale, which is deprecated: taken for keys and for values",
            stacklevel=3,
        )
    layers = {}
    for layer, parts in by_layer.items():
        if missing := [part for part in "kv" if part not in parts]:
            raise CheckpointError(
                f"{layer}: expected scales for k and v, got none for {', '.join(missing)}"
            )
        read = {
            part: _read_scale(files, files.tensors[name.tensor], part, strategy)
            for part, name in parts.items()
        }
        try:
            layers[layer] = LayerScales(read.get("q"), read["k"], read["v"])
        except ConfigError as error:  # k and v of different numbers of heads
            raise CheckpointError(f"{layer}: {error}") from None
    return layers


def _read_scale(
    files: CheckpointFiles, entry: TensorEntry, part: str, strategy: Strategy | None
) -> Scale:
    num_heads = entry.num_elements
    is_per_head = strategy == "attn_head" or (strategy is None and num_heads > 1)
    shapes = [(num_heads,), (num_heads, 1, 1)] if is_per_head else [(), (1,)]
    known = head_counts(files, part)
    if entry.shape not in shapes or (is_per_head and known and num_heads not in known):
        heads = " or ".join(map(str, known)) or "heads"
        expected = f"shape [{heads}, 1, 1] or [{heads}]" if is_per_head else "one number"
        announced = f" by strategy {strategy}" if strategy else ""
        raise CheckpointError(
            f"{brief(entry.name)}: expected {expected}{announced}, got shape {list(entry.shape)}"
        )
    numbers: list[float] = read_scales(entry).flatten().tolist()
    return tuple(numbers) if is_per_head else numbers[0]


def head_counts(files: CheckpointFiles, part: str) -> list[int]:
    """How many heads a layer may have by the config; none if it does not say."""
    queries = files.text_value("num_attention_heads")
    keys = files.text_value("num_key_value_heads")
    of_keys = [keys or queries, files.text_value("num_global_key_value_heads")]
    return [count for count in ([queries] if part == "q" else of_keys) if isinstance(count, int)]


def num_hidden_layers(files: CheckpointFiles) -> int | None:
    """How many layers the language model has, if the config says so."""
    count = files.text_value("num_hidden_layers")
    return count if isinstance(count, int) else None
