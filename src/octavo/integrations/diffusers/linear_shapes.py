"""The sizes of the linear layers of diffusion transformers, from their configs alone."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.errors import CheckpointError
from octavo.integrations.diffusers.defaults import kept_layers
from octavo.integrations.linear import plan_linear

CONFIG, INDEX = "config.json", "model_index.json"


def read_linear_shapes(path: Path) -> list[tuple[int, int]]:
    """Inputs and outputs (K, N) of the layers that FP8 reaches by default, each size once.

    path: a transformer's folder or config.json, or a pipeline's folder, whose transformers count.
    """
    files = [path / CONFIG] if path.is_dir() else [path]
    if (path / INDEX).is_file():
        files = sorted(path.glob(f"transformer*/{CONFIG}"))
    shapes: dict[tuple[int, int], None] = {}
    for file in files:
        model = make_on_meta(file)
        chosen = plan_linear(model, (), kept_layers(model)).chosen
        for name in chosen:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            shapes[layer.in_features, layer.out_features] = None
    if not shapes:
        raise CheckpointError(f"{path}: expected a pipeline with a transformer, got none")
    return list(shapes)


def make_on_meta(file: Path) -> nn.Module:
    """The model of a config, without memory for its weights."""
    import diffusers

    config = _read(file)
    kind: Any = getattr(diffusers, str(config.get("_class_name")), None)
    is_model = isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)
    if not is_model:
        raise CheckpointError(
            f"{file}: expected the _class_name of a model of diffusers, got "
            f"{config.get('_class_name')!r}"
        )
    with torch.device("meta"):
        made: nn.Module = kind.from_config(config)
    return made


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"expected a model's config.json at {file}, got: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected an object, got {type(config).__name__}")
    return config
