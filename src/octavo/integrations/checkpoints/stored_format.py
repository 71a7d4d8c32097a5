"""What a checkpoint's weights are stored as, by the word of its JSON files.

| format | quantization_config                           | how it is loaded                    |
| ------ | --------------------------------------------- | ----------------------------------- |
| plain  | none, or one that is about the KV cache alone | as it is                            |
| fp8    | compressed-tensors, fp8, modelopt, octavo     | with its scales, running in FP8     |
| mxfp4  | mxfp4 (gpt-oss)                               | dequantized to BF16, which is exact |

Every other format raises: weights must never be loaded without their scales.
"""

from typing import Any, Literal

from octavo.brief import brief
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.kv_scheme import find_quantization_config, method_name
from octavo.integrations.checkpoints.tensor_files import CONFIG_NAME

Format = Literal["plain", "fp8", "mxfp4"]
Fields = dict[str, Any]


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
