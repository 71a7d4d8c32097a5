"""Pipelines by name: the small image model, a folder, or whatever diffusers can load."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from octavo.brief import brief
from octavo.errors import CheckpointError, UnsupportedError
from octavo.integrations.diffusers.small_image import FOLDER, MARK, load_small_image_model

SMALL_IMAGE = "small-image"


def load_pipeline(
    model: str | None, dtype: torch.dtype = torch.bfloat16, device: str | None = None
) -> Any:
    """A pipeline on a device, without progress bars; None is the small image model.

    device: left out, the GPU if there is one.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UnsupportedError(f"expected a device that is here, cpu or a GPU, got {device!r}")
    if model in (None, SMALL_IMAGE):
        return load_small_image_model(FOLDER, dtype).to(device)
    if (Path(str(model)) / MARK).is_file():
        return load_small_image_model(Path(str(model)), dtype).to(device)
    try:
        pipe = DiffusionPipeline.from_pretrained(model, dtype=dtype)
    except (ImportError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{model}: expected a pipeline of diffusers, got {type(error).__name__}: "
            f"{brief(str(error))}"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)
