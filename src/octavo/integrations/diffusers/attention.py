"""FP8 attention as an attention backend of diffusers.

diffusers' backends are the members of a closed enum. Ours is appended to it, and set on the
processors of single layers: never as the active backend, which every other model would take.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from diffusers import AttentionBackendName
from torch import Tensor, nn

from octavo import ops
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.attention_scales import as_tensors
from octavo.integrations.diffusers.current_layer import (
    Left,
    add_backend,
    current_scales,
    hook_scales,
    take_left,
)
from octavo.integrations.diffusers.fused_attention import fuse_, is_fused, is_ours, unfuse_
from octavo.integrations.diffusers.masks import reduce_mask
from octavo.integrations.diffusers.two_streams import Three
from octavo.integrations.linear import layer_index
from octavo.internals import internals, require
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales
from octavo.ops.check import check_fp8_device
from octavo.patterns import Layer
from octavo.recipe import AttentionSettings

with internals("diffusers"):
    from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
with internals("torch"):
    from torch.overrides import _get_current_function_mode_stack

require("diffusers.models.attention.AttentionModuleMixin._attention_backend")

BACKEND = "octavo"
_LABEL = "FP8 attention"
# Where a processor keeps the backend that it had before.
_PREVIOUS = "_octavo_previous_backend"
# Where a layer keeps the hooks that hand its static scales to the backend.
_HOOKS = "_octavo_scale_hooks"


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a model that ask diffusers for a backend, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    }


def find_others(model: nn.Module) -> dict[str, str]:
    """The attention layers that ask for no backend, with the reason why they stay."""
    others = {}
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if callable(processor) and not hasattr(processor, "_attention_backend"):
            others[name] = f"{type(processor).__name__} asks for no backend"
    return others


def as_patterns_see(model: nn.Module) -> list[Layer]:
    """The attention layers as `skip_layers` sees them."""
    return [Layer(name, layer_index(name)) for name in find_layers(model)]


def choose_layers(
    model: nn.Module, skip_layers: frozenset[str] = frozenset()
) -> dict[str, nn.Module]:
    """The layers that `attach` changes, by name; raises whatever is wrong with one."""
    layers = find_layers(model)
    chosen = {name: layer for name, layer in layers.items() if name not in skip_layers}
    if not chosen:
        raise UnsupportedError(
            "attention: expected attention layers that ask diffusers for a backend, got none in "
            f"{type(model).__name__}"
        )
    processors: dict[str, Any] = {name: layer.processor for name, layer in layers.items()}
    skipped = {id(processors[name]): name for name in layers.keys() - chosen.keys()}
    for name in chosen:
        _check_processor(name, processors[name], skipped.get(id(processors[name])))
    return chosen


def check_scales(
    names: Iterable[str], settings: AttentionSettings, scales: ScaleSet | None
) -> dict[str, QkvScales]:
    """The static scales of these layers; none if they are dynamic."""
    if settings.scaling != "static":
        return {}
    if scales is None:
        raise ConfigError("expected scales for scaling 'static', got none: Recipe(scales=…)")
    scales.require_kind("pipeline")
    scales.require_plain_keys("attention")
    names = list(names)
    scales.require(names)
    return {name: as_tensors(scales.layers[name], settings, name) for name in names}


def attach(
    model: nn.Module,
    settings: AttentionSettings,
    *,
    skip_layers: frozenset[str] = frozenset(),
    scales: ScaleSet | None = None,
    promote_every: int | None = 1,
) -> list[str]:
    """Let a model's attention layers run in FP8; returns their names.

    scales: for static scaling, by the names of the layers.
    """
    chosen = choose_layers(model, skip_layers)
    static = check_scales(chosen, settings, scales)
    member = register(settings, promote_every)
    for name, layer in chosen.items():
        processor: Any = layer.processor
        if not hasattr(processor, _PREVIOUS):  # one processor may serve several layers
            setattr(processor, _PREVIOUS, processor._attention_backend)
            fuse_(processor, member)
        processor._attention_backend = member
        for hook in getattr(layer, _HOOKS, ()):  # of a processor that diffusers has replaced
            hook.remove()
        if name in static:
            device = next((x.device for x in layer.parameters()), None)
            placed = QkvScales(*(x.to(device) for x in _parts(static[name])))
            setattr(layer, _HOOKS, hook_scales(layer, placed))
    return list(chosen)


def _parts(scales: QkvScales) -> tuple[Tensor, Tensor, Tensor]:
    return scales.q, scales.k, scales.v


def _check_processor(name: str, processor: Any, skipped: str | None) -> None:
    if skipped is not None:
        raise UnsupportedError(
            f"attention layer {name}: expected a processor of its own, got one that it shares with "
            f"{skipped}, which is skipped: skip both or none"
        )
    if hasattr(processor, _PREVIOUS):
        raise ConfigError(f"attention layer {name}: expected plain attention, got FP8 already")
    if getattr(processor, "_parallel_config", None) is not None:
        raise UnsupportedError(
            f"attention layer {name}: expected attention on one device, got context parallelism"
        )


def detach(model: nn.Module) -> list[str]:
    """Give the layers back the backends that they had; returns the names of the layers."""
    names, processors = [], {}
    for name, layer in find_layers(model).items():
        processor: Any = layer.processor
        # diffusers may have made another processor, or one of our class without a backend.
        if hasattr(processor, _PREVIOUS) or hasattr(layer, _HOOKS) or is_ours(processor):
            names.append(name)
        if hasattr(processor, _PREVIOUS):
            processors[id(processor)] = processor
        if hasattr(layer, _HOOKS):
            for hook in getattr(layer, _HOOKS):
                hook.remove()
            delattr(layer, _HOOKS)
    for processor in processors.values():
        processor._attention_backend = getattr(processor, _PREVIOUS)
        delattr(processor, _PREVIOUS)
    for layer in find_layers(model).values():
        unfuse_(layer.processor)
    return names


def find_fused(model: nn.Module) -> list[str]:
    """The layers whose norms and rotary embedding are part of the pass that quantizes."""
    return [name for name, layer in find_layers(model).items() if is_fused(layer)]


def register(settings: AttentionSettings, promote_every: int | None = 1) -> AttentionBackendName:
    """diffusers' backend for FP8 attention with these settings; made once for each of them.

    A backend learns nothing of the layer that calls it: settings that are not the default have a
    backend of their own.
    """
    name = BACKEND
    if settings.scaling == "static":
        name += "_static"  # whose granularity is that of the layer's scales
    elif settings.granularity != "tensor":
        name += f"_{settings.granularity}"
    if promote_every != 1:
        name += f"_promote_{promote_every or 'never'}"
    return add_backend(name, _make_backend(settings, promote_every))


def _make_backend(settings: AttentionSettings, promote_every: int | None) -> Callable[..., Tensor]:
    granularity = PerHead() if settings.granularity == "head" else PerTensor()
    is_static = settings.scaling == "static"

    def octavo_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: object = None,
        **others: object,
    ) -> Tensor:
        left = take_left()
        refused = {"return_lse": return_lse, "parallel_config": _parallel_config, **others}
        _refuse(dropout_p, **refused)
        _check_shapes(query, key, enable_gqa, is_causal, attn_mask is not None)
        check_fp8_device(_LABEL, query.device, None)
        if _skips_scores() and query.shape == value.shape:
            return value
        reduced = None
        if attn_mask is not None:
            sizes = (query.shape[0], query.shape[1], key.shape[1])
            reduced = reduce_mask(attn_mask.to(query.device), *sizes)
        qkv, first = _find_streams(left, (query, key, value))
        quantized = ops.quantize_qkv(
            *qkv,
            current_scales(query) if is_static else None,
            granularity=None if is_static else granularity,
            norm=None if left is None else left.norm,
            rotary=None if left is None else left.rotary,
            value_layout="transposed" if query.is_cuda else "rows",
            first=first,
        )
        spec = AttentionSpec(causal=is_causal, softmax_scale=scale, promote_every=promote_every)
        out = ops.attention(
            *(quantized.q, quantized.k, quantized.v, spec, quantized.scales),
            key_mask=None if reduced is None else reduced.keys,
            out_dtype=query.dtype,
            value_layout=quantized.value_layout,
        )
        if reduced is not None and reduced.queries is not None:
            out = torch.where(reduced.queries[:, :, None, None], out, 0.0)
        return out

    return octavo_attention


def _skips_scores() -> bool:
    """Whether diffusers replaces attention by its values here, as perturbed guidance does."""
    modes = _get_current_function_mode_stack()
    return any(isinstance(mode, AttentionScoreSkipFunctionMode) for mode in modes)


def _find_streams(left: Left | None, qkv: Three) -> tuple[Three, Three | None]:
    """q, k and v, and those of a text in front of them that need not be concatenated."""
    found = None if left is None else left.streams.take(qkv, left.norm.num_first)
    return (qkv, None) if found is None else found


def _refuse(dropout_p: float, **others: object) -> None:
    """Raise for what was asked for and FP8 attention cannot do."""
    if dropout_p:
        raise UnsupportedError(f"{_LABEL}: expected dropout_p 0, got {dropout_p}")
    for name, value in others.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"{_LABEL}: expected no {name}, got {value}")


def _check_shapes(
    query: Tensor, key: Tensor, enable_gqa: bool, is_causal: bool, has_mask: bool
) -> None:
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ConfigError(
            f"{_LABEL}: expected as many KV heads as heads, or enable_gqa, got {key.shape[2]} and "
            f"{query.shape[2]}"
        )
    if is_causal and has_mask:
        raise UnsupportedError(f"{_LABEL}: expected is_causal or a mask, got both")
    if is_causal and query.shape[1] != key.shape[1]:
        # torch lines up the first query with the first key, octavo the last with the last.
        raise UnsupportedError(
            f"{_LABEL}: expected causal queries of the same tokens as the keys, got "
            f"{query.shape[1]} queries and {key.shape[1]} keys"
        )
