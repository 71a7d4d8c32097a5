"""How a checkpoint stores its weights, and quantizes its linear layers, by its JSON files.

| writer                       | quantization_config in config.json    | what it says          |
| ---------------------------- | ------------------------------------- | --------------------- |
| compressed-tensors           | compressed-tensors, float-quantized   | config_groups         |
| DeepSeek, Qwen, transformers | fp8, weight_block_size                | blocks, dynamic       |
| vLLM, AutoFP8                | fp8, activation_scheme                | one scale per tensor  |
| ModelOpt                     | modelopt, or hf_quant_config.json     | quant_algo            |

Which layers these are is not read here: a weight in FP8 is, any other is not (linear_layers.py).
"""

from collections.abc import Mapping
from typing import Any, Literal

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.checkpoints.kv_scheme import (
    Expected,
    check_fields,
    find_quantization_config,
    method_name,
)
from octavo.integrations.checkpoints.tensor_files import CONFIG_NAME, HF_QUANT_CONFIG_NAME
from octavo.recipe import LinearSettings

Fields = dict[str, Any]

# What has done its work, or has no meaning for e4m3.
_OF_WRITERS: Expected = {
    "scale_dtype": None,
    "zp_dtype": None,
    "observer": None,
    "observer_kwargs": None,
    "actorder": (None, False),
}
_E4M3: Expected = {"num_bits": (8,), "type": ("float",), "symmetric": (True,), **_OF_WRITERS}
_WEIGHTS: Expected = {
    **_E4M3,
    "dynamic": (False,),
    "strategy": ("tensor", "channel", "block"),
    "block_structure": (None, [128, 128], "128x128"),
    "group_size": (None,),
}
_ACTIVATIONS: Expected = {
    **_E4M3,
    "dynamic": (False, True),
    "strategy": ("tensor", "token", "group"),
    "block_structure": (None,),
    "group_size": (None, 128),
}
_REQUIRED = ("num_bits", "type", "strategy")
_GROUP: Expected = {
    "weights": None,
    "input_activations": None,
    "output_activations": (None,),
    "targets": None,
    "format": (None, "float-quantized", "naive-quantized"),
}
_FORMATS = ("float-quantized", "naive-quantized")
_ALGORITHMS: Mapping[str, Fields] = {
    "FP8": {"weight": "tensor", "scaling": "static"},
    "FP8_PER_CHANNEL_PER_TOKEN": {"weight": "channel"},
}
_BLOCKS = [128, 128]
Format = Literal["plain", "fp8", "mxfp4"]


def read_linear_scheme(config: Fields, hf_quant_config: Fields | None = None) -> LinearSettings:
    """What the JSON files of a checkpoint say about its FP8 linear layers.

    Raises CheckpointError for weights that are not in FP8, or not in a way that we can run.
    """
    settings = find_quantization_config(config)
    if settings is None and hf_quant_config is None:
        raise CheckpointError(
            f"expected a checkpoint in FP8, got {CONFIG_NAME} without quantization_config; "
            "from_pretrained(…, quantization_config=OctavoConfig()) quantizes it"
        )
    try:
        if settings is None:
            assert hf_quant_config is not None
            return _from_modelopt(hf_quant_config, HF_QUANT_CONFIG_NAME)
        found = _from_config(settings)
        if hf_quant_config is not None:
            beside = _from_modelopt(hf_quant_config, HF_QUANT_CONFIG_NAME)
            if beside != found:
                raise CheckpointError(
                    f"expected one scheme, got {found} in {CONFIG_NAME} and {beside} in "
                    f"{HF_QUANT_CONFIG_NAME}"
                )
        return found
    except ConfigError as error:
        raise CheckpointError(f"quantization_config: {error}") from None


def _from_config(settings: Fields) -> LinearSettings:
    method = settings.get("quant_method")
    if not isinstance(method, str):
        if "quantization" in settings:  # ModelOpt's file, copied into config.json
            return _from_modelopt(settings, CONFIG_NAME)
        raise CheckpointError(f"{CONFIG_NAME}: expected a quant_method, got {brief(method)}")
    method = method_name(method)
    if method.startswith("modelopt"):
        return _from_modelopt(settings, CONFIG_NAME)
    if method == "compressed-tensors":
        return _from_compressed_tensors(settings)
    if method == "fp8":
        return _from_fp8(settings)
    raise CheckpointError(
        f"{CONFIG_NAME}: expected quant_method compressed-tensors, fp8 or modelopt, got "
        f"{brief(method)}"
    )


def _from_fp8(settings: Fields) -> LinearSettings:
    expected: Expected = {
        "fmt": (None, "e4m3", "float8_e4m3fn"),
        "scale_fmt": (None, "float", "ue8m0"),
        "activation_scheme": ("dynamic", "static"),
        "weight_block_size": (None, _BLOCKS),
    }
    said = {key: settings[key] for key in expected if key in settings}
    fields = check_fields(f"{CONFIG_NAME}: quant_method fp8", said, expected, ())
    is_block = fields.get("weight_block_size") is not None
    said = {
        "weight": "block 128x128" if is_block else "tensor",
        "scaling": fields.get("activation_scheme", "dynamic"),
    }
    return LinearSettings(**said)


