"""Writing a checkpoint whose linear layers have FP8 weights, in the format of compressed-tensors.

model.layers.0.mlp.up_proj.weight         F8_E4M3
model.layers.0.mlp.up_proj.weight_scale   float32 [out, 1], or [⌈out/128⌉, ⌈in/128⌉] of blocks

The new tensors of one file are in memory at a time. Scales of the KV cache may come along.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo import ops
from octavo.atomic import temporary_path, write_atomically
from octavo.brief import list_names
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.checkpoints.export import (
    Exported,
    check_scales,
    check_target,
    export_checkpoint,
    files_to_copy,
    sync,
)
from octavo.integrations.checkpoints.kv_scales import layer_key
from octavo.integrations.checkpoints.linear_layers import (
    check_plain,
    find_linear,
    find_scales,
    kv_scale_names,
    read_linear,
)
from octavo.integrations.checkpoints.scheme import find_quantization_config, read_linear_scheme
from octavo.integrations.checkpoints.tensor_files import (
    CONFIG_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    CheckpointFiles,
    TensorEntry,
    read_headers,
)
from octavo.integrations.linear import LinearPlan
from octavo.layers.linear import check_weight
from octavo.numerics.formats import format_named
from octavo.numerics.granularity import parse_granularity
from octavo.recipe import LinearSettings

_BLOCK = 128
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
_WEIGHTS: Mapping[str, dict[str, Any]] = {
    "channel": {"strategy": "channel"},
    "block 128x128": {"strategy": "block", "block_structure": [_BLOCK, _BLOCK]},
}
_ACTIVATIONS: Mapping[str, dict[str, Any]] = {
    "token": {"strategy": "token"},
    "block 1x128": {"strategy": "group", "group_size": _BLOCK},
}
# Weights and the activations that vLLM quantizes with them, whatever else a config asks for.
_PAIRS = {"channel": "token", "block 128x128": "block 1x128"}
# Layers that vLLM computes as one product, in its order: all of them are in FP8, or none.
_PRODUCTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_EXPERT = re.compile(r"(.*\.experts)(\..*)?")
# The experts of a model are one layer in vLLM, by a name that the checkpoint need not have.
_ALL_EXPERTS = r"re:.*\.experts(\..*)?$"
# Other copies of the weights, which a reader might take in place of the new ones.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


@dataclass(frozen=True)
class ExportedWeights:
    """What was written; num_bytes_before: of the source's tensors; cache: its scales, if any."""

    folder: Path
    num_layers: int
    num_bytes_before: int
    num_bytes: int
    cache: Exported | None


def export_weights(
    source: Path,
    plan: LinearPlan,
    settings: LinearSettings,
    target: Path,
    *,
    cache_scales: ScaleSet | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> ExportedWeights:
    """Write the checkpoint of `source` with its linear layers in FP8 to the new folder `target`.

    plan: of the model as transformers has it. cache_scales: of its KV cache, written as well.
    on_layer is told how many layers are done, of how many. There is the whole folder at the end, or
    none. Raises CheckpointError if the source is no plain checkpoint of that model, ConfigError if
    the target is in the way, UnsupportedError if vLLM could not run the result.
    """
    check_target(source, target)
    files = open_plain(source)
    layers = _stored_layers(files, plan)
    config = copy.deepcopy(files.config)
    config["quantization_config"] = _make_quantization_config(files, plan, settings, layers)
    _check_blocks(files, layers, settings)
    copies = _other_files(files)
    if cache_scales is not None:
        check_scales(source, cache_scales)
    with temporary_path(target.absolute().parent, is_folder=True) as temporary:
        _write_weights(files, layers, settings, temporary, on_layer)
        tensors = read_headers(temporary / path.name for path in files.weight_paths)
        _check_written(tensors, layers, settings, config)
        _write_json(temporary / CONFIG_NAME, config)
        if files.index is not None:
            _write_json(temporary / INDEX_NAME, _make_index(files.index, tensors))
        for path, name in copies.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, temporary / name)
            sync(temporary / name)
        cache = None
        if cache_scales is None:
            os.replace(temporary, target)
        else:
            cache = export_checkpoint(temporary, cache_scales, target)
    return ExportedWeights(
        folder=target,
        num_layers=len(layers),
        num_bytes_before=_num_bytes(files.tensors),
        num_bytes=_num_bytes(tensors),
        cache=cache,
    )


