"""A model's files by its name: those of a folder, or of the hub, which are fetched once."""

from pathlib import Path
from typing import Any

import torch

from octavo.brief import brief
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.tensor_files import (
    INDEX_NAME,
    SINGLE_NAME,
    read_headers,
    read_json,
)
from octavo.internals import require

# Where transformers looks for weights, in its order: one file, or the index of several.
_WEIGHTS = (
    (SINGLE_NAME, INDEX_NAME),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def find_file(name: str, file_name: str, **where: Any) -> Path | None:
    """One file of a model, None if there is none; where: options of from_pretrained."""
    if Path(name).is_dir():
        path = Path(name) / where.get("subfolder", "") / file_name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    require("transformers.utils.hub.cached_files._raise_exceptions_for_missing_entries")
    try:
        found = cached_file(name, file_name, **where, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise CheckpointError(f"{file_name}: {brief(str(error))}") from None
    return None if found is None else Path(found)


def find_json(name: str, file_name: str, **where: Any) -> dict[str, Any] | None:
    """The object in a JSON file of a model, None if there is no such file."""
    path = find_file(name, file_name, **where)
    return None if path is None else read_json(path)


def find_weights(name: str) -> list[Path]:
    """The files that transformers takes a model's weights from; none if it finds them otherwise."""
    for single, index in _WEIGHTS:
        if (file := find_file(name, single)) is not None:
            return [file]
        weight_map = (find_json(name, index) or {}).get("weight_map")
        if isinstance(weight_map, dict):
            found = [find_file(name, str(file)) for file in sorted(set(weight_map.values()))]
            return [file for file in found if file is not None]
    return []


def read_dtypes(paths: list[Path]) -> dict[str, str]:
    """The dtype of each tensor in files of weights, without the weights: "BF16", "float8_e5m2"."""
    found: dict[str, str] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            found |= {name: entry.dtype for name, entry in read_headers([path]).items()}
            continue
        tensors = torch.load(path, map_location="meta", weights_only=True)
        found |= {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()}
    return found
