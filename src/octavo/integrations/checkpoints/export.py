"""Writing a checkpoint folder with the scales of its KV cache, for vLLM and compressed-tensors.

The weights stay as they are, hard-linked where the file system allows it. Beside them come the
scales in a file of their own, an index that names it, and a config that announces it.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.atomic import temporary_path, write_atomically
from octavo.brief import brief, list_names
from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.checkpoints.kv_scales import (
    find_attention,
    find_kv_scale_names,
    head_counts,
    match_layers,
    missing_layers,
    num_hidden_layers,
    read_kv_scales,
)
from octavo.integrations.checkpoints.scheme import (
    Strategy,
    find_quantization_config,
    read_announcement,
)
from octavo.integrations.checkpoints.tensor_files import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    CheckpointFiles,
)
from octavo.version import __version__

# transformers takes model.safetensors, where there is one, for all there is.
RENAMED_SINGLE_NAME = "model-00001-of-00001.safetensors"
SCALES_NAME = "model-kv-scales.safetensors"
Format = Literal["compressed-tensors", "modelopt"]


@dataclass(frozen=True)
class Exported:
    """What was written; has_q: whether scales for queries are among it."""

    folder: Path
    strategy: Strategy
    num_layers: int
    num_files: int
    num_linked: int
    has_q: bool


@dataclass(frozen=True)
class _Plan:
    """Everything about an export that can be wrong, found out before anything is written."""

    strategy: Strategy
    scales: Mapping[str, LayerScales]  # by the checkpoint's names, as they will be read back
    tensors: Mapping[str, Tensor]
    contents: Mapping[str, dict[str, Any]]  # of JSON files, by name
    copies: Mapping[Path, str]  # files that come along, and their names in the new folder


def export_checkpoint(
    source: Path,
    scale_set: ScaleSet,
    target: Path,
    *,
    format: Format = "compressed-tensors",
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write the checkpoint of `source` with these KV-cache scales to the new folder `target`.

    There is the whole folder at the end, or none. on_file is told how many files are done, of how
    many. Raises CheckpointError if the source is no checkpoint, or has other layers than the
    scales; ConfigError if the target is in the way; UnsupportedError if the format has no place
    for such scales.
    """
    check_target(source, target)
    scale_set.require_plain_keys("a checkpoint")
    plan = _make_plan(source, scale_set, format)
    with temporary_path(target.absolute().parent, is_folder=True) as temporary:
        num_linked = _write(plan, temporary, on_file)
        found = read_kv_scales(temporary)
        if found is None or dict(found.layers) != dict(plan.scales):
            raise CheckpointError(f"{temporary}: the scales that were written are not read back")
        os.replace(temporary, target)
    return Exported(
        folder=target,
        strategy=plan.strategy,
        num_layers=len(plan.scales),
        num_files=len(plan.copies) + len(plan.contents) + 1,
        num_linked=num_linked,
        has_q=any(scales.q is not None for scales in plan.scales.values()),
    )


def check_target(source: Path, target: Path) -> None:
    """Raise ConfigError unless a new folder can be written at the target."""
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"expected an existing folder for {target}, got none")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"expected a new folder, got the file or link {target}")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"expected a new or empty folder, got {target} with files in it")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"expected a folder outside of {source}, got {target}")


def check_scales(source: Path, scale_set: ScaleSet) -> None:
    """Raise whatever `export_checkpoint` would find wrong with these scales for this checkpoint."""
    scale_set.require_plain_keys("a checkpoint")
    _make_plan(source, scale_set, "compressed-tensors")


