"""Attention layers of a decoder as a recipe describes them, and their place in its modules."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.placement import device_of
from octavo.integrations.transformers import text
from octavo.integrations.transformers.kv_scales import find_kv_scales
from octavo.internals import require
from octavo.layers.decoder_attention import DecoderAttention
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import format_named
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.recipe import KvCacheSettings

# Where the layer of a module lies, among its children: moved, copied and saved with it.
CHILD = "octavo_attention"
_GRANULARITIES = {"tensor": PerTensor(), "head": PerHead(), "token": PerToken()}


class CachedAttention(DecoderAttention):
    """The attention of one module.

    implementation: the name of the function that calls it. previous: the one that its config had.
    was_emulated: whether compressed-tensors
    rounded its keys and values on their way to the cache, which would round them twice.
    """

    implementation: str
    previous: str
    was_emulated: bool


def make_layers(
    model: nn.Module,
    settings: KvCacheSettings | None,
    *,
    skip_layers: frozenset[str] = frozenset(),
    scales: ScaleSet | None = None,
    promote_every: int | None = 1,
) -> dict[str, CachedAttention]:
    """The attention of every layer of a decoder, by name; the model stays as it is.

    settings: None stores keys and values as they are, and quantizes nothing. skip_layers: names of
    layers that do so. scales: for static scaling; every layer in FP8 must be among them, by the
    model's name or vLLM's. FP8 on a GPU without it is an error.
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


def install(model: nn.Module, made: dict[str, CachedAttention], implementation: str) -> None:
    """Give the model's modules their layers, and attention by this name."""
    require("transformers.PreTrainedConfig._attn_implementation")
    found: dict[str, Any] = dict(text.find_layers(model))
    for name, layer in made.items():
        attention = found[name]
        layer.implementation = implementation
        layer.previous = attention.config._attn_implementation
        layer.was_emulated = _emulate(attention, False)
        attention.add_module(CHILD, layer.to(device_of(attention)))
    # After the last layer has seen the previous name: they share their config.
    for attention in found.values():
        attention.config._attn_implementation = implementation


def uninstall(model: nn.Module, implementation: str) -> list[str]:
    """Undo `install` of this name; returns the names of the layers that were in FP8."""
    found = {
        name: module
        for name, module in model.named_modules()
        if getattr(getattr(module, CHILD, None), "implementation", None) == implementation
    }
    undone = []
    for name, module in found.items():
        layer: Any = getattr(module, CHILD)
        module.config._attn_implementation = layer.previous
        if layer.was_emulated:
            _emulate(module, True)
        undone += [] if layer.dtype is None else [name]
        delattr(module, CHILD)
    return undone


def _check_config(decoder: Any) -> None:
    if getattr(decoder.config, "num_kv_shared_layers", 0):
        raise UnsupportedError(
            f"{type(decoder).__name__}: expected a cache for every layer, got layers that share one"
        )
    if "chunked_attention" in (getattr(decoder.config, "layer_types", None) or ()):
        raise UnsupportedError(
            f"{type(decoder).__name__}: expected layers that see all keys or a sliding window of "
            "them, got attention in chunks"
        )


def _make_layer(
    name: str,
    module: Any,
    window: int | None,
    settings: KvCacheSettings | None,
    scales: LayerScales | None,
    promote_every: int | None,
) -> CachedAttention:
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
    return CachedAttention(num_heads, num_kv_heads, spec, **options)


def _as_tensors(
    scales: LayerScales, settings: KvCacheSettings, num_kv_heads: int
) -> dict[str, Any]:
    """A layer's scales as keywords of its attention, per head if the settings or they are so."""
    is_per_head = settings.granularity == "head"
    if settings.scaling == "checkpoint":
        is_per_head = is_per_head or isinstance(scales.k, tuple) or isinstance(scales.v, tuple)
    elif not is_per_head:
        scales = scales.per_tensor()
    given: dict[str, Any] = {"granularity": PerHead() if is_per_head else PerTensor()}
    for which, scale in (("key", scales.k), ("value", scales.v)):
        tensor = torch.tensor(scale, dtype=torch.float32)
        # One scale is good for every head.
        given[f"{which}_scale"] = tensor.expand(num_kv_heads) if is_per_head else tensor
    if scales.q is not None:
        given["query_scale"] = torch.tensor(scales.q, dtype=torch.float32)
    return given


def _emulate(module: Any, is_on: bool) -> bool:
    """Let compressed-tensors round a module's keys and values, or not; returns whether it did."""
    if not hasattr(module, "quantization_scheme"):
        return False
    was_on = bool(getattr(module, "quantization_enabled", True))
    module.quantization_enabled = is_on
    return was_on


def check_call(
    layer: CachedAttention,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    given: tuple[float | None, float | None, int | None],
) -> None:
    """Whatever the layer would not do is refused, never dropped."""
    if mask is not None and mask.dim() != 2:
        raise UnsupportedError(
            f"{layer.name}: expected a mask [batch, columns], got one of shape {list(mask.shape)}"
        )
    if dropout:
        raise UnsupportedError(f"{layer.name}: this attention is for inference, got dropout")
    if is_causal is False:
        raise UnsupportedError(f"{layer.name}: expected a causal call, got one that is not")
    expected = (layer.spec.softmax_scale, layer.spec.softcap, layer.spec.window)
    if given != expected:
        raise UnsupportedError(
            f"{layer.name}: expected softmax scale, cap and window {expected}, got {given}"
        )
