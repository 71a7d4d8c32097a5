"""Vision towers of transformers models with attention in FP8, or in BF16 by the same path.

transformers looks an attention function up by the name in a tower's config. Ours finds the layer's
scales on the module it is called for; the name contains "flash", which makes towers of packed
images hand over all of them in one call per layer, with their cumulative lengths. Where a module's
own forward does more than it must before that call, `fused_vision` has another.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.attention_scales import as_tensors
from octavo.integrations.placement import device_of
from octavo.integrations.transformers import fused_vision
from octavo.internals import internals, require
from octavo.layers.encoder_attention import EncoderAttention
from octavo.ops.check import check_fp8_device
from octavo.recipe import AttentionSettings, Bf16Settings

IMPLEMENTATION = fused_vision.IMPLEMENTATION
CHILD = fused_vision.CHILD
# Attention of vision towers, by class: of those that pack all images into one sequence, and of
# those with a batch of equal ones (older versions of transformers have "SelfAttention" inside ViT's
# and DINOv2's). The third kind also serves text towers.
PACKED = frozenset(
    {
        "Glm4vVisionAttention",
        "PixtralAttention",
        "Qwen2_5_VLVisionAttention",
        "Qwen3VLMoeVisionAttention",
        "Qwen3VLVisionAttention",
        "Qwen3_5MoeVisionAttention",
        "Qwen3_5VisionAttention",
        "VisionAttention",
    }
)
BATCHED = frozenset(
    {
        "DINOv3ViTAttention",
        "Dinov2Attention",
        "Dinov2SelfAttention",
        "InternVLVisionAttention",
        "ViTAttention",
        "ViTSelfAttention",
    }
)
SHARED = frozenset({"CLIPAttention", "Siglip2Attention", "SiglipAttention"})
# Whose encoder and decoder have one attention class and one config: a layer of the encoder is told
# by its place, and never called by the name in the config.
WHISPER = fused_vision.WHISPER
WHISPER_ENCODER = "WhisperEncoder"

# What attention functions of other layers are given, and would change the result.
REFUSED = ("s_aux", "sliding_window", "softcap")


class TowerAttention(EncoderAttention):
    """The attention of one module of a tower.

    previous: the name of the attention function that its config had before; None if it has it
    still. is_fused: whether the module runs a forward of `fused_vision`. is_skipped: whether the
    recipe left the layer as it was.
    """

    previous: str | None
    is_fused: bool
    is_skipped: bool


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

    skip_layers: names of layers to leave. scales: for static scaling; every other layer must be
    among them, by the model's name or vLLM's. impl: of the op `attention`, for these layers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    with internals("transformers"):
        from transformers.masking_utils import flash_attention_mask

    require("transformers.PreTrainedConfig._attn_implementation")
    found = find_layers(model)
    if any(hasattr(module, CHILD) for module in found.values()):
        raise ConfigError("apply_ has changed the model's vision attention: restore_ it first")
    chosen = {name: module for name, module in found.items() if name not in skip_layers}
    _check_not_offloaded(found)
    if not chosen:
        raise ConfigError(
            f"skip_layers leaves none of the {len(found)} layers: leave the recipe out"
        )
    fp8 = settings if isinstance(settings, AttentionSettings) else None
    if fp8 is None:
        _check_dtypes(chosen)
    else:
        for name, module in chosen.items():
            check_fp8_device(name, device_of(module), impl)
    if scales is not None:
        scales.require_kind("vision_attention")
        scales.require_plain_keys("vision_attention")
        scales.require([_file_name(name, scales) for name in chosen])
    forwards = {name: fused_vision.find_forward(module) for name, module in chosen.items()}
    _check_whisper(chosen, forwards)
    made = {}
    for name, module in found.items():
        if name in chosen or type(module).__name__ != WHISPER:
            own = fp8 if name in chosen else None
            made[name] = _make_layer(name, module, own, scales, promote_every)
            made[name].is_skipped = name not in chosen
            made[name].impl = impl if name in chosen else None
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, flash_attention_mask)
    for name, layer in made.items():
        forward = forwards.get(name)
        layer.is_fused = forward is not None
        found[name].add_module(CHILD, layer)
        if forward is not None:
            fused_vision.fuse(found[name], forward)
    for name, layer in made.items():
        if layer.previous is not None:
            _config(found[name])._attn_implementation = IMPLEMENTATION
    return list(chosen)


def detach(model: nn.Module) -> list[str]:
    """Undo `attach`; returns the names of the layers that it gave another attention."""
    found = {n: m for n, m in model.named_modules() if isinstance(_layer(m), TowerAttention)}
    for name, module in found.items():
        if _layer(module).is_fused and not fused_vision.is_fused(module):
            raise ConfigError(
                f"{name}: expected the forward that apply_ put there, got another: undo what "
                "replaced it first"
            )
    undone = []
    for name, module in found.items():
        layer = _layer(module)
        if layer.previous is not None:
            _config(module)._attn_implementation = layer.previous
        if layer.is_fused:
            fused_vision.unfuse(module)
        delattr(module, CHILD)
        undone += [] if layer.is_skipped else [name]
    return undone


def find_fused(model: nn.Module) -> list[str]:
    """The layers whose forward hands its projections straight to ours, by their names."""
    return [name for name, module in model.named_modules() if fused_vision.is_fused(module)]


def _layer(module: nn.Module) -> Any:
    return getattr(module, CHILD, None)


def _check_whisper(
    chosen: Mapping[str, nn.Module], forwards: Mapping[str, fused_vision.Forward | None]
) -> None:
    for name, module in chosen.items():
        if type(module).__name__ == WHISPER and forwards[name] is None:
            raise UnsupportedError(
                f"{name}: expected the forward of transformers' {WHISPER}, got another: apply "
                "octavo before what replaces it"
            )


def _check_not_offloaded(found: Mapping[str, nn.Module]) -> None:
    """Weights that come only for a call do not say where their scales must lie."""
    for name, module in found.items():
        if any(parameter.is_meta for parameter in module.parameters()):
            raise UnsupportedError(
                f"{name}: expected weights in memory, got them on meta, offloaded or not loaded: "
                "apply_ first, then offload"
            )


def _check_dtypes(chosen: Mapping[str, nn.Module]) -> None:
    """Attention in BF16 is in the model's own dtype, which must then have 16 bits."""
    for name, module in chosen.items():
        # FP8 weights are buffers, and do not say.
        dtypes = {parameter.dtype for parameter in module.parameters()}
        for dtype in dtypes & {torch.float32, torch.float64}:
            raise UnsupportedError(
                f"{name}: expected a model in bfloat16 or float16 for vision_attention 'bf16', got "
                f"{dtype}: load it with dtype='bfloat16'"
            )


