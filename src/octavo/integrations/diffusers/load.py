"""Loading pipelines: the small image model, a folder, or a name on the hub."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.checkpoints.linear_layers import check_plain
from octavo.integrations.checkpoints.scheme import find_quantization_config
from octavo.integrations.checkpoints.tensor_files import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    read_json,
)
from octavo.integrations.embedded_models import SMALL_IMAGE_MODEL
from octavo.integrations.transformers.load import choose_device, loading, read_dtypes, register_fp8

INDEX = "model_index.json"


def load_pipeline(
    model: str | Path | None = None, dtype: torch.dtype = torch.bfloat16, device: str | None = None
) -> Any:
    """A pipeline on its device, without a progress bar of its own.

    model: a folder or hub name of diffusers, or the folder of a small image model; None or
    "small-image" is the one that comes with octavo (./small-image is a folder). device: left out, a
    GPU if there is one. Components that must be float32 stay so.
    """
    device = choose_device(device)
    name = SMALL_IMAGE_MODEL.name if model is None else str(model)
    if SMALL_IMAGE_MODEL.matches(name):
        pipe = SMALL_IMAGE_MODEL.load(name, dtype)
    else:
        _check_folder(name)
        _check_components(Path(name))
        pipe = _from_pretrained(name, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def _check_folder(name: str) -> None:
    """Raise for what is no pipeline for sure; diffusers would ask the hub about it."""
    path = Path(name)
    if not path.exists():
        looks_like_path = path.is_absolute() or name.startswith(".") or name.count("/") != 1
        if looks_like_path:
            raise ConfigError(
                f"expected {SMALL_IMAGE_MODEL.name}, a pipeline's folder or a hub name such as "
                f"owner/name, got {brief(name)}, which is not there"
            )
        return
    if not path.is_dir():
        raise CheckpointError(f"expected the folder of a pipeline, got the file {name}")
    if not (path / INDEX).is_file():
        found = list_names(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise CheckpointError(
            f"{name}: expected {INDEX}, of a pipeline of diffusers, or {SMALL_IMAGE_MODEL.mark}, "
            f"of a small image model; got {found}"
        )


def _check_components(folder: Path) -> None:
    """Raise for FP8 weights whose scales neither diffusers nor transformers would take."""
    for path in sorted(folder.glob(f"*/{CONFIG_NAME}")):
        part, settings = path.parent, find_quantization_config(read_json(path) or {}) or {}
        is_modelopt = str(settings.get("quant_method", "")).startswith("modelopt")
        if is_modelopt or (part / HF_QUANT_CONFIG_NAME).is_file():
            raise CheckpointError(
                f"{part}: expected plain weights, or such as octavo saves, got ModelOpt's: take "
                "the pipeline in BF16"
            )
        if not settings:
            try:
                check_plain(read_dtypes(sorted(part.glob("*.safetensors"))))
            except CheckpointError as error:
                raise CheckpointError(f"{part}: {error}") from None


def _from_pretrained(name: str, dtype: torch.dtype) -> Any:
    register_fp8()  # text encoders are transformers' own
    try:
        with loading(name, "a pipeline of diffusers"):
            pipe = DiffusionPipeline.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    # A class that diffusers does not have is an AttributeError.
    except (AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{name}: expected a pipeline of diffusers, got {type(error).__name__}: "
            f"{brief(str(error))}"
        ) from error
    for part, module in pipe.components.items():
        weights = module.state_dict() if isinstance(module, nn.Module) else {}
        if missing := [key for key, x in weights.items() if x.is_meta]:
            raise CheckpointError(
                f"{name}: {part}: expected all of its weights, got none for {list_names(missing)}"
            )
    return pipe
