"""KV caches of transformers models in FP8.

How plain `generate()` comes to use our cache: `give_pages`, a forward pre-hook of the module that
runs the decoder's layers. Whatever cache a call brings, or would have made itself, gets layers of
`paged_cache` in place of its own before the first token is stored. Attention is then ours as well:
a function that transformers looks up by the name in the model's config.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo import ops
from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers import text
from octavo.integrations.transformers.kv_scales import find_kv_scales
from octavo.integrations.transformers.saturation import Watch
from octavo.layers.decoder_attention import DecoderAttention
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import format_named
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.recipe import KvCacheSettings

IMPLEMENTATION = "octavo"
# Where the layer of a module lies, among its children: moved, copied and saved with it.
CHILD = "octavo_attention"
PASS = "octavo_pass"  # the keyword by which attention gets what the layers of a pass share
HOOK = "octavo_kv_cache"
_GRANULARITIES = {"tensor": PerTensor(), "head": PerHead(), "token": PerToken()}


class CachedAttention(DecoderAttention):
    """The attention of one module.

    previous: the name of the function that its config had. was_emulated: whether compressed-tensors
    rounded its keys and values on their way to the cache, which would round them twice.
    """

    previous: str
    was_emulated: bool


def attach(
    model: nn.Module,
    settings: KvCacheSettings | None,
    *,
    skip_layers: frozenset[str] = frozenset(),
    scales: ScaleSet | None = None,
    promote_every: int | None = 1,
) -> list[str]:
    """Give a decoder a paged cache in FP8; returns the names of the layers in FP8.

    settings: None stores keys and values as they are, and quantizes nothing. skip_layers: names of
    layers that do so. scales: for static scaling; every layer in FP8 must be among them, by the
    model's name or vLLM's.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    found, windows = text.find_layers(model), text.find_windows(model)
    _, decoder = text.find_decoder(model)
    if any(hasattr(module, CHILD) for module in found.values()):
        raise ConfigError("apply_ has changed the model's KV cache: restore_ it first")
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
            stacklevel=4,
        )
    made = {}
    for name, module in found.items():
        own = settings if name in chosen else None
        made[name] = _make_layer(name, module, windows[name], own, given.get(name), promote_every)
        made[name].counts_saturation = is_unit and own is not None
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, keep_mask)
    for name, layer in made.items():
        attention: Any = found[name]
        layer.previous = attention.config._attn_implementation
        layer.was_emulated = _emulate(attention, False)
        attention.add_module(CHILD, layer.to(_device(attention)))
    # After the last layer has seen the previous name: they share their config.
    for attention in found.values():
        attention.config._attn_implementation = IMPLEMENTATION
    hook = partial(give_pages, Watch())
    handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    setattr(decoder, HOOK, handle)
    return chosen


def detach(model: nn.Module) -> list[str]:
    """Undo `attach`; returns the names of the layers that were in FP8."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, CHILD, None), CachedAttention)
    }
    undone = []
    for name, module in found.items():
        layer: Any = getattr(module, CHILD)
        module.config._attn_implementation = layer.previous
        if layer.was_emulated:
            _emulate(module, True)
        undone += [] if layer.dtype is None else [name]
        delattr(module, CHILD)
    for module in model.modules():
        if (handle := vars(module).pop(HOOK, None)) is not None:
            handle.remove()
    return undone


def _check_config(decoder: Any) -> None:
    if getattr(decoder.config, "num_kv_shared_layers", 0):
        raise UnsupportedError(
            f"{type(decoder).__name__}: expected a cache for every layer, got layers that share one"
        )


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


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


def give_pages(watch: Watch, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook: give a call's cache pages, and let attention know the pass."""
    from transformers import DynamicCache

    watch.look(decoder)
    if len(args) > 1:
        raise UnsupportedError("expected the decoder's arguments by name, got them by position")
    cache = kwargs.get("past_key_values")
    if cache is None:
        asked = kwargs.get("use_cache")
        if not (decoder.config.use_cache if asked is None else asked):
            return None
        cache = kwargs["past_key_values"] = DynamicCache(config=decoder.config)
    from octavo.integrations.transformers.paged_steps import Pass

    sequences = convert(cache, decoder)
    kwargs[PASS] = Pass(cache.layers, sequences)
    return args, kwargs


def convert(cache: Any, decoder: Any) -> Any:
    """Give a cache our layers, unless it has them; returns what they share."""
    from transformers import DynamicCache

    from octavo.integrations.transformers.paged_cache import PagedLayer
    from octavo.integrations.transformers.paged_steps import Sequences

    paged = [layer for layer in cache.layers if isinstance(layer, PagedLayer)]
    if paged:
        return paged[0].sequences
    if getattr(cache, "offloading", False):
        raise UnsupportedError("expected a cache on the device, got one that is offloaded")
    if not cache.layers:
        cache.layers = DynamicCache(config=decoder.config).layers
        cache.layer_class_to_replicate = None
    sequences = Sequences()
    modules = {
        module.layer_idx: module
        for module in decoder.modules()
        if isinstance(getattr(module, CHILD, None), CachedAttention)
    }
    full = [i for i, module in modules.items() if getattr(module, CHILD).spec.window is None]
    max_lengths = {index: _static_length(cache.layers[index], cache) for index in modules}
    for index, module in modules.items():
        cache.layers[index] = PagedLayer(
            getattr(module, CHILD),
            sequences,
            is_first=index == min(modules),
            checks_room=index == min(full, default=None),
            max_length=max_lengths[index],
        )
    return sequences


def _static_length(layer: Any, cache: Any) -> int | None:
    """The room of a static layer, None for a dynamic one; UnsupportedError for other kinds."""
    from transformers import cache_utils

    if layer.is_initialized:
        raise ConfigError("expected an empty cache, got one with tokens of another attention")
    dynamic = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    static = (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer)
    if type(layer) in dynamic:
        return None
    if type(layer) in static:
        lengths = [x.max_cache_len for x in cache.layers if type(x) in static]
        return int(max(lengths))
    raise UnsupportedError(
        f"expected a dynamic or static cache, got layers of {type(layer).__name__} in a "
        f"{type(cache).__name__}"
    )


def keep_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of attention by our name: that of padding, as it came.

    transformers builds masks from functions; ours knows causal attention and windows alone.
    """
    if use_vmap or (not allow_is_causal_skip and q_length > 1):
        raise UnsupportedError(
            "expected causal attention, with a window or without, got a mask of another kind "
            "(packed sequences, or tokens that see later ones)"
        )
    return attention_mask


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [batch, heads, columns, head_dim] over the cache."""
    layer = getattr(module, CHILD, None)
    if not isinstance(layer, CachedAttention):
        raise UnsupportedError(f"{type(module).__name__}: expected a layer that apply_ reached")
    _check_call(layer, attention_mask, dropout, is_causal, (scaling, softcap, sliding_window))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    run = kwargs.get(PASS)
    if run is None:  # without a cache nothing is stored, and nothing quantized
        mask = None if attention_mask is None else attention_mask[:, -k.shape[1] :].bool()
        return ops.attention(q, k, v, layer.spec, sinks=s_aux, key_mask=mask), None
    mask = None if attention_mask is None else attention_mask.bool()
    return run.layers[module.layer_idx].attend(q, k, v, mask, run, s_aux), None


def _check_call(
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
