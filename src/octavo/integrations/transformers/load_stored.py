"""The one way into a transformers model: its weights as they are stored, with all their scales."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.kv_scheme import find_quantization_config
from octavo.integrations.checkpoints.linear_layers import check_plain
from octavo.integrations.checkpoints.linear_scheme import find_format
from octavo.integrations.checkpoints.tensor_files import CONFIG_NAME, HF_QUANT_CONFIG_NAME
from octavo.integrations.transformers.gguf_file import find_gguf, load_gguf
from octavo.integrations.transformers.load import default_dtype, loading, register_fp8
from octavo.integrations.transformers.load_fp8 import config_with, load_with_scales
from octavo.integrations.transformers.loading_info import check_taken
from octavo.integrations.transformers.model_files import find_json, find_weights, read_dtypes


def load_weights(
    name: str, kind: Any, *, dtype: str, device: str, unused: Sequence[str] = ()
) -> nn.Module:
    """The model of an auto class in evaluation mode, all of its weights from the checkpoint.

    Every command and API loads models here: plain ones, those in FP8, which run in FP8, and GGUF
    files; weights never come without their scales. dtype "auto" is the checkpoint's own; a GGUF
    file has none: float32 on a CPU, else bfloat16. unused: modules that are not needed, which
    checkpoints may lack.
    """
    register_fp8()
    with loading(name, "weights"):
        try:
            if (file := find_gguf(name)) is not None:
                model = load_gguf(kind, file, default_dtype(dtype, device))
            else:
                model = load_stored(kind, name, unused=unused, dtype=dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
    loaded: nn.Module = model.eval().to(device)
    return loaded


def load_stored(kind: Any, name: str, *, unused: Collection[str] = (), **options: Any) -> Any:
    """The model of a checkpoint in any format that octavo loads: plain, FP8 or mxfp4.

    kind: a model's class, or an auto class. unused: modules that checkpoints may lack. options:
    those of from_pretrained. Raises CheckpointError for other formats, weights that are missing,
    and weights in FP8 or scales that the model would not take.
    """
    config = find_json(name, CONFIG_NAME) or {}
    hf_quant_config = find_json(name, HF_QUANT_CONFIG_NAME)
    found = find_format(config, hf_quant_config)
    if found == "fp8":
        return load_with_scales(kind, name, unused, options)[0]
    if found == "plain":
        check_plain(read_dtypes(find_weights(name)))
    settings = find_quantization_config(config)
    if settings is not None:
        changed = None if found == "plain" else {**settings, "dequantize": True}
        options["config"] = config_with(kind, name, changed)
    model, info = kind.from_pretrained(
        name, output_loading_info=True, trust_remote_code=False, **options
    )
    # A config that is about the KV cache announces scales, which `apply_` reads from the files.
    has_announcement = settings is not None or hf_quant_config is not None
    check_taken(info, unused, has_kv_scales=has_announcement)
    return model


def quantization_method(name: str) -> str | None:
    """How the weights of a folder or hub name are quantized, in its own words; None if plain.

    Raises CheckpointError for a checkpoint that `load_stored` refuses. The weights of a GGUF file
    are plain once they are loaded.
    """
    if find_gguf(name) is not None:
        return None
    config = find_json(name, CONFIG_NAME) or {}
    if find_format(config, find_json(name, HF_QUANT_CONFIG_NAME)) == "plain":
        return None
    settings = find_quantization_config(config) or {}
    return str(settings.get("quant_method", "modelopt"))