def _from_modelopt(settings: Fields, file_name: str) -> LinearSettings:
    """ModelOpt's settings: hf_quant_config.json, or the same flat in config.json."""
    inner = settings.get("quantization", settings)
    algorithm = inner.get("quant_algo") if isinstance(inner, dict) else inner
    fields = _ALGORITHMS.get(str(algorithm).upper())
    if fields is None:
        raise CheckpointError(
            f"{file_name}: expected quant_algo {' or '.join(_ALGORITHMS)}, got {brief(algorithm)}"
        )
    return LinearSettings(**fields)


def _from_compressed_tensors(settings: Fields) -> LinearSettings:
    for key in ("sparsity_config", "transform_config"):
        extra = settings.get(key)
        if extra and (not isinstance(extra, dict) or extra.get("format") != "dense"):
            raise CheckpointError(f"{CONFIG_NAME}: expected no {key}, got {brief(extra)}")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict):
        raise CheckpointError(f"{CONFIG_NAME}: expected config_groups, got {brief(groups)}")
    found: dict[str, LinearSettings] = {}
    for name, group in groups.items():
        # A group without weights quantizes the inputs of attention: the KV cache's business.
        if isinstance(group, dict) and group.get("weights") is not None:
            found[name] = _from_group(f"{CONFIG_NAME}: {name}", group)
    format = settings.get("format")
    if not found or format not in _FORMATS:
        raise CheckpointError(
            f"{CONFIG_NAME}: expected weights in the format {' or '.join(_FORMATS)}, got "
            f"{brief(format)} and {len(found)} groups with weights"
        )
    if len(set(found.values())) > 1:
        schemes = "; ".join(f"{name}: {group}" for name, group in found.items())
        raise CheckpointError(f"{CONFIG_NAME}: expected one scheme for all layers, got {schemes}")
    return next(iter(found.values()))


def _from_group(label: str, group: Fields) -> LinearSettings:
    check_fields(label, group, _GROUP, ())
    weights = check_fields(f"{label}: weights", group["weights"], _WEIGHTS, _REQUIRED)
    strategy = weights["strategy"]
    is_block = strategy == "block"
    if is_block != (weights.get("block_structure") is not None):
        raise CheckpointError(
            f"{label}: expected block_structure [128, 128] with strategy block alone, got "
            f"{brief(weights.get('block_structure'))} with {strategy}"
        )
    found: Fields = {"weight": "block 128x128" if is_block else strategy, "activation": None}
    inputs = group.get("input_activations")
    if inputs is None:
        return LinearSettings(**found)
    inputs = check_fields(f"{label}: input_activations", inputs, _ACTIVATIONS, _REQUIRED)
    strategy, size = inputs["strategy"], inputs.get("group_size")
    if (strategy == "group") != (size is not None):
        raise CheckpointError(
            f"{label}: expected group_size 128 with strategy group alone, got {brief(size)} with "
            f"{strategy}"
        )
    found["scaling"] = "dynamic" if inputs.get("dynamic", False) else "static"
    found["activation"] = "block 1x128" if strategy == "group" else strategy
    return LinearSettings(**found)


def find_format(config: Fields, hf_quant_config: Fields | None = None) -> Format:
    """How weights are stored; CheckpointError for a format that octavo cannot load.

    config, hf_quant_config: the content of the checkpoint's files of these names.
    """
    settings = find_quantization_config(config)
    if settings is None:
        is_plain = hf_quant_config is None or _excludes_all(hf_quant_config)
        return "plain" if is_plain else "fp8"
    method = settings.get("quant_method")
    if not isinstance(method, str):
        return "fp8"  # ModelOpt's file may be copied here; whoever reads it refuses all else
    method = method_name(method)
    if method == "compressed-tensors":
        return "fp8" if _has_weights(settings) else "plain"
    if method.startswith("modelopt"):
        return "plain" if _excludes_all(settings) else "fp8"
    if method in ("fp8", "octavo"):
        return "fp8"
    if method == "mxfp4":
        return "mxfp4"
    raise CheckpointError(
        f"{CONFIG_NAME}: expected plain weights, FP8 (quant_method compressed-tensors, fp8, "
        f"modelopt or octavo) or mxfp4, got {brief(method)}: take the checkpoint in BF16, which "
        "--quantization fp8 quantizes, or load this one with transformers and give octavo.LLM the "
        "loaded model"
    )


def _has_weights(settings: Fields) -> bool:
    """Whether a config of compressed-tensors has a group that quantizes weights."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict):
        return True  # not what we know: the reader of FP8 weights says so
    return any(not isinstance(g, dict) or g.get("weights") is not None for g in groups.values())


def _excludes_all(settings: Fields) -> bool:
    """Whether ModelOpt's settings leave every layer out: scales of the KV cache alone."""
    inner = settings.get("quantization", settings)
    return isinstance(inner, dict) and "*" in (inner.get("exclude_modules") or ())
