"""How a checkpoint quantizes its weights and its KV cache, by its JSON files.

| writer                       | quantization_config in config.json    | weights               |
| ---------------------------- | ------------------------------------- | --------------------- |
| compressed-tensors           | compressed-tensors, float-quantized   | config_groups         |
| DeepSeek, Qwen, transformers | fp8, weight_block_size                | blocks, dynamic       |
| vLLM, AutoFP8                | fp8, activation_scheme                | one scale per tensor  |
| ModelOpt                     | modelopt, or hf_quant_config.json     | quant_algo            |

Which layers these are is not read here: a weight in FP8 is, any other is not (linear_layers.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.checkpoints.tensor_files import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    CheckpointFiles,
)
from octavo.recipe import LinearSettings

Fields = dict[str, Any]
# Key -> the values that are understood; None where any value means the same to us.
Expected = Mapping[str, Sequence[Any] | None]
Format = Literal["plain", "fp8", "mxfp4"]
Strategy = Literal["tensor", "attn_head"]

_BLOCKS = [128, 128]
_E4M3: Expected = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    # What has done its work, or has no meaning for e4m3.
    "scale_dtype": None,
    "zp_dtype": None,
    "observer": None,
    "observer_kwargs": None,
    "actorder": (None, False),
    # Each of the three below replaces what it has otherwise.
    "dynamic": (False,),
    "block_structure": (None,),
    "group_size": (None,),
}
_WEIGHTS: Expected = {
    **_E4M3,
    "strategy": ("tensor", "channel", "block"),
    "block_structure": (None, _BLOCKS, "128x128"),
}
_ACTIVATIONS: Expected = {
    **_E4M3,
    "dynamic": (False, True),
    "strategy": ("tensor", "token", "group"),
    "group_size": (None, 128),
}
_KV_CACHE: Expected = {**_E4M3, "strategy": ("tensor", "attn_head")}
_FORMATS = ("float-quantized", "naive-quantized")
_GROUP: Expected = {
    "weights": None,
    "input_activations": None,
    "output_activations": (None,),
    "targets": None,
    "format": (None, *_FORMATS),
}
_FP8: Expected = {
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float", "ue8m0"),
    "activation_scheme": ("dynamic", "static"),
    "weight_block_size": (None, _BLOCKS),
}
_ALGORITHMS: Mapping[str, Fields] = {
    "FP8": {"weight": "tensor", "scaling": "static"},
    "FP8_PER_CHANNEL_PER_TOKEN": {"weight": "channel"},
}


class _Source(NamedTuple):
    """What one file says: who quantized, and the settings; ModelOpt's without a section around."""

    method: str
    fields: Fields
    file: str

    @property
    def is_modelopt(self) -> bool:
        return self.method.startswith("modelopt")


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


def find_quantization_config(config: Mapping[str, Any]) -> Fields | None:
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


def read_announcement(files: CheckpointFiles) -> Announcement:
    """What the JSON files say about the KV cache; CheckpointError for what has no meaning."""
    said = _read(files.config, files.hf_quant_config)
    found = [_announcement(one) for one in said]  # whatever each says must have a meaning
    if len(said) > 1 and not said[0].is_modelopt:
        raise CheckpointError(
            f"expected {HF_QUANT_CONFIG_NAME} only beside quant_method modelopt, got "
            f"{brief(said[0].method)} in {CONFIG_NAME}"
        )
    return next((one for one in found if one.is_announced), (found or [Announcement()])[-1])


def read_linear_scheme(config: Fields, hf_quant_config: Fields | None = None) -> LinearSettings:
    """What the JSON files of a checkpoint say about its FP8 linear layers.

    Raises CheckpointError for weights that are not in FP8, or not in a way that we can run.
    """
    said = _read(config, hf_quant_config)
    if not said:
        raise CheckpointError(
            f"expected a checkpoint in FP8, got {CONFIG_NAME} without quantization_config; "
            "from_pretrained(…, quantization_config=OctavoConfig()) quantizes it"
        )
    try:
        found = [LinearSettings(**_linear_fields(one)) for one in said]
    except ConfigError as error:
        raise CheckpointError(f"quantization_config: {error}") from None
    _check_one({one.file: settings for one, settings in zip(said, found, strict=True)})
    return found[0]