def open_plain(source: Path) -> CheckpointFiles:
    """The files of a checkpoint with nothing quantized; CheckpointError for any other."""
    files = CheckpointFiles.open(source)
    if not files.weight_paths:
        raise CheckpointError(
            f"expected weights in {source}, {SINGLE_NAME} or {INDEX_NAME} with its files, got "
            "none; save_pretrained writes them"
        )
    again = "export the checkpoint it was made from"
    if find_quantization_config(files.config) is not None or files.hf_quant_config is not None:
        raise CheckpointError(
            f"expected {source} in BF16, got a checkpoint that is quantized already; {again}"
        )
    check_plain({name: entry.dtype for name, entry in files.tensors.items()})
    if scales := [*find_scales(files.tensors), *kv_scale_names(files.tensors)]:
        raise CheckpointError(
            f"expected {source} without scales, got {list_names(scales)}; {again}"
        )
    return files


def _stored_layers(files: CheckpointFiles, plan: LinearPlan) -> dict[str, str]:
    """The checkpoint's names of the layers to quantize, and the model's name of each.

    Names may differ in the modules around the language model. A layer that the model has in several
    places may be stored under each of their names.
    """
    by_key: dict[tuple[str, ...], list[str]] = {}
    for stored in _matrices(files):
        by_key.setdefault(layer_key(stored), []).append(stored)
    found: dict[str, str] = {}
    missing = []
    for name, places in plan.chosen.items():
        own = [stored for place in places for stored in by_key.get(layer_key(place), ())]
        exact = [stored for stored in own if stored in places]
        if not own or (not exact and len(set(own)) > 1):
            missing.append(name)
        found |= dict.fromkeys(exact or own, name)
    if missing or len(set(found.values())) < len(plan.chosen):
        taken = [name for name in plan.chosen if name not in found.values()]
        raise UnsupportedError(
            f"expected one weight in {files.folder} for each linear layer, got none or several for "
            f"{list_names([*dict.fromkeys([*missing, *taken])])}: transformers makes such layers "
            "of others, or renames them; leave them as they are with --ignored-layers"
        )
    return found


def _matrices(files: CheckpointFiles) -> list[str]:
    """The modules that have a weight with rows and columns, or more dimensions."""
    tensors = files.tensors.items()
    return [n.removesuffix(".weight") for n, x in tensors if n.endswith(".weight") and x.shape[1:]]


def _make_quantization_config(
    files: CheckpointFiles, plan: LinearPlan, settings: LinearSettings, layers: Collection[str]
) -> dict[str, Any]:
    """The quantization_config of config.json; layers: the checkpoint's names of those in FP8."""
    weight, activation = settings.weight, settings.activation
    is_known = weight in _PAIRS and activation in (None, _PAIRS[weight])
    if settings.scaling != "dynamic" or not is_known:
        raise UnsupportedError(
            "expected weights per channel with activations per token, or blocks with groups of "
            f"{_BLOCK}, or weights alone, got weight {weight!r}, activation {activation!r} and "
            f"scaling {settings.scaling!r}"
        )
    if plan.weight_only and activation is not None:
        raise UnsupportedError(
            f"expected one scheme for all layers, got weight_only_layers: "
            f'{list_names(sorted(plan.weight_only))}; set activation = "none" in the recipe\'s '
            "linear, or put these layers into ignored_layers"
        )
    _check_products(plan)
    inputs = None if activation is None else {**_E4M3, "dynamic": True, **_ACTIVATIONS[activation]}
    group = {
        "targets": ["Linear"],
        "weights": {**_E4M3, "dynamic": False, **_WEIGHTS[weight]},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized" if inputs is None else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _ignored(files, plan, layers),
    }


def _check_products(plan: LinearPlan) -> None:
    """Raise ConfigError for a product of vLLM that would be in FP8 in part."""
    left = {product: name for name in plan.left if (product := _product(name)) is not None}
    for name in plan.chosen:
        if (product := _product(name)) in left:
            raise ConfigError(
                f"vLLM computes {product} as one product: expected all of it in FP8 or nothing, "
                f"got {name} without {left[product]} ({plan.left[left[product]]}); leave both to "
                "--ignored-layers, or neither"
            )


