"""KV caches of transformers models in FP8.

A forward pre-hook of the module that runs the decoder's layers, `give_pages`, gives whatever cache
a call brings, or would have made, layers of `paged_cache` before the first token is stored.
transformers looks up our attention by the name in the model's config. Modules that `fused_decoder`
knows have another forward instead, which passes the cache's `update` and that attention by.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from octavo import ops
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.patch import begin_patch, undo_patches_
from octavo.integrations.transformers import fused_decoder, text
from octavo.integrations.transformers.decoder_layers import CHILD, check_call, install, make_layers
from octavo.integrations.transformers.fused_decoder import IMPLEMENTATION, PASS
from octavo.integrations.transformers.fused_forward import Forward
from octavo.integrations.transformers.paged_steps import Pass, Sequences
from octavo.integrations.transformers.saturation import Watch
from octavo.layers.decoder_attention import DecoderAttention
from octavo.recipe import KvCacheSettings

FEATURE = "kv_cache"


def attach(
    model: nn.Module,
    settings: KvCacheSettings | None,
    *,
    skip_layers: frozenset[str] = frozenset(),
    scales: ScaleSet | None = None,
    promote_every: int | None = 1,
) -> list[str]:
    """Give a decoder a paged cache in FP8; returns the names of the layers in FP8.

    The arguments are those of `make_layers`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_stock_cache(model)
    _, decoder = text.find_decoder(model)
    made = make_layers(
        model, settings, skip_layers=skip_layers, scales=scales, promote_every=promote_every
    )
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, keep_mask)
    install(model, made, IMPLEMENTATION, FEATURE, _find_forwards(model, made))
    hook = partial(give_pages, Watch())
    handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    begin_patch(decoder, FEATURE, is_listed=False).hook(handle)
    return [name for name, layer in made.items() if layer.dtype is not None]


def _find_forwards(model: nn.Module, made: dict[str, DecoderAttention]) -> dict[str, Forward]:
    """The forwards of ours by layer; keys that a layer changes must have been turned before."""
    modules = text.find_layers(model)
    plain = [name for name, layer in made.items() if not layer.changes_keys]
    found = {name: fused_decoder.find_forward(modules[name]) for name in plain}
    return {name: forward for name, forward in found.items() if forward is not None}


def find_fused(model: nn.Module) -> list[str]:
    """The layers in FP8 whose forward hands its projections straight to ours, by their names."""
    fused = {name: m for name, m in model.named_modules() if fused_decoder.is_fused(m)}
    return [name for name, m in fused.items() if m.get_submodule(CHILD).dtype is not None]


def detach(model: nn.Module) -> list[str]:
    """Undo `attach`; returns the names of the layers that were in FP8."""
    return undo_patches_(model, FEATURE)


def give_pages(watch: Watch, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook: give a call's cache pages, and let attention know the pass."""
    from transformers import Cache, DynamicCache

    watch.look(decoder)
    if len(args) > 1:
        raise UnsupportedError("expected the decoder's arguments by name, got them by position")
    cache = kwargs.get("past_key_values")
    if cache is None:
        asked = kwargs.get("use_cache")
        if not (decoder.config.use_cache if asked is None else asked):
            return None
        cache = kwargs["past_key_values"] = DynamicCache(config=decoder.config)
    sequences = convert(cache, decoder)
    # Not overridden by its class, nor replaced on the instance.
    is_stock = getattr(cache.update, "__func__", None) is Cache.update
    kwargs[PASS] = Pass(cache.layers, sequences, cache if is_stock else None)
    return args, kwargs


def convert(cache: Any, decoder: Any) -> Sequences:
    """Give a cache our layers, unless it has them; returns what they share."""
    from transformers import DynamicCache

    from octavo.integrations.transformers.paged_cache import PagedLayer

    paged = next((layer for layer in cache.layers if isinstance(layer, PagedLayer)), None)
    if paged is not None:
        return paged.sequences
    if getattr(cache, "offloading", False):
        raise UnsupportedError("expected a cache on the device, got one that is offloaded")
    if not cache.layers:
        cache.layers = DynamicCache(config=decoder.config).layers
        cache.layer_class_to_replicate = None
    children = ((m, getattr(m, CHILD, None)) for m in decoder.modules())
    found = {m.layer_idx: one for m, one in children if isinstance(one, DecoderAttention)}
    full = [index for index, attention in found.items() if attention.spec.window is None]
    max_length, sequences = _max_length(cache, found), Sequences()
    for index, attention in found.items():
        cache.layers[index] = PagedLayer(
            attention,
            sequences,
            is_first=index == min(found),
            checks_room=index == min(full, default=None),
            max_length=max_length,
        )
    return sequences


def check_stock_cache(model: nn.Module) -> None:
    """UnsupportedError unless the layers of the cache that transformers makes can have pages."""
    from transformers import DynamicCache

    _, decoder = text.find_decoder(model)
    modules: Any = text.find_layers(model).values()
    _max_length(DynamicCache(config=decoder.config), [m.layer_idx for m in modules])


def _max_length(cache: Any, indices: Iterable[int]) -> int | None:
    """The room of a static cache, None of a dynamic one; UnsupportedError for other kinds."""
    from transformers import cache_utils

    layers = [cache.layers[index] for index in indices]
    if any(layer.is_initialized for layer in layers):
        raise ConfigError("expected an empty cache, got one with tokens of another attention")
    kinds = {type(layer) for layer in layers}
    if kinds <= {cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer}:
        return None
    if kinds <= {cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer}:
        return max(int(layer.max_cache_len) for layer in layers)
    raise UnsupportedError(
        "expected a dynamic or static cache, got layers of "
        f"{', '.join(sorted(kind.__name__ for kind in kinds))} in a {type(cache).__name__}"
    )


def keep_mask(
    *,
    q_length: int,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of padding, as it came: our attention knows causal order and windows alone."""
    if use_vmap or (not allow_is_causal_skip and q_length > 1):
        raise UnsupportedError(
            "expected causal attention, got a mask for packed sequences or for later tokens"
        )
    return attention_mask


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # the name matters: some models give it by keyword
    **call: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [batch, heads, columns, head_dim] over the cache."""
    layer = check_call(module, attention_mask, call)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    run, sinks, mask = call.get(PASS), call.get("s_aux"), attention_mask
    if run is None:  # without a cache nothing is stored, and nothing quantized
        mask = None if mask is None else mask.bool()[:, -k.shape[1] :]
        return ops.attention(q, k, v, layer.spec, sinks=sinks, key_mask=mask), None
    packed = (x.flatten(0, 1) for x in (q, k, v))
    paged = run.layers[module.layer_idx]
    return paged.attend(*packed, q.shape[1], run, mask=mask, sinks=sinks), None