def find_format(config: Fields, hf_quant_config: Fields | None = None) -> Format:
    """How weights are stored; CheckpointError for a format that octavo cannot load.

    config, hf_quant_config: the content of the checkpoint's files of these names.
    """
    said = _read(config, hf_quant_config)
    if not said:
        return "plain"
    found = said[0]
    if found.is_modelopt:  # it may leave every layer out: scales of the KV cache alone
        return "plain" if "*" in (found.fields.get("exclude_modules") or ()) else "fp8"
    match found.method:
        case "compressed-tensors":
            groups = found.fields.get("config_groups")
            if not isinstance(groups, dict):
                return "fp8"  # not what we know: the reader of FP8 weights says so
            return "fp8" if any(map(_may_have_weights, groups.values())) else "plain"
        case "fp8" | "octavo":
            return "fp8"
        case "mxfp4":
            return "mxfp4"
    raise CheckpointError(
        f"{CONFIG_NAME}: expected plain weights, FP8 (quant_method compressed-tensors, fp8, "
        f"modelopt or octavo) or mxfp4, got {brief(found.method)}: take the checkpoint in BF16, "
        "which --quantization fp8 quantizes, or load this one with transformers and give "
        "octavo.LLM the loaded model"
    )


def _read(config: Fields, hf_quant_config: Fields | None) -> list[_Source]:
    """What config.json says, then what ModelOpt's own file says."""
    said = {CONFIG_NAME: find_quantization_config(config), HF_QUANT_CONFIG_NAME: None}
    if hf_quant_config is not None:
        said[HF_QUANT_CONFIG_NAME] = {**hf_quant_config, "quant_method": "modelopt"}
    return [_source(settings, file) for file, settings in said.items() if settings is not None]


def _source(settings: Fields, file: str) -> _Source:
    method = settings.get("quant_method")
    if method is None and "quantization" in settings:  # a copy of ModelOpt's file, in config.json
        method = "modelopt"
    if not isinstance(method, str):
        raise CheckpointError(f"{file}: expected a quant_method, got {brief(method)}")
    # Some files have capitals, or compressed_tensors.
    method = method.lower().replace("compressed_tensors", "compressed-tensors")
    inner = settings.get("quantization", {}) if method.startswith("modelopt") else {}
    if not isinstance(inner, dict):
        raise CheckpointError(f"{file}: expected quantization to be an object, got {brief(inner)}")
    return _Source(method, {**settings, **inner}, file)


def _check_fields(
    label: str, scheme: object, expected: Expected, required: Sequence[str] = ()
) -> Fields:
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


def _announcement(said: _Source) -> Announcement:
    scheme, algo = said.fields.get("kv_cache_scheme"), said.fields.get("kv_cache_quant_algo")
    if algo and not said.is_modelopt:
        raise CheckpointError(
            f"{said.file}: expected kv_cache_quant_algo only of quant_method modelopt, got "
            f"{brief(algo)} of {said.method}"
        )
    if str(algo).upper() not in ("FP8", "NONE"):
        raise CheckpointError(f"{said.file}: expected kv_cache_quant_algo FP8, got {brief(algo)}")
    if said.method == "fp8" and isinstance(scheme, str):  # AutoFP8 has one word
        if scheme != "static":
            raise CheckpointError(
                f"{said.file}: expected kv_cache_scheme 'static', got {brief(scheme)}"
            )
        return Announcement(method=said.method, is_announced=True, strategy="tensor")
    if scheme is not None:
        scheme = _check_fields("kv_cache_scheme", scheme, _KV_CACHE, ("num_bits", "type"))
    groups = said.fields.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    outputs = [group.get("output_activations") for group in groups]
    return Announcement(
        method=said.method,
        is_announced=scheme is not None or str(algo).upper() == "FP8",
        strategy=None if scheme is None else scheme.get("strategy"),
        has_output_scales=any(outputs) and not said.is_modelopt,
    )


