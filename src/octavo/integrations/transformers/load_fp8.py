"""load_fp8: a checkpoint whose linear layers are FP8 already, whoever wrote it, running in FP8."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.checkpoints.kv_scheme import find_quantization_config
from octavo.integrations.checkpoints.linear_scheme import read_linear_scheme
from octavo.integrations.checkpoints.tensor_files import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    read_json,
)
from octavo.integrations.transformers.load import loading

if TYPE_CHECKING:
    from octavo.integrations.transformers.octavo_config import OctavoConfig


# Options of from_pretrained that say where files are.
_WHERE = ("subfolder", "revision", "cache_dir", "local_files_only", "token")


def load_fp8(kind: Any, name: str | os.PathLike[str], **options: Any) -> Any:
    """The model of an FP8 checkpoint with its weights and scales as they are, running in FP8.

    kind: a model's class, or an auto class such as AutoModelForCausalLM. name: a folder, or a name
    on the hub, in the format of compressed-tensors, DeepSeek, Qwen, vLLM, ModelOpt, or octavo.
    options: those of from_pretrained; dtype is the checkpoint's unless given. Scales of a KV cache
    wait for `apply_`. Raises CheckpointError for all that is not understood or not there.
    """
    from transformers import AutoConfig

    name = os.fspath(name)
    if "quantization_config" in options or "config" in options:
        raise ConfigError("expected the checkpoint to say how it is quantized, got a config beside")
    wants_info = options.pop("output_loading_info", False)
    where = {key: options[key] for key in _WHERE if key in options}
    try:
        settings = read_config(name, **where)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    config_class = getattr(kind, "config_class", None) or AutoConfig
    trust = options.pop("trust_remote_code", False)
    with loading(name, "a model's config.json"):
        config = config_class.from_pretrained(name, **where, trust_remote_code=trust)
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if hasattr(part, key):
                delattr(part, key)
    config.quantization_config = settings.to_dict()
    options = {"dtype": "auto", "config": config, **options}
    with loading(name, "weights in FP8"):
        try:
            model, info = kind.from_pretrained(
                name, output_loading_info=True, trust_remote_code=trust, **options
            )
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
    # transformers fills in random numbers and goes on.
    if info["missing_keys"]:
        raise CheckpointError(
            f"{name}: expected all of the model's weights, got none for "
            f"{list_names(sorted(info['missing_keys']))}"
        )
    return (model, info) if wants_info else model


def read_config(name: str, **where: Any) -> "OctavoConfig":
    """What the JSON files of an FP8 checkpoint mean in octavo's words."""
    from octavo.integrations.transformers.quantizer import OctavoConfig

    config = _read_json(name, CONFIG_NAME, where)
    if config is None:
        raise CheckpointError(f"expected a folder or a hub name with {CONFIG_NAME}, got none")
    said = find_quantization_config(config)
    if said is not None and said.get("quant_method") == OctavoConfig.quant_method:
        try:
            return OctavoConfig(**said)
        except (ConfigError, TypeError) as error:
            raise CheckpointError(f"{CONFIG_NAME}: {error}") from None
    hf_quant_config = _read_json(name, HF_QUANT_CONFIG_NAME, where)
    return OctavoConfig(read_linear_scheme(config, hf_quant_config))


def _read_json(name: str, file_name: str, where: dict[str, Any]) -> dict[str, Any] | None:
    if Path(name).is_dir():
        return read_json(Path(name) / where.get("subfolder", "") / file_name)
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(name, file_name, **where, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise CheckpointError(f"{file_name}: {brief(str(error))}") from None
    return None if path is None else read_json(Path(path))
