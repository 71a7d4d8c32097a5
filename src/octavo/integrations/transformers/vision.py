"""Vision towers of transformers models with attention in FP8, or in BF16 by the same path.

transformers looks an attention function up by the name in a tower's config. "flash" in ours makes
towers hand over all packed images in one call per layer. Where a module's own forward does more
than it must before that call, `fused_vision` has another.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.attention_layers import as_tensors, device_of
from octavo.integrations.patch import begin_patch, find_patched, undo_patches_
from octavo.integrations.transformers import fused_vision
from octavo.internals import internals, require
from octavo.layers.encoder_attention import EncoderAttention
from octavo.ops.check import check_attention_impl, check_fp8_device
from octavo.recipe import AttentionSettings, Bf16Settings

FEATURE = "vision_attention"
IMPLEMENTATION = fused_vision.IMPLEMENTATION
CHILD = fused_vision.CHILD
# Attention of vision towers, by class: of those that pack all images into one sequence, and of
# those with a batch of equal ones. The third kind also serves text towers.
PACKED = {family.attention for family in fused_vision.FAMILIES.values()} | {"PixtralAttention"}
BATCHED = {
    "DINOv3ViTAttention",
    "Dinov2Attention",
    "Dinov2SelfAttention",  # inside the former in transformers 5.17
    "InternVLVisionAttention",
    "ViTAttention",
}
SHARED = {"CLIPAttention", "Siglip2Attention", "SiglipAttention"}
# Whose encoder and decoder have one attention class and one config: a layer of the encoder is told
# by its place, and never called by the name in the config.
WHISPER = fused_vision.WHISPER
WHISPER_ENCODER = "WhisperEncoder"

# What attention functions of other layers are given, and would change the result.
REFUSED = ("s_aux", "sliding_window", "softcap")


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of a model's vision tower or Whisper encoder, by their names."""
    modules = dict(model.named_modules())
    found = {name: m for name, m in modules.items() if _is_vision(m)}
    for encoder in (m for m in modules.values() if type(m).__name__ == WHISPER_ENCODER):
        inside = set(encoder.modules())
        found |= {n: m for n, m in modules.items() if m in inside and type(m).__name__ == WHISPER}
    if not found:
        classes = {type(m).__name__ for m in modules.values()}
        ours = ", ".join([*sorted(PACKED | BATCHED | SHARED), f"{WHISPER} in an encoder"])
        theirs = ", ".join(sorted(c for c in classes if "Attention" in c)) or "none"
        raise UnsupportedError(
            f"expected a vision tower with one of these attention classes: {ours}; got "
            f"{type(model).__name__} with {theirs}"
        )
    return found


