"""The JSON files of an exported checkpoint: config, index, and ModelOpt's own."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.kv_scheme import Strategy, find_quantization_config
from octavo.integrations.checkpoints.tensor_files import CheckpointFiles
from octavo.version import __version__

Format = Literal["compressed-tensors", "modelopt"]


def make_config(files: CheckpointFiles, strategy: Strategy) -> dict[str, Any]:
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
    settings["kv_cache_scheme"] = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "dynamic": False,
        "symmetric": True,
    }
    return config


def make_hf_quant_config(files: CheckpointFiles) -> dict[str, Any]:
    """hf_quant_config.json for weights that are not quantized.

    vLLM knows the file by its producer's name, and refuses it without a quant_algo: so the weights
    are FP8 except for all of them.
    """
    if find_quantization_config(files.config) is not None or files.hf_quant_config is not None:
        raise CheckpointError(
            f"expected weights in BF16 for ModelOpt's format, got {files.folder} with a "
            f"quantization_config; export the checkpoint it was made from"
        )
    return {
        "producer": {"name": "modelopt", "version": f"octavo {__version__}"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["*"],
        },
    }


def make_index(
    files: CheckpointFiles,
    new_names: Mapping[Path, str],
    tensors: Mapping[str, Tensor],
    scales_name: str,
) -> dict[str, Any]:
    """The index of all tensors: the source's, by the new names of their files, and the scales."""
    metadata = dict((files.index or {}).get("metadata") or {})
    metadata["total_size"] = sum(entry.stop - entry.start for entry in files.tensors.values())
    metadata["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    if isinstance(metadata.get("total_parameters"), int):
        metadata["total_parameters"] += sum(tensor.numel() for tensor in tensors.values())
    weight_map = {name: new_names[entry.path] for name, entry in files.tensors.items()}
    weight_map |= dict.fromkeys(tensors, scales_name)
    return {"metadata": metadata, "weight_map": weight_map}


def to_json(document: dict[str, Any]) -> bytes:
    """A file's content, as transformers lays it out."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
