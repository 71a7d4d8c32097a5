"""What a checkpoint's JSON files announce about the scales of its KV cache."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.tensor_files import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    CheckpointFiles,
)

# Key -> the values that are understood; None where any value means the same to us.
Expected = Mapping[str, Sequence[Any] | None]


def check_fields(
    label: str, scheme: object, expected: Expected, required: Sequence[str]
) -> dict[str, Any]:
    """The scheme, if all its keys and values are among the expected; CheckpointError otherwise."""
    if not isinstance(scheme, dict):
        raise CheckpointError(f"expected {label} to be an object, got {brief(scheme)}")
    if unknown := [key for key in scheme if key not in expected]:
        raise CheckpointError(f"{label} has settings we do not know: {list_names(unknown)}")
    for key, values in expected.items():
        if values is None or (key not in scheme and key not in required):
            continue
        # True is 1 and False is 0 to Python, not to a file.
        said = (scheme.get(key), type(scheme.get(key)))
        if said not in [(value, type(value)) for value in values]:
            choices = " or ".join(map(repr, values))
            raise CheckpointError(
                f"{label}: expected {key} {choices}, got {brief(scheme.get(key))}"
            )
    return scheme


Strategy = Literal["tensor", "attn_head"]

# Settings of a kv_cache_scheme: what they must be. Observers have done their work.
_EXPECTED: Expected = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", "attn_head"),
    "dynamic": (False,),
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None, False),
    "scale_dtype": None,
    "zp_dtype": None,
    "observer": None,
    "observer_kwargs": None,
}
_REQUIRED = ("num_bits", "type")


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """How the KV cache is quantized by a checkpoint's own word.

    method: quant_method, None if nothing is quantized. is_announced: whether it says that there
    are scales. strategy: None where the shape of the scales tells it. has_output_scales: whether
    outputs of projections have scales of their own.
    """

    method: str | None = None
    is_announced: bool = False
    strategy: Strategy | None = None
    has_output_scales: bool = False

    @property
    def needs_scheme(self) -> bool:
        """Whether scales that are not announced cannot be understood."""
        return not (self.method or "").startswith("modelopt") and self.method != "fp8"


def read_announcement(files: CheckpointFiles) -> Announcement:
    """What config.json and hf_quant_config.json say; CheckpointError for what has no meaning."""
    settings = find_quantization_config(files.config)
    found = _from_config(settings) if settings is not None else Announcement()
    if files.hf_quant_config is None:
        return found
    by_modelopt = _from_modelopt(files.hf_quant_config, HF_QUANT_CONFIG_NAME)
    if settings is None:
        return by_modelopt
    if not (found.method or "").startswith("modelopt"):
        raise CheckpointError(
            f"expected {HF_QUANT_CONFIG_NAME} only beside quant_method modelopt, got "
            f"{brief(found.method)} in {CONFIG_NAME}"
        )
    return found if found.is_announced else by_modelopt


def find_quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a config.json, wherever it stands; None if there is none."""
    text_config = config.get("text_config")
    places = [config.get("quantization_config"), config.get("compression_config")]
    places += [text_config.get("quantization_config")] if isinstance(text_config, dict) else []
    found = [settings for settings in places if settings is not None]
    for settings in found:
        if not isinstance(settings, dict):
            raise CheckpointError(
                f"{CONFIG_NAME}: expected quantization_config to be an object, "
                f"got {brief(settings)}"
            )
        if settings != found[0]:
            raise CheckpointError(f"{CONFIG_NAME}: expected one quantization_config, got two")
    return found[0] if found else None


def method_name(method: str) -> str:
    """A quant_method as we write it: some files have capitals, or compressed_tensors."""
    return method.lower().replace("compressed_tensors", "compressed-tensors")


def check_no_fnuz(files: CheckpointFiles) -> None:
    """Raise CheckpointError if the checkpoint is for e4m3fnuz, whose scales mean something else."""
    said = [find_quantization_config(files.config), files.hf_quant_config]
    dtypes = {entry.dtype for entry in files.tensors.values()}
    if "fnuz" in json.dumps([*said, *sorted(dtypes)]).lower():
        raise CheckpointError("expected scales for e4m3 (fn), got a checkpoint for fnuz formats")


def _from_config(settings: dict[str, Any]) -> Announcement:
    method = settings.get("quant_method")
    if not isinstance(method, str):
        if "quantization" in settings:  # ModelOpt's file, copied into config.json
            return _from_modelopt(settings, CONFIG_NAME)
        raise CheckpointError(f"{CONFIG_NAME}: expected a quant_method, got {brief(method)}")
    method = method_name(method)
    if method.startswith("modelopt"):
        return _from_modelopt({**settings, "quant_method": method}, CONFIG_NAME)
    scheme = settings.get("kv_cache_scheme")
    groups = settings.get("config_groups") or {}
    has_output_scales = isinstance(groups, dict) and any(
        isinstance(group, dict) and group.get("output_activations") for group in groups.values()
    )
    if method == "fp8" and isinstance(scheme, str):  # AutoFP8 has one word
        if scheme != "static":
            raise CheckpointError(
                f"{CONFIG_NAME}: expected kv_cache_scheme 'static', got {brief(scheme)}"
            )
        return Announcement(method=method, is_announced=True, strategy="tensor")
    if algo := settings.get("kv_cache_quant_algo"):
        raise CheckpointError(
            f"{CONFIG_NAME}: expected kv_cache_quant_algo only of quant_method modelopt, got "
            f"{brief(algo)} of {method}"
        )
    return Announcement(
        method=method,
        is_announced=scheme is not None,
        strategy=_check_scheme(scheme) if scheme is not None else None,
        has_output_scales=has_output_scales,
    )


def _from_modelopt(settings: dict[str, Any], file_name: str) -> Announcement:
    """ModelOpt's settings: hf_quant_config.json, or the same flat in config.json."""
    inner = settings.get("quantization", settings)
    if not isinstance(inner, dict):
        raise CheckpointError(f"{file_name}: expected quantization to be an object")
    method = str(settings.get("quant_method", "modelopt"))
    algo = inner.get("kv_cache_quant_algo", settings.get("kv_cache_quant_algo"))
    if algo is not None and str(algo).upper() not in ("FP8", "NONE"):
        raise CheckpointError(f"{file_name}: expected kv_cache_quant_algo FP8, got {brief(algo)}")
    scheme = inner.get("kv_cache_scheme", settings.get("kv_cache_scheme"))
    strategy = _check_scheme(scheme) if scheme is not None else None
    is_announced = scheme is not None or str(algo).upper() == "FP8"
    return Announcement(method=method, is_announced=is_announced, strategy=strategy)


def _check_scheme(scheme: object) -> Strategy | None:
    """The strategy of a kv_cache_scheme that means static scales for e4m3."""
    fields = check_fields("kv_cache_scheme", scheme, _EXPECTED, _REQUIRED)
    strategy: Strategy | None = fields.get("strategy")
    return strategy