def _make_plan(source: Path, scale_set: ScaleSet, format: Format) -> _Plan:
    files = CheckpointFiles.open(source)
    if not files.weight_paths:
        present = list_names(sorted(path.name for path in source.iterdir()))
        raise CheckpointError(
            f"expected weights in {source}, {SINGLE_NAME} or {INDEX_NAME} with its files, got only "
            f"{present}; save_pretrained writes them"
        )
    announced = read_announcement(files)
    names = find_kv_scale_names(files, announced)
    if names or announced.is_announced:
        raise CheckpointError(
            f"expected {source} without KV-cache scales, got "
            f"{list_names([name.tensor for name in names]) or 'a config that announces some'}; "
            "export the checkpoint it was made from"
        )
    by_layer = _by_checkpoint_name(files, scale_set)
    is_per_head = any(
        isinstance(scale, tuple) for s in by_layer.values() for scale in (s.q, s.k, s.v)
    )
    strategy: Strategy = "attn_head" if is_per_head else "tensor"
    if format == "modelopt":
        contents = {HF_QUANT_CONFIG_NAME: _make_hf_quant_config(files, by_layer, strategy)}
        by_layer = {name: LayerScales(None, s.k, s.v) for name, s in by_layer.items()}
        form = "{layer}.{part}_proj.{part}_scale"
    else:
        contents = {CONFIG_NAME: _make_config(files, strategy)}
        form = "{layer}.{part}_scale"
    scales: dict[str, LayerScales] = {}
    tensors: dict[str, Tensor] = {}
    shape = (-1, 1, 1) if is_per_head else () if format == "modelopt" else (1,)
    for layer, given in by_layer.items():
        written = _as_written(files, layer, given, strategy)
        numbers: dict[str, Any] = {part: x.tolist() for part, x in written.items()}
        scales[layer] = LayerScales(numbers.get("q"), numbers["k"], numbers["v"])
        for part, x in written.items():
            tensors[form.format(layer=layer, part=part)] = x.reshape(shape)
    copies = files_to_copy(files, {*contents, INDEX_NAME})
    contents[INDEX_NAME] = _make_index(files, copies, tensors)
    return _Plan(strategy, scales, tensors, contents, copies)


def _by_checkpoint_name(files: CheckpointFiles, scale_set: ScaleSet) -> dict[str, LayerScales]:
    """The scales by the names of the checkpoint, whose every layer must have some."""
    attention = find_attention(files.tensors)
    if not attention:
        raise UnsupportedError(
            f"expected layers with k_proj, v_proj or qkv_proj in {files.folder}, got none"
        )
    targets = match_layers(scale_set.layers, attention)
    if ends := [name for name in targets.values() if name.endswith(".attn")]:
        raise UnsupportedError(f"vLLM reads no scales of layers named {list_names(ends)}")
    missing = missing_layers(targets.values(), attention, num_hidden_layers(files))
    if missing:
        raise CheckpointError(
            f"expected scales for {list_names(missing)} too, got none; readers would take 1.0"
        )
    if len({scales.q is None for scales in scale_set.layers.values()}) > 1:
        raise CheckpointError("expected q scales for all layers or for none, got some")
    return {targets[name]: scales for name, scales in scale_set.layers.items()}


def _as_written(
    files: CheckpointFiles, layer: str, scales: LayerScales, strategy: Strategy
) -> dict[str, Tensor]:
    """The scales of q, k and v in float32, and for each head where any layer has them so."""
    num_keys = {len(s) for s in (scales.k, scales.v) if isinstance(s, tuple)}
    written: dict[str, Tensor] = {}
    for part in ("q", "k", "v"):
        scale = getattr(scales, part)
        if scale is None:
            continue
        numbers = torch.tensor(scale, dtype=torch.float32)
        known = head_counts(files, part)
        if strategy == "attn_head" and not isinstance(scale, tuple):  # each head has the same one
            counts = num_keys if part != "q" and num_keys else set(known[:1])
            if not counts:
                raise UnsupportedError(f"{layer}: the config does not say how many heads there are")
            numbers = numbers.repeat(counts.pop())
        elif isinstance(scale, tuple) and known and len(scale) not in known:
            raise CheckpointError(
                f"{layer}: expected {' or '.join(map(str, known))} scales for the heads of {part}, "
                f"got {len(scale)}"
            )
        written[part] = numbers
    return written


