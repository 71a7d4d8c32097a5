"""Attention layers of a decoder as a recipe describes them, with scales of a file or checkpoint."""

import re
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.attention_layers import device_of
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo.integrations.checkpoints.linear_layers import kv_scale_names
from octavo.integrations.patch import begin_patch
from octavo.integrations.transformers import text
from octavo.integrations.transformers.fused_forward import Forward
from octavo.integrations.transformers.load import find_weights, local_place, read_dtypes
from octavo.internals import require
from octavo.layers.decoder_attention import DecoderAttention
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import format_named
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.recipe import KvCacheSettings

# Where the layer of a module lies, among its children: moved, copied and saved with it.
CHILD = "octavo_attention"
_GRANULARITIES = {"tensor": PerTensor(), "head": PerHead(), "token": PerToken()}


def make_layers(
    model: nn.Module,
    settings: KvCacheSettings | None,
    *,
    skip_layers: frozenset[str] = frozenset(),
    scales: ScaleSet | None = None,
    promote_every: int | None = 1,
) -> dict[str, DecoderAttention]:
    """The attention of every layer of a decoder, by name; the model stays as it is.

    settings: None quantizes nothing, and so are layers named in skip_layers. scales: for static
    scaling, of every layer in FP8. FP8 on a GPU without it is an error.
    """
    found, windows = text.find_layers(model), text.find_windows(model)
    _, decoder = text.find_decoder(model)
    if any(hasattr(module, CHILD) for module in found.values()):
        raise ConfigError(
            "apply_ or an engine has changed the model's KV cache: restore_ it first, or close the "
            "engine"
        )
    _check_config(decoder)
    chosen = [name for name in found if settings and name not in skip_layers]
    if settings and not chosen:
        raise ConfigError(f"skip_layers leaves none of the {len(found)} layers: leave kv_cache out")
    if settings and settings.center_keys:
        for name, reason in text.find_uncentered(model).items():
            if name in chosen:
                raise UnsupportedError(f"{name}: {reason}")
    given = find_kv_scales(model, chosen, settings, scales)
    scaling = None if settings is None else settings.scaling
    is_unit = scaling in ("checkpoint", "unit") and not given
    if is_unit and scaling == "checkpoint":
        warnings.warn(
            "the model brings no scales of keys and values: 1.0 is taken, as vLLM does, and values "
            "beyond its range are counted. Calibrate: octavo calibrate MODEL --kv --data TEXT",
            stacklevel=5,
        )
    made = {}
    for name, module in found.items():
        own = settings if name in chosen else None
        made[name] = _make_layer(name, module, windows[name], own, given.get(name), promote_every)
        made[name].counts_saturation = is_unit and own is not None
        made[name].check_device(device_of(module))
    return made


def install(
    model: nn.Module,
    made: dict[str, DecoderAttention],
    implementation: str,
    feature: str,
    forwards: Mapping[str, Forward] = MappingProxyType({}),
) -> None:
    """Give the model's modules their layers, and attention by this name; patches of `feature`.

    forwards: functions of a module that replace its own forward, by the module's name.
    """
    require("transformers.PreTrainedConfig._attn_implementation")
    found: dict[str, Any] = dict(text.find_layers(model))
    for name, layer in made.items():
        attention = found[name]
        patch = begin_patch(attention, feature, is_listed=layer.dtype is not None)
        patch.set(attention, CHILD, layer.to(device_of(attention)))
        patch.set(attention.config, "_attn_implementation", implementation)
        if (forward := forwards.get(name)) is not None:
            # A partial, not a method: those lose themselves when a module is pickled.
            patch.set(attention, "forward", partial(forward, attention))
        if hasattr(attention, "quantization_scheme"):
            # compressed-tensors would round keys and values on their way to the cache, too.
            patch.set(attention, "quantization_enabled", False)


def _check_config(decoder: Any) -> None:
    if getattr(decoder.config, "num_kv_shared_layers", 0):
        raise UnsupportedError(
            f"{type(decoder).__name__}: expected a cache for every layer, got layers that share one"
        )
    if "chunked_attention" in (getattr(decoder.config, "layer_types", None) or ()):
        raise UnsupportedError(
            f"{type(decoder).__name__}: expected full or sliding attention, got it in chunks"
        )


def _make_layer(
    name: str,
    module: Any,
    window: int | None,
    settings: KvCacheSettings | None,
    scales: LayerScales | None,
    promote_every: int | None,
) -> DecoderAttention:
    num_kv_heads = module.config.num_key_value_heads
    spec = AttentionSpec(
        causal=True,
        window=window,
        softcap=getattr(module, "attn_logit_softcapping", None),
        softmax_scale=module.scaling,
        promote_every=promote_every if settings is not None else 1,
    )
    options: dict[str, Any] = {"name": name, "dtype": None}
    num_heads = module.num_key_value_groups * num_kv_heads
    if settings is not None:
        options["dtype"] = format_named(settings.format).dtype
        options["granularity"] = _GRANULARITIES[settings.granularity]
        options |= {"rotates_keys": settings.rotate_keys, "head_dim": module.head_dim}
        if scales is not None and settings.scaling != "dynamic":
            options |= _as_tensors(scales, settings, num_kv_heads)
        if scales is not None and settings.center_keys:
            options["key_mean"] = torch.tensor(scales.k_mean, dtype=torch.float32)
    return DecoderAttention(num_heads, num_kv_heads, spec, **options)


