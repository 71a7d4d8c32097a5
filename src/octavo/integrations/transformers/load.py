"""Models and the parts beside them, from a folder or the hub; errors say what is missing.

Every command and API loads weights here: as they are stored, and with all their scales.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError, ConfigError, OctavoError, UnsupportedError
from octavo.extras import need
from octavo.integrations.checkpoints.linear_layers import check_plain, find_scales, kv_scale_names
from octavo.integrations.checkpoints.scheme import (
    find_format,
    find_quantization_config,
    read_linear_scheme,
)
from octavo.integrations.checkpoints.tensor_files import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    find_damage,
    read_headers,
    read_json,
)
from octavo.integrations.transformers.gguf_file import find_gguf, load_gguf, pretrained_source
from octavo.internals import require

if TYPE_CHECKING:
    from octavo.integrations.transformers.quantizer import OctavoConfig

IMAGE_PROCESSOR = "an image processor (preprocessor_config.json) beside the model"
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Where transformers looks for weights, in its order: one file, or the index of several.
_WEIGHTS = ((SINGLE_NAME, INDEX_NAME), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
_SETTINGS = ("quantization_config", "compression_config")
# Options of from_pretrained that say where files are.
_WHERE = ("subfolder", "revision", "cache_dir", "local_files_only", "token")


def check_dtype(dtype: str) -> str:
    """The dtype, if a model can be loaded in it: "auto" is the checkpoint's own."""
    if dtype not in DTYPES:
        raise ConfigError(f"expected a dtype, one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def torch_dtype(dtype: str, device: str = "cuda") -> torch.dtype:
    """A dtype by its name; "auto" is the best of a device for weights without one of their own."""
    # On a CPU float32 is both exact and the faster one.
    own = "float32" if device == "cpu" else "bfloat16"
    found: torch.dtype = getattr(torch, own if check_dtype(dtype) == "auto" else dtype)
    return found


def dtype_name(model: nn.Module) -> str:
    """What a model runs in, such as "bfloat16"."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def choose_device(device: str | None) -> str:
    """The device that is asked for, if it is here; else the GPU if there is one, or the CPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UnsupportedError(f"expected a device that is here, cpu or a GPU, got {device!r}")
    return device


def register_fp8() -> None:
    """Let transformers know what octavo saves: it would take FP8 weights for plain ones."""
    import_module("octavo.integrations.transformers.quantizer")


@contextmanager
def loading(name: str | os.PathLike[str], expected: str) -> Iterator[None]:
    """Whatever goes wrong becomes one error with the model's name; damaged files are named."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        place = local_place(os.fspath(name))
        damage = None if place is None else find_damage(place)
        if damage is not None:
            raise CheckpointError(f"{name}: {damage}") from error
        if isinstance(error, ValueError) and "trust_remote_code=True" in str(error):
            raise CheckpointError(
                f"{name}: expected {expected} of a kind that transformers and diffusers know, got "
                "one that needs Python code of its own (auto_map), which octavo does not run"
            ) from error
        if isinstance(error, ImportError | KeyError | OSError | ValueError):
            raise CheckpointError(
                f"{name}: expected {expected}, got {type(error).__name__}: {brief(str(error))}"
            ) from error
        raise


def local_place(name: str) -> Path | None:
    """Where a folder, a file or a model of the hub lies on this machine, if it does."""
    from transformers.utils import cached_file

    if Path(name).exists():
        return Path(name)
    try:
        file = cached_file(name, CONFIG_NAME, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if file is None else Path(file).parent


def load_part(kind: str, name: str, expected: str, **options: Any) -> Any:
    """A config, tokenizer or processor of a model, by the name of its class in transformers."""
    import transformers

    source, where = pretrained_source(name)
    with loading(name, expected):
        return getattr(transformers, kind).from_pretrained(
            source, trust_remote_code=False, **where, **options
        )


def load_config(name: str) -> Any:
    """The config of a model, from a folder, a config.json, a GGUF file or the hub."""
    return load_part("AutoConfig", name, "a model's config.json")


def served_class(config: Any, without_text: str = "AutoModelForCausalLM") -> Any:
    """The auto class that a model is served with, whose layer names scale files have."""
    import transformers

    has_both = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return getattr(transformers, "AutoModelForImageTextToText" if has_both else without_text)


def load_weights(
    name: str, kind: Any, *, dtype: str, device: str, unused: Sequence[str] = ()
) -> nn.Module:
    """The model of an auto class in evaluation mode, all of its weights from the checkpoint.

    An FP8 checkpoint runs in FP8. dtype "auto" is the checkpoint's own; of a GGUF file, float32 on
    a CPU, else bfloat16. unused: modules that checkpoints may lack.
    """
    register_fp8()
    with loading(name, "weights"), _named(name):
        if (file := find_gguf(name)) is not None:
            model, info = load_gguf(kind, file, torch_dtype(dtype, device))
            check_taken(info)
        else:
            model = load_stored(kind, name, unused=unused, dtype=dtype)
    loaded: nn.Module = model.eval().to(device)
    return loaded


@contextmanager
def _named(name: str) -> Iterator[None]:
    """What is wrong with a checkpoint is said with its name."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def load_stored(kind: Any, name: str, *, unused: Collection[str] = (), **options: Any) -> Any:
    """The model of a checkpoint in any format that octavo loads: plain, FP8 or mxfp4.

    unused: modules that checkpoints may lack. options: those of from_pretrained. CheckpointError
    for other formats, missing weights, and scales that the model would not take.
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


def load_fp8(kind: Any, name: str | os.PathLike[str], **options: Any) -> Any:
    """The model of an FP8 checkpoint with its weights and scales as they are, running in FP8.

    kind: a model's class, or an auto class such as AutoModelForCausalLM. name: a folder or a hub
    name, in the format of compressed-tensors, DeepSeek, Qwen, vLLM, ModelOpt or octavo. options:
    those of from_pretrained; dtype is the checkpoint's unless given. Scales of a KV cache wait for
    `apply_`. Raises CheckpointError for all that is not understood or not there.
    """
    need("octavo.load_fp8", "transformers")
    name, wants_info = os.fspath(name), options.pop("output_loading_info", False)
    with loading(name, "weights in FP8"), _named(name):
        model, info = load_with_scales(kind, name, (), options)
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
    return OctavoConfig(read_linear_scheme(config, find_json(name, HF_QUANT_CONFIG_NAME, **where)))


def quantization_method(name: str) -> str | None:
    """How the weights of a checkpoint are quantized, in its own words; None if plain, or GGUF."""
    if find_gguf(name) is not None:
        return None
    config = find_json(name, CONFIG_NAME) or {}
    if find_format(config, find_json(name, HF_QUANT_CONFIG_NAME)) == "plain":
        return None
    settings = find_quantization_config(config) or {}
    return str(settings.get("quant_method", "modelopt"))


def check_taken(
    info: Mapping[str, Any], unused: Collection[str] = (), *, has_kv_scales: bool = True
) -> None:
    """Raise if a model lacks weights, or left scales behind; info: from_pretrained's."""
    # transformers fills in random numbers and goes on.
    missing = [k for k in info["missing_keys"] if not any(u in k.split(".") for u in unused)]
    if missing:
        raise CheckpointError(
            f"expected all of the model's weights, got none for {list_names(sorted(missing))}"
        )
    left = find_scales(info["unexpected_keys"])
    left += [] if has_kv_scales else kv_scale_names(info["unexpected_keys"])
    if left:
        raise CheckpointError(
            "expected weights without scales, as no config says how they are quantized, got "
            f"{list_names(sorted(set(left)))}: add the quantization_config that its writer used "
            "to config.json"
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
