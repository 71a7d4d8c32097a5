"""Loading pipelines: the small image model, a folder, or a name on the hub."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.checkpoints.linear_layers import FP8, check_plain, infer_linear_scheme
from octavo.integrations.checkpoints.scheme import (
    find_format,
    find_quantization_config,
    read_linear_scheme,
)
from octavo.integrations.checkpoints.tensor_files import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    read_headers,
    read_json,
)
from octavo.integrations.diffusers.quantizer import (
    FOREIGN_METHODS,
    OctavoDiffusersConfig,
    OctavoDiffusersQuantizer,
)
from octavo.integrations.diffusers.single_file import load_single_file
from octavo.integrations.embedded_models import SMALL_IMAGE_MODEL
from octavo.integrations.transformers.load import (
    choose_device,
    loading,
    read_dtypes,
    register_fp8,
)
from octavo.integrations.transformers.text_encoder import load_text_encoder
from octavo.recipe import LinearSettings

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


def _load_fp8_parts(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The components with FP8 weights that neither diffusers nor transformers would load right.

    diffusers reads the quantization_config of a config.json by octavo's quantizer; it does not know
    ModelOpt's own file, nor a component without either. transformers leaves scales behind.
    """
    index = read_json(folder / INDEX) or {}
    found = {}
    for name, value in index.items():
        part = folder / name
        if not isinstance(value, list) or not (part / CONFIG_NAME).is_file():
            continue
        try:
            settings = _stored_settings(part)
            if settings is not None:
                library, kind = value
                found[name] = _load_fp8_part(library, kind, part, settings, dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{part}: {error}") from None
    return found


def _load_fp8_part(
    library: str, kind: str, part: Path, settings: LinearSettings, dtype: torch.dtype
) -> nn.Module:
    if library == "diffusers":
        return _load_folder(getattr(diffusers, kind), part, settings, dtype=dtype)
    if library == "transformers":
        return load_text_encoder(kind, part, settings, dtype)
    raise CheckpointError(f"expected FP8 weights of diffusers or transformers, got {library}'s")


def _stored_settings(part: Path) -> LinearSettings | None:
    """How a component's FP8 weights are quantized, if octavo has to say it.

    None for plain weights, for octavo's own format, and for what the libraries quantize themselves.
    """
    config, hf_quant_config = (read_json(part / n) for n in (CONFIG_NAME, HF_QUANT_CONFIG_NAME))
    said = find_quantization_config(config or {})
    method = str((said or {}).get("quant_method") or "").lower().replace("_", "-")
    is_others = bool(method) and not method.startswith(FOREIGN_METHODS)
    if hf_quant_config is None and said is not None and (is_others or "quant_type" in said):
        return None
    files = sorted(part.glob("*.safetensors"))
    if said is not None or hf_quant_config is not None:
        is_fp8 = find_format(config or {}, hf_quant_config) == "fp8"
        return read_linear_scheme(config or {}, hf_quant_config) if is_fp8 else None
    tensors = read_headers(files)
    if any(entry.dtype == FP8 for entry in tensors.values()):
        return infer_linear_scheme(tensors)
    check_plain(read_dtypes(files))
    return None


def load_fp8_model(kind: Any, name: str, **options: Any) -> nn.Module:
    """A model of diffusers from a folder or one file with FP8 weights; see `octavo.load_fp8`."""
    path = Path(name)
    with loading(name, "weights in FP8"):
        if path.is_file():
            return load_single_file(kind, path, **options)
        part = path / str(options.pop("subfolder", ""))
        settings = _stored_settings(part) if part.is_dir() else None
        if settings is not None:
            return _load_folder(kind, part, settings, **options)
        if not part.is_dir():
            raise ConfigError(f"expected a folder or a file with FP8 weights, got none at {part}")
        model: nn.Module = kind.from_pretrained(part, trust_remote_code=False, **options)
        if not isinstance(getattr(model, "hf_quantizer", None), OctavoDiffusersQuantizer):
            raise CheckpointError(f"{part}: expected weights in FP8, got others")
        return model


def _load_folder(kind: Any, folder: Path, settings: LinearSettings, **options: Any) -> nn.Module:
    """A model of diffusers whose files have FP8 weights, quantized as the settings say."""
    if (read_json(folder / CONFIG_NAME) or {}).get("quantization_config") is None:
        config = OctavoDiffusersConfig(settings)
        config.is_stored = True
        options["quantization_config"] = config
    model: nn.Module = kind.from_pretrained(folder, trust_remote_code=False, **options)
    return model


def _from_pretrained(name: str, dtype: torch.dtype) -> Any:
    register_fp8()  # text encoders are transformers' own
    try:
        with loading(name, "a pipeline of diffusers"):
            if not Path(name).is_dir():
                name = DiffusionPipeline.download(name, trust_remote_code=False)
            parts = _load_fp8_parts(Path(name), dtype)
            pipe = DiffusionPipeline.from_pretrained(
                name, dtype=dtype, trust_remote_code=False, **parts
            )
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