def _product(name: str) -> str | None:
    """What vLLM computes a layer in, together with others; None if by itself."""
    if match := _EXPERT.fullmatch(name):
        return match[1]
    parent, dot, leaf = name.rpartition(".")
    names = next((parts for parts in _PRODUCTS if leaf in parts), None)
    return None if names is None else f"{parent}{dot}({' | '.join(names)})"


def _check_blocks(
    files: CheckpointFiles, layers: Collection[str], settings: LinearSettings
) -> None:
    """Raise UnsupportedError for parts of products that do not end where a block does."""
    inner = {name for parts in _PRODUCTS for name in parts[:-1]}
    for layer in layers if settings.weight == "block 128x128" else ():
        rows = files.tensors[f"{layer}.weight"].shape[0]
        if layer.rpartition(".")[2] in inner and rows % _BLOCK:
            raise UnsupportedError(
                f"{layer}: expected a multiple of {_BLOCK} outputs for weights in blocks, which "
                f"vLLM needs where it joins layers, got {rows}; quantize per channel"
            )


def _ignored(files: CheckpointFiles, plan: LinearPlan, layers: Collection[str]) -> list[str]:
    """What stays as it is, by the model's names and the checkpoint's; experts by a pattern.

    vLLM translates the checkpoint's names to its own, and leaves patterns as they are.
    """
    names = dict.fromkeys([*plan.left, *_matrices(files)])
    stay = [name for name in names if name not in layers and name not in plan.chosen]
    has_experts = any(map(_EXPERT.fullmatch, [*stay, *files.tensors]))
    if not has_experts or any(map(_EXPERT.fullmatch, layers)):
        return stay
    return [*(name for name in stay if not _EXPERT.fullmatch(name)), _ALL_EXPERTS]


def _other_files(files: CheckpointFiles) -> dict[Path, str]:
    """The files that come along, and their names; not other copies of the weights."""
    written = {CONFIG_NAME, INDEX_NAME, *(path.name for path in files.weight_paths)}
    found = files_to_copy(files, written).items()
    return {path: name for path, name in found if path.suffix not in _OTHER_WEIGHTS}


def _write_weights(
    files: CheckpointFiles,
    layers: Collection[str],
    settings: LinearSettings,
    folder: Path,
    on_layer: Callable[[int, int], None],
) -> None:
    """Write every file of weights anew, by its name."""
    num_done = 0
    on_layer(num_done, len(layers))
    for path in files.weight_paths:
        tensors: dict[str, Tensor] = {}
        for name, x in _read(path):
            layer = name.removesuffix(".weight")
            if layer == name or layer not in layers:
                tensors[name] = x
                continue
            tensors |= _quantize(layer, x, settings)
            num_done += 1
            on_layer(num_done, len(layers))
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        sync(folder / path.name)


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (no mapping)
            yield name, file.get_tensor(name)


def _quantize(layer: str, weight: Tensor, settings: LinearSettings) -> dict[str, Tensor]:
    """The tensors of an FP8 layer, with the same bits as those of Fp8Linear."""
    check_weight(weight, layer)
    granularity = parse_granularity(settings.weight)
    quantized = ops.quantize(weight, granularity, format_named(settings.format))
    scale = quantized.scale
    return {
        f"{layer}.weight": quantized.data.contiguous(),
        f"{layer}.weight_scale": (scale[:, None] if scale.dim() == 1 else scale).contiguous(),
    }


def _check_written(
    tensors: Mapping[str, TensorEntry],
    layers: Collection[str],
    settings: LinearSettings,
    config: dict[str, Any],
) -> None:
    """Raise CheckpointError unless what was written is read back as it was meant."""
    found = find_linear(tensors)
    for layer in found:
        read_linear(tensors, layer, settings, {})
    if found.keys() != set(layers) or read_linear_scheme(config) != settings:
        raise CheckpointError(
            f"expected {len(layers)} layers to be read back ({settings}), got {len(found)} "
            f"({read_linear_scheme(config)})"
        )


def _make_index(index: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    metadata = {**(index.get("metadata") or {}), "total_size": _num_bytes(tensors)}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(entry.num_elements for entry in tensors.values())
    return {"metadata": metadata, "weight_map": {n: x.path.name for n, x in tensors.items()}}


def _num_bytes(tensors: Mapping[str, TensorEntry]) -> int:
    return sum(entry.stop - entry.start for entry in tensors.values())


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())