def _config(module: nn.Module) -> Any:
    return module.config


def _make_layer(
    name: str,
    module: nn.Module,
    settings: AttentionSettings | None,
    scales: ScaleSet | None,
    promote_every: int | None,
) -> TowerAttention:
    """The layer of one module; without settings it attends in the model's dtype."""
    named, sizes = vars(module), _sizes(module)
    assert sizes is not None  # as find_layers promises
    scaling = named.get("scaling", named.get("scale"))
    given = None
    if scales is not None and settings is not None:
        given = as_tensors(scales.layer(_file_name(name, scales)), settings, name)
    layer = TowerAttention(
        *sizes,
        None if scaling is None else float(scaling),
        name=name,
        fp8=settings,
        scales=given,
        promote_every=promote_every,
    )
    is_by_name = type(module).__name__ != WHISPER
    layer.previous = _config(module)._attn_implementation if is_by_name else None
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
    layer: TowerAttention = getattr(module, CHILD)
    _check_call(module, layer, attention_mask, scaling, dropout, is_causal)
    if given := sorted(name for name in REFUSED if kwargs.get(name) is not None):
        raise UnsupportedError(f"{type(module).__name__}: got {', '.join(given)}, which it has not")
    if cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q:
        raise UnsupportedError(
            f"{type(module).__name__}: expected one cu_seq_lens for queries and keys, got two"
        )
    packed: Mapping[str, Any] = {}
    if type(module).__name__ in PACKED and (cu_seq_lens_q is None or max_length_q is None):
        raise UnsupportedError(
            f"{type(module).__name__}: expected cu_seq_lens_q and max_length_q, which keep images "
            "apart, got none: update transformers"
        )
    if cu_seq_lens_q is not None and max_length_q is not None:
        packed = {"cu_seqlens": cu_seq_lens_q.to(torch.int32), "max_seqlen": int(max_length_q)}
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return layer(q, k, v, **packed), None


def _check_call(
    module: Any,
    layer: EncoderAttention,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
) -> None:
    """Whatever the layer would not do is refused, never dropped."""
    kind = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedError(f"{kind}: expected images without padding, got an attention mask")
    if dropout:
        raise UnsupportedError(f"{kind}: this attention is for inference, got dropout {dropout}")
    if is_causal or (is_causal is None and getattr(module, "is_causal", False)):
        raise UnsupportedError(f"{kind}: expected attention to all keys, got a causal call")
    expected = layer.spec.softmax_scale
    if None not in (expected, scaling) and expected != scaling:
        raise UnsupportedError(f"{kind}: expected scaling {expected}, got {scaling}")