def _as_tensors(
    scales: LayerScales, settings: KvCacheSettings, num_kv_heads: int
) -> dict[str, Any]:
    """A layer's scales as keywords of its attention, per head if the settings or they are so."""
    is_per_head = settings.granularity == "head"
    if settings.scaling == "checkpoint":
        is_per_head |= isinstance(scales.k, tuple) or isinstance(scales.v, tuple)
    elif not is_per_head:
        scales = scales.per_tensor()
    k, v = (torch.tensor(scale, dtype=torch.float32) for scale in (scales.k, scales.v))
    given: dict[str, Any] = {"granularity": PerTensor(), "key_scale": k, "value_scale": v}
    if is_per_head:  # one scale is good for every head
        k, v = k.expand(num_kv_heads), v.expand(num_kv_heads)
        given = {"granularity": PerHead(), "key_scale": k, "value_scale": v}
    if scales.q is not None:
        given["query_scale"] = torch.tensor(scales.q, dtype=torch.float32)
    return given


def check_call(module: Any, mask: Tensor | None, call: dict[str, Any]) -> DecoderAttention:
    """The layer of a module, unless it would not do what a call's keywords ask for."""
    layer = getattr(module, CHILD, None)
    if not isinstance(layer, DecoderAttention):
        raise UnsupportedError(f"{type(module).__name__}: expected a layer that apply_ reached")
    if mask is not None and mask.dim() != 2:
        raise UnsupportedError(
            f"{layer.name}: expected a mask [batch, columns], got one of shape {list(mask.shape)}"
        )
    if call.get("dropout"):
        raise UnsupportedError(f"{layer.name}: this attention is for inference, got dropout")
    if call.get("is_causal") is False:
        raise UnsupportedError(f"{layer.name}: expected a causal call, got one that is not")
    spec = layer.spec
    given = (call.get("scaling"), call.get("softcap"), call.get("sliding_window"))
    expected = (spec.softmax_scale, spec.softcap, spec.window)
    if given != expected:
        raise UnsupportedError(
            f"{layer.name}: expected softmax scale, cap and window {expected}, got {given}"
        )
    return layer


def find_kv_scales(
    model: nn.Module, names: list[str], settings: KvCacheSettings | None, scales: ScaleSet | None
) -> dict[str, LayerScales]:
    """The scales that the settings ask for, by layer; none if they are 1.0 or dynamic.

    Layers with dynamic scales are there for their k_mean, if keys are centered.
    """
    if settings is None:
        return {}
    if settings.scaling == "static" or settings.center_keys:
        if scales is None:
            raise ConfigError(
                "expected scales for scaling 'static' or center_keys, got none: Recipe(scales=…)"
            )
        found = kv_scales(scales, names)
        check_keys(settings, scales.header.rotate_keys, found)
        return found
    if settings.scaling in ("unit", "dynamic"):
        return {}
    folder = _folder(model)
    brought = None if folder is None else read_kv_scales(folder, list(text.find_layers(model)))
    if brought is not None and settings.rotate_keys:
        raise ConfigError(
            "rotate_keys: expected a model without scales of keys, got a checkpoint with some, "
            "which are for keys as they are: calibrate with octavo calibrate --kv --rotate-keys, "
            "and set scaling='static'"
        )
    return {} if brought is None else kv_scales(brought, names)


def brings_kv_scales(model: nn.Module) -> bool:
    """Whether the checkpoint that a model came from has scales for an FP8 cache."""
    folder = _folder(model)
    return folder is not None and bool(kv_scale_names(read_dtypes(find_weights(str(folder)))))


def check_keys(
    settings: KvCacheSettings, is_rotated: bool, layers: Mapping[str, LayerScales]
) -> None:
    """Raise ConfigError unless scales were found on keys such as the settings store.

    Means are taken before keys are rotated, so dynamic scales need no more than the means.
    """
    problems = []
    if settings.scaling == "static" and settings.rotate_keys != is_rotated:
        problems.append(_difference("rotate_keys", "rotated", settings.rotate_keys))
    asked = settings.center_keys
    other = next((n for n, one in layers.items() if (one.k_mean is not None) != asked), None)
    if other is not None:
        problems.append(f"{other}: {_difference('center_keys', 'centered', asked)}")
    if problems:
        raise ConfigError("; ".join(problems))


def _difference(setting: str, done: str, is_asked: bool) -> str:
    option = f"--{setting.replace('_', '-')}"
    if is_asked:
        return (
            f"{setting} is set: expected a scale file of {done} keys, got one of others: "
            f"octavo calibrate --kv {option} makes one"
        )
    return (
        f"{setting} is not set: expected a scale file of other keys, got one of {done} keys: "
        f"set {setting}, or calibrate without {option}"
    )


def _folder(model: Any) -> Path | None:
    """Where the model's checkpoint lies on this machine, if it came from one."""
    name = model.config.name_or_path
    place = local_place(name) if name else None
    return place if place is not None and place.is_dir() else None  # a GGUF file has no scales


def kv_scales(scales: ScaleSet, names: Iterable[str]) -> dict[str, LayerScales]:
    """The scales of these layers of the model, by its names; files may have vLLM's."""
    scales.require_kind("kv_cache")
    found = {name: _name_in(scales, name) for name in names}
    scales.require(found.values())
    return {name: scales.layers[other] for name, other in found.items()}


def vllm_name(name: str) -> str:
    """What vLLM calls a decoder's attention layer: a module inside, and text models elsewhere."""
    return re.sub(r"^model\.language_model\.", "language_model.model.", name) + ".attn"


def _name_in(scales: ScaleSet, name: str) -> str:
    names = (name, f"{name}.attn", vllm_name(name))
    return next((other for other in names if other in scales.layers), name)