def _linear_fields(said: _Source) -> Fields:
    """The fields of LinearSettings that a file describes."""
    if said.is_modelopt:
        algorithm = said.fields.get("quant_algo")
        if (found := _ALGORITHMS.get(str(algorithm).upper())) is not None:
            return found
        choices = " or ".join(_ALGORITHMS)
        raise CheckpointError(f"{said.file}: expected quant_algo {choices}, got {brief(algorithm)}")
    match said.method:
        case "compressed-tensors":
            return _read_groups(said.fields)
        case "fp8":
            own = {key: said.fields[key] for key in _FP8 if key in said.fields}
            fields = _check_fields(f"{CONFIG_NAME}: quant_method fp8", own, _FP8)
            is_block = fields.get("weight_block_size") is not None
            return {
                "weight": "block 128x128" if is_block else "tensor",
                "scaling": fields.get("activation_scheme", "dynamic"),
            }
    raise CheckpointError(
        f"{CONFIG_NAME}: expected quant_method compressed-tensors, fp8 or modelopt, got "
        f"{brief(said.method)}"
    )


def _may_have_weights(group: object) -> bool:
    """Whether a group is of weights; one without quantizes the inputs of attention."""
    return not isinstance(group, dict) or group.get("weights") is not None


def _check_one(schemes: Mapping[str, object]) -> None:
    """Raise CheckpointError for schemes, by who says them, that differ."""
    if any(scheme != next(iter(schemes.values())) for scheme in schemes.values()):
        told = "; ".join(f"{name}: {scheme}" for name, scheme in schemes.items())
        raise CheckpointError(f"expected one scheme for all layers, got {told}")


def _read_groups(settings: Fields) -> Fields:
    """The scheme of compressed-tensors' config_groups, which all must have."""
    for key in ("sparsity_config", "transform_config"):
        extra = settings.get(key)
        if extra and (not isinstance(extra, dict) or extra.get("format") != "dense"):
            raise CheckpointError(f"{CONFIG_NAME}: expected no {key}, got {brief(extra)}")
    groups, format = settings.get("config_groups"), settings.get("format")
    if not isinstance(groups, dict):
        raise CheckpointError(f"{CONFIG_NAME}: expected config_groups, got {brief(groups)}")
    found = {
        name: _read_group(f"{CONFIG_NAME}: {name}", group)
        for name, group in groups.items()
        if isinstance(group, dict) and _may_have_weights(group)
    }
    if not found or format not in _FORMATS:
        raise CheckpointError(
            f"{CONFIG_NAME}: expected weights in the format {' or '.join(_FORMATS)}, got "
            f"{brief(format)} and {len(found)} groups with weights"
        )
    _check_one(found)
    return next(iter(found.values()))


def _read_group(label: str, group: Fields) -> Fields:
    _check_fields(label, group, _GROUP)
    required = ("num_bits", "type", "strategy")
    weights = _check_fields(f"{label}: weights", group["weights"], _WEIGHTS, required)
    strategy, blocks = weights["strategy"], weights.get("block_structure")
    if (strategy == "block") != (blocks is not None):
        raise CheckpointError(
            f"{label}: expected block_structure [128, 128] with strategy block alone, got "
            f"{brief(blocks)} with {strategy}"
        )
    weight = "block 128x128" if strategy == "block" else strategy
    if (inputs := group.get("input_activations")) is None:
        return {"weight": weight, "activation": None}
    inputs = _check_fields(f"{label}: input_activations", inputs, _ACTIVATIONS, required)
    strategy, size = inputs["strategy"], inputs.get("group_size")
    if (strategy == "group") != (size is not None):
        raise CheckpointError(
            f"{label}: expected group_size 128 with strategy group alone, got {brief(size)} with "
            f"{strategy}"
        )
    return {
        "weight": weight,
        "activation": "block 1x128" if strategy == "group" else strategy,
        "scaling": "dynamic" if inputs.get("dynamic", False) else "static",
    }