def _is_vision(module: nn.Module) -> bool:
    kind = type(module).__name__
    config = type(getattr(module, "config", None)).__name__
    is_one = kind in PACKED | BATCHED or (kind in SHARED and "Vision" in config)
    return is_one and _sizes(module) is not None  # not one that only holds another


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(heads, head_dim) of an attention module, by the names that models have for them."""
    named = vars(module)
    num_heads = named.get("num_heads", named.get("num_attention_heads"))
    head_dim = named.get("head_dim", named.get("attention_head_size"))
    return None if num_heads is None or head_dim is None else (num_heads, head_dim)


def scale_name(name: str) -> str:
    """What scale files call a layer: as vLLM does for the Qwen families, else as the model does."""
    # A tower by itself has no "visual" in its names.
    match = re.fullmatch(r"(?:(?:.+\.)?visual\.)?(blocks\.\d+\.attn)", name)
    return f"visual.{match[1]}.attn" if match else name


def attach(
    model: nn.Module,
    settings: AttentionSettings | Bf16Settings,
    *,
    skip_layers: frozenset[str] = frozenset(),
    scales: ScaleSet | None = None,
    promote_every: int | None = 1,
    impl: str | None = None,
) -> list[str]:
    """Give a vision tower's layers attention in FP8 or BF16; returns their names.

    skip_layers: names of layers to leave. scales: for static scaling, of every other layer, by the
    model's names or vLLM's. impl: of the op `attention`, for these layers.
    """
    found = find_layers(model)
    if find_patched(model, FEATURE):
        raise ConfigError("apply_ has changed the model's vision attention: restore_ it first")
    chosen = {name: module for name, module in found.items() if name not in skip_layers}
    fp8 = settings if isinstance(settings, AttentionSettings) else None
    forwards = {name: fused_vision.find_forward(module) for name, module in chosen.items()}
    if not chosen:
        raise ConfigError(
            f"skip_layers leaves none of the {len(found)} layers: leave the recipe out"
        )
    _check_not_offloaded(found)
    for name, module in chosen.items():
        _check_module(name, module, fp8, forwards[name], impl)
    if scales is not None:
        scales.require_kind("vision_attention")
        scales.require_plain_keys("vision_attention")
        scales.require([_file_name(name, scales) for name in chosen])
    made = {}
    for name, module in found.items():
        if name in chosen:
            made[name] = make_layer(name, module, fp8, scales, promote_every, impl)
        elif type(module).__name__ != WHISPER:
            made[name] = make_layer(name, module, promote_every=promote_every)
    register(IMPLEMENTATION, attend)
    for name, layer in made.items():
        module = found[name]
        patch = begin_patch(module, FEATURE, is_listed=name in chosen)
        patch.set(module, CHILD, layer)
        if (forward := forwards.get(name)) is not None:
            # A partial, not a method: those lose themselves when a module is pickled.
            patch.set(module, "forward", partial(forward, module))
        if type(module).__name__ != WHISPER:  # whose encoder shares its config with the decoder
            patch.set(module.config, "_attn_implementation", IMPLEMENTATION)
    return list(chosen)


def register(name: str, function: Callable[..., Any]) -> None:
    """Let transformers know an attention function that takes the masks of flash attention."""
    from transformers import AttentionInterface, AttentionMaskInterface

    with internals("transformers"):
        from transformers.masking_utils import flash_attention_mask

    require("transformers.PreTrainedConfig._attn_implementation")
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, flash_attention_mask)


def detach(model: nn.Module) -> list[str]:
    """Undo `attach`; returns the names of the layers that it gave another attention."""
    return undo_patches_(model, FEATURE)


def find_fused(model: nn.Module) -> list[str]:
    """The layers whose forward hands its projections straight to ours, by their names."""
    return [name for name, module in model.named_modules() if fused_vision.is_fused(module)]


def _check_not_offloaded(found: Mapping[str, nn.Module]) -> None:
    """Weights that come only for a call do not say where their scales must lie."""
    for name, module in found.items():
        if any(parameter.is_meta for parameter in module.parameters()):
            raise UnsupportedError(
                f"{name}: expected weights in memory, got them on meta, offloaded or not loaded: "
                "apply_ first, then offload"
            )


def _check_module(
    name: str,
    module: nn.Module,
    fp8: AttentionSettings | None,
    forward: fused_vision.Forward | None,
    impl: str | None,
) -> None:
    if type(module).__name__ == WHISPER and forward is None:
        raise UnsupportedError(
            f"{name}: expected the forward of {WHISPER}, got another: apply octavo before it"
        )
    if fp8 is not None:
        check_fp8_device(name, device_of(module), impl)
        return
    # FP8 weights are buffers, and do not say which dtype the model runs in.
    dtypes = {parameter.dtype for parameter in module.parameters()}
    for dtype in dtypes & {torch.float32, torch.float64}:
        raise UnsupportedError(
            f"{name}: expected a model in bfloat16 or float16 for vision_attention 'bf16', got "
            f"{dtype}: load it with dtype='bfloat16'"
        )


def make_layer(
    name: str,
    module: nn.Module,
    settings: AttentionSettings | None = None,
    scales: ScaleSet | None = None,
    promote_every: int | None = 1,
    impl: str | None = None,
) -> EncoderAttention:
    """The layer of one module; without settings it attends in the model's dtype."""
    named, sizes = vars(module), _sizes(module)
    assert sizes is not None  # as find_layers promises
    scaling = named.get("scaling", named.get("scale"))
    given = None
    if scales is not None and settings is not None:
        given = as_tensors(scales.layer(_file_name(name, scales)), settings, name)
    layer = EncoderAttention(
        *sizes,
        None if scaling is None else float(scaling),
        name=name,
        fp8=settings,
        scales=given,
        promote_every=promote_every,
        impl=impl,
    )
    return layer.to(device_of(module))


def _file_name(name: str, scales: ScaleSet) -> str:
    return name if name in scales.layers else scale_name(name)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: q, k, v [batch, heads, length, head_dim] → [batch, length, …]."""
    kind, layer = type(module).__name__, getattr(module, CHILD)
    if attention_mask is not None:
        raise UnsupportedError(f"{kind}: expected images without padding, got an attention mask")
    if is_causal or (is_causal is None and getattr(module, "is_causal", False)):
        raise UnsupportedError(f"{kind}: expected attention to all keys, got a causal call")
    expected = layer.spec.softmax_scale
    if None not in (expected, scaling) and expected != scaling:
        raise UnsupportedError(f"{kind}: expected scaling {expected}, got {scaling}")
    fused_vision.check_call(kind, dropout, kwargs, REFUSED)
    if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q:
        raise UnsupportedError(
            f"{kind}: expected one cu_seq_lens for queries and keys, got two cu_seq_lens"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if cu_seq_lens_q is not None and max_length_q is not None:
        cu_seqlens = cu_seq_lens_q.to(torch.int32)
        return layer(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=int(max_length_q)), None
    if kind in PACKED:
        raise UnsupportedError(
            f"{kind}: expected cu_seq_lens_q and max_length_q, which keep images apart, got none"
        )
    return layer(q, k, v), None


def check_vision_impl(model: nn.Module, impl: str | None) -> None:
    """UnsupportedError unless all layers in FP8 can run there, by `impl` if it is given."""
    device = next(model.parameters()).device
    for layer in model.modules():
        if isinstance(layer, EncoderAttention) and layer.scaling is not None:
            check_attention_impl(
                impl,
                device,
                layer.spec,
                head_dim=layer.head_dim,
                group=layer.num_heads // layer.num_kv_heads,
                is_per_head=layer.scaling.scales().k.dim() > 0,
            )
