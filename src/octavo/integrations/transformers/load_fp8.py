"""load_fp8: a checkpoint whose linear layers are FP8 already, whoever wrote it, running in FP8."""

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError, ConfigError
from octavo.extras import need
from octavo.integrations.checkpoints.kv_scheme import find_quantization_config
from octavo.integrations.checkpoints.linear_scheme import read_linear_scheme
from octavo.integrations.checkpoints.tensor_files import CONFIG_NAME, HF_QUANT_CONFIG_NAME
from octavo.integrations.transformers.loading_info import check_taken
from octavo.integrations.transformers.model_files import find_json

if TYPE_CHECKING:
    from octavo.integrations.transformers.octavo_config import OctavoConfig


_SETTINGS = ("quantization_config", "compression_config")
# Options of from_pretrained that say where files are.
_WHERE = ("subfolder", "revision", "cache_dir", "local_files_only", "token")


def load_fp8(kind: Any, name: str | os.PathLike[str], **options: Any) -> Any:
    """The model of an FP8 checkpoint with its weights and scales as they are, running in FP8.

    kind: a model's class, or an auto class such as AutoModelForCausalLM. name: a folder, or a name
    on the hub, in the format of compressed-tensors, DeepSeek, Qwen, vLLM, ModelOpt, or octavo.
    options: those of from_pretrained; dtype is the checkpoint's unless given. Scales of a KV cache
    wait for `apply_`. Raises CheckpointError for all that is not understood or not there.
    """
    need("octavo.load_fp8", "transformers")
    from octavo.integrations.transformers.load import loading  # which loads FP8 models from here

    name, wants_info = os.fspath(name), options.pop("output_loading_info", False)
    with loading(name, "weights in FP8"):
        try:
            model, info = load_with_scales(kind, name, (), options)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
    return (model, info) if wants_info else model


def load_with_scales(
    kind: Any, name: str, unused: Collection[str], options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """(model, loading info) of an FP8 checkpoint; unused: modules that it may lack."""
    if "quantization_config" in options or "config" in options:
        raise ConfigError("expected the checkpoint to say how it is quantized, got a config beside")
    options = dict(options)
    where = {key: options[key] for key in _WHERE if key in options}
    trust = options.pop("trust_remote_code", False)
    settings = read_config(name, **where).to_dict()
    config = config_with(kind, name, settings, trust_remote_code=trust, **where)
    options = {"dtype": "auto", **options, "config": config}
    model, info = kind.from_pretrained(
        name, output_loading_info=True, trust_remote_code=trust, **options
    )
    check_taken(info, unused)
    return model, info


def config_with(
    kind: Any,
    name: str,
    settings: Mapping[str, Any] | None,
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """A checkpoint's config with these quantization settings in place of its own."""
    from transformers import AutoConfig

    config_class = getattr(kind, "config_class", None) or AutoConfig
    config = config_class.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    for part in (config, config.get_text_config()):
        for key in _SETTINGS:
            if hasattr(part, key):
                delattr(part, key)
    if settings is not None:
        config.quantization_config = dict(settings)
    return config


def read_config(name: str, **where: Any) -> "OctavoConfig":
    """What the JSON files of an FP8 checkpoint mean in octavo's words."""
    from octavo.integrations.transformers.quantizer import OctavoConfig

    config = find_json(name, CONFIG_NAME, **where)
    if config is None:
        raise CheckpointError(f"expected a folder or a hub name with {CONFIG_NAME}, got none")
    said = find_quantization_config(config)
    if said is not None and said.get("quant_method") == OctavoConfig.quant_method:
        try:
            return OctavoConfig(**said)
        except (ConfigError, TypeError) as error:
            raise CheckpointError(f"{CONFIG_NAME}: {error}") from None
    hf_quant_config = find_json(name, HF_QUANT_CONFIG_NAME, **where)
    return OctavoConfig(read_linear_scheme(config, hf_quant_config))