def files_to_copy(files: CheckpointFiles, written: set[str]) -> dict[Path, str]:
    """Every file of the source that comes along, and its new name.

    Not those that are written anew, nor what is in hidden folders, which belongs to git and others.
    """
    found: dict[Path, str] = {}
    for root, folders, names in os.walk(files.folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if links := [name for name in folders if (Path(root) / name).is_symlink()]:
            raise CheckpointError(f"expected folders in {root}, got links: {list_names(links)}")
        for path in (Path(root) / name for name in sorted(names)):
            if not path.is_file():
                raise CheckpointError(f"expected a file, got a broken link or no file: {path}")
            name = path.relative_to(files.folder).as_posix()
            if name not in written:
                found[path] = RENAMED_SINGLE_NAME if name == SINGLE_NAME else name
    new = {SCALES_NAME, *(name for path, name in found.items() if path.name != Path(name).name)}
    if taken := [name for name in new if (files.folder / name).exists()]:
        raise CheckpointError(f"expected no file {taken[0]} in {files.folder}, got one; remove it")
    return found


def _write(plan: _Plan, folder: Path, on_file: Callable[[int, int], None]) -> int:
    """Fill the folder; how many files are hard links."""
    num_linked, total = 0, len(plan.copies)
    on_file(0, total)
    for done, (path, name) in enumerate(plan.copies.items(), 1):
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Only weights: whoever edits a tokenizer's file expects it to be the new folder's own.
        is_linked = False
        if path.suffix == ".safetensors":
            with suppress(OSError):  # another file system, or one without hard links
                os.link(path.resolve(), copy)
                is_linked = True
        num_linked += is_linked
        if not is_linked:
            shutil.copyfile(path, copy)
            sync(copy)
        on_file(done, total)
    save_file(dict(plan.tensors), folder / SCALES_NAME, metadata={"format": "pt"})
    sync(folder / SCALES_NAME)
    for name, document in plan.contents.items():
        # As transformers lays it out.
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        write_atomically(folder / name, text.encode())
    return num_linked


def sync(path: Path) -> None:
    """Bring a file to the disk: a folder gets its name once all of it is there."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _make_config(files: CheckpointFiles, strategy: Strategy) -> dict[str, Any]:
    """config.json with a kv_cache_scheme, in what compressed-tensors wrote there or alone."""
    config = copy.deepcopy(files.config)
    settings = find_quantization_config(config)
    if settings is None and files.hf_quant_config is None:
        # Weights stay as they are: no groups. vLLM wants config_groups to be there.
        settings = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
        }
        config["quantization_config"] = settings
    method = settings.get("quant_method") if settings is not None else "modelopt"
    if settings is None or method != "compressed-tensors":
        raise CheckpointError(
            f"expected weights in BF16 or quantized by compressed-tensors, got {method} in "
            f"{files.folder}; export the checkpoint it was made from"
        )
    settings.setdefault("config_groups", {})
    form = {"num_bits": 8, "type": "float", "strategy": strategy}
    settings["kv_cache_scheme"] = {**form, "dynamic": False, "symmetric": True}
    return config


def _make_hf_quant_config(
    files: CheckpointFiles, layers: Iterable[str], strategy: Strategy
) -> dict[str, Any]:
    """hf_quant_config.json for weights that are not quantized.

    vLLM knows the file by its producer's name, and refuses it without a quant_algo: so the weights
    are FP8 except for all of them.
    """
    if strategy != "tensor":
        raise UnsupportedError(
            "ModelOpt's format has one scale per tensor, got scales per head; "
            "use the format compressed-tensors"
        )
    for layer in layers:
        has_proj = all(f"{layer}.{part}_proj.weight" in files.tensors for part in "kv")
        if not (has_proj and layer.endswith((".self_attn", ".mixer"))):
            raise UnsupportedError(
                f"ModelOpt's format needs self_attn.k_proj and v_proj, got {brief(layer)} without; "
                "use the format compressed-tensors"
            )
    if find_quantization_config(files.config) is not None or files.hf_quant_config is not None:
        raise CheckpointError(
            f"expected weights in BF16 for ModelOpt's format, got {files.folder} with a "
            f"quantization_config; export the checkpoint it was made from"
        )
    all_kept = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}
    producer = {"name": "modelopt", "version": f"octavo {__version__}"}
    return {"producer": producer, "quantization": all_kept}


def _make_index(
    files: CheckpointFiles, new_names: Mapping[Path, str], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The index of all tensors: the source's, by the new names of their files, and the scales."""
    metadata = dict((files.index or {}).get("metadata") or {})
    metadata["total_size"] = sum(entry.stop - entry.start for entry in files.tensors.values())
    metadata["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    if isinstance(metadata.get("total_parameters"), int):
        metadata["total_parameters"] += sum(tensor.numel() for tensor in tensors.values())
    weight_map = {name: new_names[entry.path] for name, entry in files.tensors.items()}
    weight_map |= dict.fromkeys(tensors, SCALES_NAME)
    return {"metadata": metadata, "weight_map": weight_map}
