"""Folders of the models that come with octavo: weights in bfloat16, and a mark that ends them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.atomic import write_atomically
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.tensor_files import find_damage
from octavo.integrations.embedded_models import StoredModel

FORMAT_VERSION = 1


def write_text(path: Path, text: str) -> None:
    """Write one of a folder's files, in a folder of its own if it says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def write_mark(model: StoredModel, folder: Path) -> None:
    """Write the mark, after all other files: a folder with it is complete."""
    write_text(folder / model.mark, json.dumps({"format_version": FORMAT_VERSION}) + "\n")


def check_folder(model: StoredModel, folder: Path, files: Sequence[str], scripts: str) -> None:
    """Raise CheckpointError unless a folder has all files; scripts: what makes them."""
    if missing := [name for name in (model.mark, *files) if not (folder / name).is_file()]:
        raise CheckpointError(
            f"expected the files of {model.name} in {folder}, got no {', '.join(missing)}: make "
            f"them with {scripts}"
        )
    version = read_json(folder / model.mark).get("format_version")
    if version != FORMAT_VERSION:
        expected = f"expected format_version {FORMAT_VERSION}, got {version!r}"
        raise CheckpointError(f"{folder / model.mark}: {expected}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON, got {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def save_weights(module: nn.Module, path: Path, tied: Sequence[str] = ()) -> int:
    """Write weights in bfloat16, without those that are tied to others; returns their bytes."""
    from safetensors.torch import save

    state = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
        if name not in tied
    }
    content = save(state, metadata={"format": "pt"})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return len(content)


def load_weights(
    module: nn.Module, path: Path, dtype: torch.dtype, tied: Sequence[str] = ()
) -> None:
    """Give a module the weights of a file; CheckpointError if it is damaged or another model's."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        result = module.load_state_dict(state, strict=False, assign=True)
    except (SafetensorError, RuntimeError) as error:
        raise CheckpointError(find_damage(path) or f"{path}: {error}") from None
    if wrong := [*(set(result.missing_keys) - set(tied)), *result.unexpected_keys]:
        raise CheckpointError(f"{path}: missing or unexpected: {', '.join(wrong)}")
