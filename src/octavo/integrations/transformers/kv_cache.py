"""KV caches of transformers models in FP8.

How plain `generate()` comes to use our cache: `give_pages`, a forward pre-hook of the module that
runs the decoder's layers. Whatever cache a call brings, or would have made itself, gets layers of
`paged_cache` in place of its own before the first token is stored. Attention is then ours as well:
a function that transformers looks up by the name in the model's config.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from octavo import ops
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers import text
from octavo.integrations.transformers.decoder_layers import (
    CHILD,
    CachedAttention,
    check_call,
    install,
    make_layers,
    uninstall,
)
from octavo.integrations.transformers.saturation import Watch
from octavo.recipe import KvCacheSettings

IMPLEMENTATION = "octavo"
PASS = "octavo_pass"  # the keyword by which attention gets what the layers of a pass share
HOOK = "octavo_kv_cache"


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

    check_stock_cache(model)
    _, decoder = text.find_decoder(model)
    made = make_layers(
        model, settings, skip_layers=skip_layers, scales=scales, promote_every=promote_every
    )
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, keep_mask)
    install(model, made, IMPLEMENTATION)
    hook = partial(give_pages, Watch())
    handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    setattr(decoder, HOOK, handle)
    return [name for name, layer in made.items() if layer.dtype is not None]


def detach(model: nn.Module) -> list[str]:
    """Undo `attach`; returns the names of the layers that were in FP8."""
    undone = uninstall(model, IMPLEMENTATION)
    for module in model.modules():
        if (handle := vars(module).pop(HOOK, None)) is not None:
            handle.remove()
    return undone


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


def check_stock_cache(model: nn.Module) -> None:
    """UnsupportedError unless the layers of the cache that transformers makes can have pages."""
    from transformers import DynamicCache

    _, decoder = text.find_decoder(model)
    cache: Any = DynamicCache(config=decoder.config)
    for module in text.find_layers(model).values():
        _static_length(cache.layers[module.layer_idx], cache)


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
    check_call(layer, attention_mask, dropout, is_causal, (scaling, softcap, sliding_window))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    run = kwargs.get(PASS)
    if run is None:  # without a cache nothing is stored, and nothing quantized
        mask = None if attention_mask is None else attention_mask[:, -k.shape[1] :].bool()
        return ops.attention(q, k, v, layer.spec, sinks=s_aux, key_mask=mask), None
    mask = None if attention_mask is None else attention_mask.bool()
    return run.layers[module.layer_idx].attend(q, k, v, mask, run, s_aux), None
