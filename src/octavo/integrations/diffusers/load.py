"""Loading pipelines of diffusers, and the small image model, with errors that say what is wrong."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from octavo.brief import brief
from octavo.errors import CheckpointError
from octavo.integrations.diffusers.small_image import MARK, load_small_image_model
from octavo.integrations.transformers.load import choose_device, register_fp8

SMALL_IMAGE = "small-image"
INDEX = "model_index.json"


def load_pipeline(
    model: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
) -> Any:
    """A pipeline on its device: of a folder or a name on the hub, or the small image model.

    model: None and "small-image" are the model that octavo ships. device: the GPU if there is one.
    """
    device = choose_device(device)
    if model is None or model == SMALL_IMAGE:
        return load_small_image_model(dtype=dtype).to(device)
    folder = Path(model)
    if (folder / MARK).is_file():
        return load_small_image_model(folder, dtype).to(device)
    if folder.exists() and not (folder / INDEX).is_file():
        raise CheckpointError(f"{model}: expected a pipeline's folder, got no {INDEX} in it")
    register_fp8()
    try:
        pipe = DiffusionPipeline.from_pretrained(str(model), dtype=dtype)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{model}: expected a pipeline of diffusers, got {type(error).__name__}: "
            f"{brief(str(error))}"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)
